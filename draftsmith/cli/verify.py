"""`draftsmith verify`: replay an export's parity bundle in an engine, and name the first thing that differs and what usually causes it."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from textwrap import fill

from draftsmith.cli.boundary import put
from draftsmith.cli.verifying import ENGINES, Answered, start_and_ask
from draftsmith.errors import UserError
from draftsmith.eval.parity.ask import AskedServer
from draftsmith.eval.parity.bundle import Bundle, read_bundle
from draftsmith.eval.parity.diagnose import diagnose, not_told
from draftsmith.machine import environment_json
from draftsmith.storage import check_file, write_json

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
    if (own.url is None) == (own.engine is None):
        raise UserError(
            f"verify asks one engine: give either --url with the address of a running one, or --engine {' or '.join(ENGINES)} to start one."
        )
    if own.url is not None:
        names = [own.model] if own.model else [bundle.target, export.absolute().name]
        server = AskedServer(own.url, names)
        answered = Answered(server.engine, server.ask_all(bundle))
    else:
        answered = _started(own, export, bundle)
    verdict = diagnose(bundle, answered.seen, answered.end_ids)
    hidden = not_told(bundle, answered.seen, answered.end_ids) if verdict.right else ()
    told = answered.seen[0]
    level = (
        "drafted tokens"
        if told.names_drafts
        else "sums of accepted tokens"
        if told.rounds is None
        else "accepted tokens of every round"
    )
    put(
        f"{export}: {bundle.method}, K = {bundle.num_speculative_tokens}, {len(bundle.prompts)} prompts against {answered.engine}, "
        f"which tells its answers and {level}"
    )
    put(fill(verdict.sentence, 110))
    for tie in verdict.ties:
        put(fill(f"near tie (budget {bundle.budget:.2g}): {tie}", 110))
    if hidden:
        put(fill(f"On these prompts this would look the same: {', '.join(hidden)}.", 110))
    if own.output is not None:
        facts = {
            "verified": str(export),
            "engine": answered.engine,
            "tells": level,
            "right": verdict.right,
            "looks_the_same": hidden,
        }
        seen = [asdict(one) for one in answered.seen]
        write_json(
            own.output, facts | asdict(verdict) | {"sentence": verdict.sentence, "seen": seen} | environment_json()
        )
    return 0 if verdict.right else DIFFERS


def _started(own: Namespace, export: Path, bundle: Bundle) -> Answered:
    if own.engine not in ENGINES:
        raise UserError(f"--engine is {own.engine}: choose {' or '.join(ENGINES)}; ask others by --url.")
    if own.home is None or own.target is None:
        raise UserError(
            "--engine starts an engine, so give --home FOLDER, where it is installed (vLLM's environment, or a built llama.cpp tree), and "
            "--target FOLDER, the target's files."
        )
    return start_and_ask(export, bundle, own.engine, own.home, own.target, own.gguf_pre)
