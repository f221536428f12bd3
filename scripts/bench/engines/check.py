"""Check trained heads in real vLLM and llama.cpp; `bash scripts/test_engines.sh` prepares and runs it.

Every head is exported, served and asked the same prompts as our own decoder. At temperature 0 in float32 output ids, the
draft tokens of every round and accepted counts must be equal; above it, acceptance must be what the simulator says. One head is then
served wrongly, and `draftsmith verify` must say how. The results are written as JSON, one file for each engine and target, from which
docs/engines.md is rendered.
"""

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.verify import start_and_ask
from draftsmith.errors import UserError
from draftsmith.eval.parity.bundle import make_bundle
from draftsmith.eval.parity.diagnose import RIGHT, diagnose
from draftsmith.heads.formats.recognise import load_head
from draftsmith.machine import environment_json
from draftsmith.progress import say
from draftsmith.stages.gguf import LAYOUT as LLAMA_CPP_LAYOUT
from draftsmith.storage import write_json
from scripts.bench.engines.compare import PRE_TOKENIZER, OurSide, Outcome, Refusal, check_in_llama_cpp, check_in_vllm
from scripts.bench.engines.served import PLANS, ServedTarget, prepare_targets, slug

ENGINES = ("vllm", "llama.cpp")
NAMES = tuple(plan.name for plan in PLANS)


HEAD = "eagle3 norm_before_residual, W=512"
"""The plan whose head is served wrongly: it has all that is spoiled here."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Named:
    """What verify said of an engine that served `head` as `served` says."""

    head: str
    layout: str
    engine: str
    version: str
    served: str
    stage: str
    difference: str
    causes: tuple[str, ...]
    ties: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the fault is named, and nothing where there is none."""
        return self.served in self.causes if self.stage else self.served == RIGHT


def _layers_too_high(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for place in (config, config["eagle_config"]):
        place[_LAYERS] = [layer + 1 for layer in place[_LAYERS]]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _other_map(ids: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        own = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = ids(tensors["d2t"] + own) - own
        save_file(tensors, file, {"format": "pt"})

    return spoil


_SPOIL: dict[str, Callable[[Path], None]] = {
    RIGHT: lambda folder: None,
    "layer + 1": _layers_too_high,
    "shifted vocabulary map": _other_map(lambda ids: ids.roll(-1)),
    "no vocabulary map": _other_map(lambda ids: torch.arange(len(ids))),
}
"""By the name of the fault, what is done to the files that the engine serves; the bundle stays that of the right ones."""


def serve_wrongly(side: OurSide, engine: str, home: Path, folder: Path) -> list[Named]:
    """Serve the head rightly and with every fault; return what verify says of each, by drafted tokens."""
    if side.candidate.name != HEAD:
        return []
    layout, target = {"vllm": "eagle3", "llama.cpp": LLAMA_CPP_LAYOUT}[engine], side.served.folder
    export = side.export(layout, folder / "verify")
    with side.lock:
        head = load_head(export, side.target).eval()
        bundle = make_bundle(side.target, head, side.requests, side.K, {}, layout)
    if bundle is None:
        raise UserError(f"no prompt of the recipe leaves room for a bundle of {export}: give shorter ones.")
    found = []
    for fault, spoil in _SPOIL.items():
        served = folder / "served-wrongly"
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(export, served)
        spoil(served)
        asked, seen, end_ids = start_and_ask(served, bundle, engine, home, target, PRE_TOKENIZER)
        verdict = diagnose(bundle, seen, end_ids)
        version = asked.rsplit(" ", 1)[-1]
        said = verdict.stage, verdict.difference, verdict.causes, verdict.ties
        found.append(Named(side.candidate.name, layout, engine, version, fault, *said))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check: 0 where everything agrees, 1 where not, 2 for a mistake in the call, 130 where it was interrupted."""
    options, words = _parse(argv)
    try:
        work = options.work / options.recipes
        heads = {}
        for word in options.head:
            name, mark, folder = word.partition("=")
            if not mark or name not in NAMES:
                raise UserError(f"--head is {word!r}: write NAME=FOLDER with a name among {', '.join(sorted(NAMES))}.")
            heads[name] = Path(folder)
        if unknown := set(options.only) - set(NAMES):
            raise UserError(f"--only names {unknown.pop()!r}, which is no head of the check: --help lists them.")
        targets = prepare_targets(options.recipes, work, heads, options.only, words)
        if not (rows := [row for served in targets for row in _check(served, work, options)]):
            raise UserError(
                "no head was served: --only, --engine and --recipes leave none that the engine reads; name others."
            )
    except UserError as error:
        print(f"test_engines: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("test_engines: interrupted; run the same command again to go on from here.", file=sys.stderr)
        return 130
    for row in rows:
        if not row.agrees:
            print(f"{row.head} in {row.engine}: {describe(row)}")
    print(f"{sum(row.agrees for row in rows)} of {len(rows)} comparisons agree")
    return 0 if all(row.agrees for row in rows) else 1


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="test_engines.sh",
        description="Hold what real engines draft and accept against draftsmith. Further words go to the recipes.",
    )
    add = parser.add_argument
    add("--engine", action="append", choices=ENGINES, help="only this engine (repeatable; both if left out)")
    add("--recipes", default="tiny", help="recipes/METHOD/NAME.yaml of every method that is served (tiny)")
    add("--head", action="append", default=[], metavar="NAME=FOLDER", help="a trained head instead of a short training")
    add(
        "--only", action="append", default=[], metavar="NAME", help=f"only these heads (repeatable): {'; '.join(NAMES)}"
    )
    add("--num_speculative_tokens", type=int, default=5, help="draft length (5)")
    add("--output", type=Path, help="folder of the results (those of the work folder)")
    add("--vllm", type=Path, required=True, help="environment of another vLLM than the pinned one")
    add(
        "--llama-cpp",
        type=Path,
        required=True,
        help="folder with llama.cpp/ and build/ of another one than the pinned one",
    )
    add("--work", type=Path, required=True, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(argv)
    return options, [word for word in words if word != "--"]


def _serve(engine: str, side: OurSide, folder: Path, options: argparse.Namespace) -> list[Outcome | Named]:
    """Serve a head in an engine, rightly and where it is the one for that wrongly."""
    check, home = (check_in_vllm, options.vllm) if engine == "vllm" else (check_in_llama_cpp, options.llama_cpp)
    rows = check(side, folder, options)
    refused = any(isinstance(row, Refusal) for row in rows)
    return [*rows, *([] if refused else serve_wrongly(side, engine, home, folder))]


def _check(served: ServedTarget, work: Path, options: argparse.Namespace) -> list[Outcome | Named]:
    """Serve every head in all engines at once, and write the results again after each head."""
    torch.set_num_threads(1)
    rows: dict[str, list[Outcome | Named]] = {engine: [] for engine in options.engine or ENGINES}
    output = options.output or work / "results"
    output.mkdir(parents=True, exist_ok=True)
    # An engine is a process of one thread, which is mostly waited for.
    with ThreadPoolExecutor(len(rows)) as pool:
        for candidate in served.candidates:
            side = OurSide(served, candidate, options.num_speculative_tokens)
            running = {
                engine: pool.submit(_serve, engine, side, work / engine / slug(candidate.name), options)
                for engine in rows
            }
            for engine, future in running.items():
                new = future.result()
                say(f"\n== {candidate.name} in {engine}")
                for row in new:
                    say(describe(row))
                rows[engine] += new
                if not rows[engine]:
                    continue
                versions = {row.version for row in rows[engine]}
                name = re.sub(r"[^\w.-]+", "-", "-".join((engine, *sorted(versions), served.name)))
                write_json(output / f"{name}.json", _document(engine, served, rows[engine]))
    say(f"\n{output}")
    return [row for found in rows.values() for row in found]


def _document(engine: str, served: ServedTarget, rows: Sequence[Outcome | Named]) -> dict[str, Any]:
    target, words = served.target, sys.argv[1:]
    # What the script adds are folders of this machine.
    added = {i + j for i, word in enumerate(words) if word in ("--work", "--vllm", "--llama-cpp") for j in (0, 1)}
    words = [word for i, word in enumerate(words) if i not in added]
    return {
        "engine": engine,
        "command": shlex.join(["bash", "scripts/test_engines.sh", *words]),
        **environment_json(),
        "target": {
            "name": served.name,
            "fingerprint": target.fingerprint,
            "layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        },
        "prompts": len(served.requests),
        "rows": [asdict(row) for row in rows if not isinstance(row, Refusal | Named)],
        "refused": [asdict(row) for row in rows if isinstance(row, Refusal)],
        "served_wrongly": [asdict(row) for row in rows if isinstance(row, Named)],
    }


def describe(row: Outcome | Named) -> str:
    """Return a row as a line of text."""
    if isinstance(row, Named):
        said = f"{row.stage}: {row.difference} ({', '.join(row.causes)})" if row.stage else "right"
        return f"{row.layout} served as {row.served!r}, verify says {said}: {'agrees' if row.agrees else 'DIFFERS'}"
    if isinstance(row, Refusal):
        return f"{row.layout}: REFUSED by {row.engine} {row.version}: {row.why}"
    how = f"{row.layout} {row.weights}, T={row.temperature:g}, K={row.num_speculative_tokens}, {row.drafts}"
    texts = "" if row.equal_answers is None else f"answers equal {row.equal_answers}/{row.answers}, "
    rounds = "" if row.equal_rounds is None else f"rounds equal {row.equal_rounds}/{row.ours.rounds}, "
    counts = f"accepted {row.theirs.accepted} (ours {row.ours.accepted}), tau {_number(row.theirs.tau)}"
    simulated = f" (ours {_number(row.ours.tau)}, simulated {_number(row.simulated)}, z {_number(row.z)})"
    verdict = "agrees" if row.agrees else "DIFFERS: " + "; ".join(row.differences[:3] or ("beyond 3 standard errors",))
    return f"{how}: {texts}{rounds}{counts}{simulated}: {verdict}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
