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
_METHODS: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("dflash", "eagle3", "draft_model")} | {
    "eagle1": {"method": "eagle"},
    "medusa_vllm": {"method": "medusa"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
"""How vLLM is asked for the drafting method, by layout; a speculators folder names it itself."""


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
    return {"model": str(draft.resolve()), "num_speculative_tokens": tokens, **_METHODS[layout]}


def start_and_ask(
    export: Path, bundle: Bundle, engine: str, home: Path, target: Path, pre_tokenizer: str | None = None
) -> Answered:
    """Serve the export for `target` with an engine in float32, and return what it gives.

    home: vLLM's environment, or a llama.cpp tree (or a folder with one) and its programs in build/bin. pre_tokenizer: as in `convert`. Raises UserError where the
    engine does not read the layout, or fails.
    """
    longest = max(len(p.prompt_ids) + p.max_new_tokens for p in bundle.prompts)
    context = longest + 2 * bundle.num_speculative_tokens + 1
    with TemporaryDirectory(prefix="draftsmith-verify-") as work:
        if engine == VLLM:
            speculative = speculation(bundle.layout, export, bundle.num_speculative_tokens)
            if speculative is None and "speculators" not in bundle.layout:
                raise UserError(
                    f"vLLM is not started here on the layout {bundle.layout} of {export}: start it as its README says, and give verify its --url."
                )
            model = export.absolute() if speculative is None else target.absolute()
            settings = VllmSettings(home, model, speculative, context, bundle.eos_ids)
            run = run_vllm(settings, [prompt.request for prompt in bundle.prompts], Path(work))
            return Answered(f"vLLM {run.version}", [_seen(within_text(answer)) for answer in run.answers[0.0]])
        return _ask_llama(export, bundle, home, target, Path(work), context, pre_tokenizer)


def _ask_llama(
    export: Path, bundle: Bundle, home: Path, target: Path, work: Path, context: int, pre_tokenizer: str | None
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
    settings = ServerSettings(weights, draft, kind, bundle.num_speculative_tokens, context)
    program = home / "build" / "bin" / "llama-server"
    with LlamaServerProcess(program, settings, work / "server.log") as server:
        asked = [server.complete(p.id, p.prompt_ids, p.max_new_tokens) for p in bundle.prompts]
        return Answered(f"llama.cpp {server.version()}", [_seen(answer) for answer in asked], server.end_ids)


def _seen(answer: EngineAnswer) -> Seen:
    return Seen(answer.sample_id, answer.output_ids, answer.rounds)
