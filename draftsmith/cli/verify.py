"""`draftsmith verify`: replay an export's parity bundle in an engine, which may be started here, and name the first thing that differs
and what usually causes it."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

from draftsmith.cli.boundary import put
from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.templates import prepare_prompts, read_tokenizer
from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import EngineAnswer, within_text
from draftsmith.eval.engines.llama_cpp import DRAFT_MODEL, LlamaServerProcess, ServerSettings
from draftsmith.eval.engines.vllm_client import VllmSettings, run_vllm
from draftsmith.eval.parity.ask import AskedServer
from draftsmith.eval.parity.bundle import Bundle, read_bundle
from draftsmith.eval.parity.diagnose import Seen, diagnose, not_told
from draftsmith.eval.parity.swap import Side, swap
from draftsmith.eval.results.intervals import FEWEST_PROMPTS
from draftsmith.foreign.text import read_object
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.quantized import BITS, quantize_head
from draftsmith.machine import command_line, environment_json
from draftsmith.stages.gguf import HEADS, WHOLE, convert
from draftsmith.storage import check_file, write_json
from draftsmith.target.gguf_file import is_gguf
from draftsmith.target.target import load_target

_TOKENS = 128
"""Of an answer where targets are swapped."""
DIFFERS = 3
"""The exit code where the engine is wrong."""


def verify(own: Namespace, words: list[str]) -> int:
    """Print the verdict on one engine; return 0 where it is right, 3 where it is not."""
    if len(words) != 1 or words[0].startswith("-"):
        wrong = f"there is no option {words[0]}" if words and words[0].startswith("-") else f"{len(words)} are named"
        raise UserError(
            f"verify takes one export, but {wrong}: name its folder, and --url BASE or --engine {'|'.join(ENGINES)}."
        )
    export = Path(words[0])
    bundle = read_bundle(export)
    if own.output is not None:
        check_file("--output", own.output, (".json",), r'\A\{\n  "verified": ')
    if sum(given is not None for given in (own.url, own.engine, own.served)) != 1:
        raise UserError(
            f"verify asks one engine: give either --url with the address of a running one, --engine {' or '.join(ENGINES)} to start one, or "
            "--served with the target that is served in place of the head's own."
        )
    if own.prompts is not None and own.served is None:
        raise UserError("--prompts goes with --served alone: an engine is asked for the bundle's own prompts.")
    if own.weights is not None and (own.served is None or own.weights not in BITS):
        raise UserError(f"--weights is {own.weights}: give one of {', '.join(BITS)}, with --served.")
    files = ("target", "home", "gguf_pre")
    if own.url is not None and (idle := next((name for name in files if getattr(own, name)), None)):
        raise UserError(
            f"--{idle.replace('_', '-')} is for an engine that is started here, and --url names a running one: leave it out."
        )
    if own.served is not None:
        return _swap(own, export, bundle)
    engine, seen, end_ids = _ask(own, export, bundle)
    verdict = diagnose(bundle, seen, end_ids)
    hidden = not_told(bundle, seen, end_ids) if verdict.right else ()
    told = seen[0]
    counts = "sums of accepted tokens" if told.rounds is None else "accepted tokens of every round"
    level = "drafted tokens" if told.names_drafts else counts
    put(
        f"{export}: {bundle.method}, K = {bundle.num_speculative_tokens}, {len(bundle.prompts)} prompts against {engine}, "
        f"which tells its answers and {level}"
    )
    put(fill(verdict.sentence, 110))
    for tie in verdict.ties:
        put(fill(f"near tie (budget {bundle.budget:.2g}): {tie}", 110))
    if hidden:
        put(fill(f"On these prompts this would look the same: {', '.join(hidden)}.", 110))
    if own.output is not None:
        facts = {"verified": str(export), "engine": engine, "tells": level, "right": verdict.right}
        facts |= {"looks_the_same": hidden, **asdict(verdict), "sentence": verdict.sentence}
        write_json(own.output, facts | {"seen": [asdict(one) for one in seen]} | environment_json())
    return 0 if verdict.right else DIFFERS


def _ask(own: Namespace, export: Path, bundle: Bundle) -> "Answered":
    """Ask the server of --url, or the engine of --engine, which is started."""
    if own.url is not None:
        known_as = own.model or bundle.served_as
        server = AskedServer(own.url, [known_as] if known_as else [bundle.target, export.absolute().name])
        return server.engine, server.ask_all(bundle), ()
    if own.engine not in ENGINES:
        raise UserError(f"--engine is {own.engine}: choose {' or '.join(ENGINES)}; ask others by --url.")
    if bundle.served_as:
        raise UserError(
            f"{export} drafts for a target with an adapter, which --engine does not start: start it as its README says, and give verify its --url."
        )
    if own.home is None or own.target is None:
        raise UserError(
            "--engine starts an engine, so give --home FOLDER, where it is installed (vLLM's environment, or a built llama.cpp tree), and "
            "--target FOLDER, the target's files."
        )
    return start_and_ask(export, bundle, own.engine, own.home, own.target, own.gguf_pre)


VLLM, LLAMA_CPP = ENGINES = ("vllm", "llama.cpp")
_METHODS: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("dflash", "eagle3", "draft_model")} | {
    "eagle1": {"method": "eagle"},
    "medusa_vllm": {"method": "medusa"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "mtp": {"method": "mtp"},
}
"""How vLLM is asked for the drafting method, by layout; a speculators folder names it itself."""


Answered = tuple[str, list[Seen], tuple[int, ...]]
"""Name and version of an engine, what it gave, and the ids that end an answer in it, none where they are the target's."""


def speculation(layout: str, draft: Path, target: Path, tokens: int) -> tuple[Path, dict[str, Any] | None]:
    """Return the folder that vLLM is started on, and --speculative-config for the draft in a folder, None for a layout whose folder names
    its target and says it all. An MTP layer stands in its target's files, which are then the draft's."""
    if layout not in _METHODS:
        return draft.absolute(), None
    asked = {"num_speculative_tokens": tokens, **_METHODS[layout]}
    return (
        (draft.absolute(), asked) if layout == "mtp" else (target.absolute(), asked | {"model": str(draft.resolve())})
    )


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
            model, speculative = speculation(bundle.layout, export, target, bundle.num_speculative_tokens)
            if speculative is None and "speculators" not in bundle.layout:
                raise UserError(
                    f"vLLM is not started here on the layout {bundle.layout} of {export}: start it as its README says, and give verify its --url."
                )
            if speculative is None:
                _check_verifier(export, target)
            settings = VllmSettings(home, model, speculative, context, bundle.eos_ids)
            run = run_vllm(settings, [prompt.request for prompt in bundle.prompts], Path(work))
            return f"vLLM {run.version}", [_seen(within_text(answer)) for answer in run.answers[0.0]], ()
        return _ask_llama(export, bundle, home, target, Path(work), context, pre_tokenizer)


def _check_verifier(export: Path, target: Path) -> None:
    """Raise UserError where the target that an export in speculators' form names, which vLLM loads, is not `target`."""
    config = read_object(export / "config.json", "export it again")
    section = config.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if isinstance(named, str) and named != str(target) and Path(named).resolve() != target.resolve():
        raise UserError(
            f"vLLM loads the target that {export / 'config.json'} names, {named}, not --target {target}: give that one, or export again with "
            "the other as target.path."
        )


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
        return f"llama.cpp {server.version()}", [_seen(answer) for answer in asked], server.end_ids


def _seen(answer: EngineAnswer) -> Seen:
    return Seen(answer.sample_id, answer.output_ids, answer.rounds)


_REMEDY = {
    "answers": "train on the served target's answers (draftsmith regenerate with it), starting from this head (train.warm_start)",
    "states": "train on the served target's states (draftsmith extract with it), starting from this head (train.warm_start)",
    "head": "serve the head's weights as they are",
}


def _swap(own: Namespace, export: Path, bundle: Bundle) -> int:
    """Print what the served target and rounded weights of the head cost."""
    if own.target is None:
        raise UserError("--served is compared with the head's own target, so give --target with the files of that one.")
    tokenizer = read_tokenizer(str(own.target))
    if read_tokenizer(str(own.served)).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--served {own.served} has other tokens than --target {own.target}: name the same model, quantized or tuned."
        )
    # The first must be the head's own; how the other one differs is what is asked.
    ours, theirs = (
        _side(own, export, bundle, own.target, None),
        _side(own, export, bundle, own.served, lambda text: None),
    )
    context = min(ours.target.context_length, theirs.target.context_length)
    most = context - bundle.num_speculative_tokens - 1
    rooms = [(p.request, min(_TOKENS, most - len(p.prompt_ids))) for p in bundle.prompts]
    requests = [replace(request, max_new_tokens=room) for request, room in rooms if room > 1]
    if own.prompts is not None:
        chats = load_conversations([str(own.prompts)], template=bundle.template)
        limit = "the targets' contexts leave after a draft: give shorter prompts"
        how: Any = {"max_new_tokens": lambda name: _TOKENS, "max_length": most, "limit": limit}
        read = prepare_prompts(tokenizer, chats, template=bundle.template, **how)
        requests = [Request(p.conversation.id, p.conversation.slice, p.ids, p.max_new_tokens) for p in read]
    if not requests:
        raise UserError(
            f"The prompts of {export} leave no room for an answer and a draft in {context} tokens: give shorter ones with --prompts."
        )
    found = swap(ours, theirs, requests, bundle.num_speculative_tokens)
    put(
        f"{export}: {bundle.method}, K = {bundle.num_speculative_tokens}, {len(requests)} prompts at temperature 0: tau {found.tau:.2f} with "
        f"{own.target}, {found.tau_served:.2f} with {own.served}, {found.differ:.1%} of whose tokens are not what the other would say there"
    )
    for share in found.shares:
        interval = "" if share.interval is None else " [{:+.3f}, {:+.3f}]".format(*share.interval)
        put(f"{share.thing:8} {share.lost:+.3f}{interval} of tau lost")
    if len(requests) < FEWEST_PROMPTS:
        put(f"{len(requests)} prompts tell nothing for certain: give {FEWEST_PROMPTS} or more with --prompts.")
    elif certain := [share for share in found.shares if share.interval is not None and share.interval[0] > 0]:
        largest = max(certain, key=lambda share: share.lost)
        put(f"Most of what is certain is lost by the {largest.thing}: {_REMEDY[largest.thing]}.")
    else:
        put("Nothing is lost for certain on these prompts.")
    if own.output is not None:
        asked = {
            "verified": str(export),
            "command": command_line(),
            "prompts": len(requests),
        }
        write_json(own.output, asked | asdict(found) | environment_json())
    return 0


def _side(own: Namespace, export: Path, bundle: Bundle, path: Path, warn: Callable[[str], None] | None) -> Side:
    """Open a target and the head beside it. warn: see `load_head`."""
    target = load_target(str(path), dtype=bundle.dtype)
    head = load_head(export, target, warn=warn)
    if "tuned" in head.trains.outputs:
        raise UserError(f"{export} is of {bundle.method}, which tunes its target: no other one can be served with it.")
    head = head.deployed(target).to(target.dtype)
    return Side(target, (head, head if own.weights is None else quantize_head(head, own.weights)))
