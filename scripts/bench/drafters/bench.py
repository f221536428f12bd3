"""Compare every drafter on the same target, data and budget: `python -m scripts.bench.drafters --store FOLDER --runs FOLDER`.

Trains each drafter of scripts/bench/drafters/table.py that is not yet trained, simulates its acceptance on the shared prompts,
decodes them with it and with the target alone in turns, and writes a result file per drafter and a page of tables.
What is there already is kept, so that it can be done in pieces.

Words that are none of its options, such as --train.rows 2 or --evaluate.repeats 1, are overrides of every recipe.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.measure.machine import environment
from draftsmith.files import write_json
from draftsmith.recipe.options import option, take_options, whole_number
from scripts.bench.drafters.page import answers_of, read_entries, write_page
from scripts.bench.drafters.table import DRAFTERS, ROOT, ComparedDrafter

OUTPUT = ROOT / "docs" / "results" / "drafters"
STORE, RUNS = Path("runs/drafters/store"), Path("runs/drafters")
PLACES = (
    option(
        "--store", type=Path, default=STORE, help="Answers and hidden states that all learn from, made on first use."
    ),
    option("--runs", type=Path, default=RUNS, help="Where runs go, and where heads of other packages are found."),
    option("--output", type=Path, default=OUTPUT, help="Of the results; docs/results/drafters if left out."),
)
OPTIONS = (
    *PLACES,
    option("--budget", type=whole_number("--budget"), help="Supervised tokens per training.", metavar="N"),
    option("--only", action="append", default=[], metavar="NAME", help="A drafter or one of its runs; repeatable."),
    option("--repeats", type=whole_number("--repeats"), default=3, help="Decodings of the prompts (3).", metavar="N"),
    option("--no-train", action="store_true", help="Train nothing."),
    option("--no-decode", action="store_true", help="Simulate only."),
    option("--page", action="store_true", help="Write the page again and do nothing else."),
    option("--rival-jobs", action="store_true", help="Write a JOB.json per head of scripts/bench/rivals and stop."),
)


def main(argv: list[str] | None = None, drafters: Sequence[ComparedDrafter] = DRAFTERS, root: Path = ROOT) -> int:
    """Train, measure and write; a user's mistake is one sentence and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        parser = argparse.ArgumentParser("python -m scripts.bench.drafters", description=__doc__)
        for one in OPTIONS:
            parser.add_argument(one.name, **one.settings)
        parser.print_help()
        return 0
    try:
        options, overrides = parse(words, drafters)
        if not options.page:
            run(options, overrides, drafters, root)
        if not options.rival_jobs:
            print(write_page(options.output, [s.name for s in drafters]))
        return 0
    except UserError as error:
        print(f"bench_drafters: {error}", file=sys.stderr)
        return 2


def parse(words: list[str], drafters: Sequence[ComparedDrafter]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return the options and the overrides of every recipe. Raises UserError for a drafter that is unknown."""
    options, overrides = take_options(words, OPTIONS)
    names = [s.name for s in drafters]
    runs = [run for s in drafters if len(s.run_names) > 1 for run in s.run_names]
    if unknown := [name for name in options.only if name not in (*names, *runs)]:
        raise UserError(f"--only {unknown[0]}: the drafters are {', '.join(names)}; single runs {', '.join(runs)}.")
    return options, tuple(overrides)


def run(
    options: argparse.Namespace, overrides: tuple[str, ...], drafters: Sequence[ComparedDrafter], root: Path
) -> None:
    """Do what the options ask for, drafter by drafter."""
    from draftsmith.stages.session import Session
    from scripts.bench.drafters.measure import Measure
    from scripts.bench.drafters.training import BUDGET, Bench, rival_jobs, train_runs

    bench = Bench(options.store, options.runs, overrides, options.budget or BUDGET, root)
    first = drafters[0]
    if options.rival_jobs:
        for drafter in drafters:
            for name, job in (rival_jobs(bench, drafter, first) if not drafter.recipe else {}).items():
                write_json(options.runs / name / "job.json", job)
                print(options.runs / name / "job.json")
        return
    session = Session(bench.recipe(first, f"--output_dir={options.runs / 'evaluation'}"))
    measure = Measure(session, options.runs / "answers", options.repeats)
    for drafter in drafters:
        asked = drafter.narrowed(options.only) if options.only else drafter
        if asked is not None and (trained := train_runs(bench, asked, train=not options.no_train)):
            _measure(options, bench.budget, drafter, trained, measure)


def _measure(
    options: argparse.Namespace, budget: int, drafter: ComparedDrafter, trained: Sequence[Any], measure: Any
) -> None:
    """Simulate every run of a drafter, decode with the best, and write the result file. Figures of the same heads that the
    file has already, and of runs that are not at hand, are kept."""
    from draftsmith.stages.session import say

    file = options.output / f"{drafter.name}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    heads = [measure.digest(one) for one in trained]
    known = {r["head"]: r for r in before.get("runs", ()) if r["inputs"] == measure.inputs}
    decoded = before.get("decoded")
    # A run of the same name on another set of answers is a different one.
    here = {(one.name, one.answers) for one in trained}
    others = []
    if before.get("budget") == budget:
        named = [r for r in known.values() if r["training"]["name"] in drafter.run_names and r["head"] not in heads]
        others = [r for r in named if (r["training"]["name"], answers_of(r)) not in here]

    def save() -> None:
        """Write what is known so far; the decoded run only beside the run whose head it is of."""
        pairs = zip(heads, trained, strict=True)
        runs = [known[head] | {"training": one.record} for head, one in pairs if head in known] + others
        runs.sort(key=lambda r: (drafter.run_names.index(r["training"]["name"]), r["date"]))
        fits = decoded is not None and any(all(decoded[key] == r[key] for key in ("head", "inputs")) for r in runs)
        entry = {"name": drafter.name, "recipe": drafter.recipe or None, "budget": budget, "runs": runs}
        write_json(file, entry | {"decoded": decoded if fits else None})

    for one, head in zip(trained, heads, strict=True):
        if head not in known:
            system = measure.system(drafter.name, one)
            known[head] = {
                "head": head,
                "inputs": measure.inputs,
                "method": system.method,
                "parameters": one.parameters if one.parameters is not None else system.parameters,
                "K": system.num_speculative_tokens,
                "tuned": system.verifier is not None,
                "simulated": measure.simulated(system),
                **_facts(),
            }
        if len(drafter.run_names) > 1 and "heldout_tau" not in known[head]:
            known[head]["heldout_tau"] = measure.heldout_tau(one)
        save()
    if options.no_decode:
        return
    # The run that the tables show, which they choose among all drafters' results.
    kept = next(entry["row"] for entry in read_entries(options.output, ()) if entry["name"] == drafter.name)
    head, wanted = kept["head"], (kept["head"], measure.inputs)
    if head not in heads:
        say(
            f"{kept['training']['name']} is the best run of {drafter.name} on the answers that most drafters learned from, and not "
            "at hand: nothing is decoded; name another --output for results of your own"
        )
    elif decoded is None or (decoded["head"], decoded["inputs"]) != wanted or _few(decoded, options):
        figures = measure.decoded(measure.system(drafter.name, trained[heads.index(head)]))
        decoded = {"head": head, "inputs": measure.inputs, **_facts(), "at": figures}
        save()


def _few(decoded: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether the prompts were decoded less often than is asked for now."""
    return any(at["repeats"] < options.repeats for at in decoded["at"].values())


def _facts() -> dict[str, Any]:
    """Return the command, commit, machine and date, without folders of this machine."""
    facts, words = environment(), take_options(sys.argv[1:], PLACES)[1]
    command = shlex.join(["python", "-m", "scripts.bench.drafters", *words])
    return {"command": command, **facts, "hardware": asdict(facts["hardware"])}
