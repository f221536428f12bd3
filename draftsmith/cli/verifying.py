"""Start an engine that is installed on an export, and ask it for the prompts of the parity bundle: drafted tokens are seen then."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import EngineAnswer, within_text
from draftsmith.eval.engines.llama_cpp import DRAFT_MODEL, LlamaServerProcess, ServerSettings
from draftsmith.eval.engines.vllm_client import VllmSettings, run_vllm
from draftsmith.eval.parity.bundle import Bundle
from draftsmith.eval.parity.diagnose import Seen
from draftsmith.stages.gguf import HEADS, WHOLE, convert
from draftsmith.target.gguf_file import is_gguf

VLLM, LLAMA_CPP = ENGINES = ("vllm", "llama.cpp")
_METHODS = {
    "dflash": "dflash",
    "eagle3": "eagle3",
    "eagle1": "eagle",
    "medusa_vllm": "medusa",
    "draft_model": "draft_model",
    "peagle": "eagle3",
}
"""vLLM's name of the drafting method, by layout; a speculators folder names it itself."""
_MORE: dict[str, dict[str, Any]] = {"peagle": {"parallel_drafting": True}}
"""What else a layout needs."""


@dataclass(frozen=True)
class Answered:
    """What an engine gave. engine: name and version. end_ids: that end an answer in it, none where they are the target's."""

    engine: str
    seen: list[Seen]
    end_ids: tuple[int, ...] = ()


def speculation(layout: str, draft: Path, tokens: int) -> dict[str, Any] | None:
    """Return --speculative-config for the draft in a folder, None for a layout whose folder names its target and is served by itself."""
    if layout not in _METHODS:
        return None
    own = {"method": _METHODS[layout], "model": str(draft.resolve()), "num_speculative_tokens": tokens}
    return own | _MORE.get(layout, {})


def start_and_ask(
    export: Path, bundle: Bundle, engine: str, home: Path, target: Path, pre_tokenizer: str | None = None
) -> Answered:
    """Serve the export for `target` with an engine in float32, and return what it gives.

    home: vLLM's environment, or a llama.cpp tree (or a folder with one) and its programs in build/bin. pre_tokenizer: as in `convert`. Raises UserError where the
    engine does not read the layout, or fails.
    """
    with TemporaryDirectory(prefix="draftsmith-verify-") as work:
        if engine == VLLM:
            return _ask_vllm(export, bundle, home, target, Path(work))
        return _ask_llama(export, bundle, home, target, Path(work), pre_tokenizer)


def _context(bundle: Bundle) -> int:
    K = bundle.num_speculative_tokens
    return max(len(p.prompt_ids) + p.max_new_tokens for p in bundle.prompts) + 2 * K + 1


def _ask_vllm(export: Path, bundle: Bundle, home: Path, target: Path, work: Path) -> Answered:
    speculative = speculation(bundle.layout, export, bundle.num_speculative_tokens)
    if speculative is None and "speculators" not in bundle.layout:
        raise UserError(
            f"vLLM is not started here on the layout {bundle.layout} of {export}: start it as its README says, and give verify its --url."
        )
    model = export.absolute() if speculative is None else target.absolute()
    settings = VllmSettings(home, model, speculative, _context(bundle), bundle.eos_ids)
    run = run_vllm(settings, [prompt.request for prompt in bundle.prompts], work)
    return Answered(f"vLLM {run.version}", [_seen(within_text(answer)) for answer in run.answers[0.0]])


def _ask_llama(
    export: Path, bundle: Bundle, home: Path, target: Path, work: Path, pre_tokenizer: str | None
) -> Answered:
    if bundle.layout not in (*HEADS, WHOLE):
        raise UserError(
            f"llama.cpp does not read the layout {bundle.layout} of {export}: export one of {', '.join((*HEADS, WHOLE))}."
        )
    weights, tree = target, home / "llama.cpp" if (home / "llama.cpp").is_dir() else home
    if not is_gguf(str(target)):
        weights = convert(tree, target, work / "target.gguf", "f32", pre_tokenizer=pre_tokenizer)
    beside = None if bundle.layout == WHOLE else target
    draft = convert(tree, export, work / "draft.gguf", "f32", target=beside, pre_tokenizer=pre_tokenizer)
    kind = HEADS.get(bundle.layout, DRAFT_MODEL)
    settings = ServerSettings(weights, draft, kind, bundle.num_speculative_tokens, _context(bundle))
    program = home / "build" / "bin" / "llama-server"
    with LlamaServerProcess(program, settings, work / "server.log") as server:
        asked = [server.complete(p.id, p.prompt_ids, p.max_new_tokens) for p in bundle.prompts]
        return Answered(f"llama.cpp {server.version()}", [_seen(answer) for answer in asked], server.end_ids)


def _seen(answer: EngineAnswer) -> Seen:
    return Seen(answer.sample_id, answer.output_ids, answer.rounds)
