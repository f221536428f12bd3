"""One table of every drafter on one target, on the same answers and the same budget of tokens:
python -m scripts.bench.drafters --recipes smollm2-135m --tokens 2700000 --output docs/results/drafters.json -- --target.path T

Each method with a recipe recipes/METHOD/NAME.yaml is trained for a third of the budget at each of --rates, times the recipe's learning
rates; the rate with the best held-out tau gets the whole budget, unless the method then lies --drop below the best one. With one rate there
is nothing to choose, and every method gets the whole budget. All heads are
then evaluated together, on the same prompts and in turns; differences of tau, from the best head's, have intervals over the same prompts.
Words behind -- are keys of every recipe. A method may bring keys of its own, `--methods eagle3 "eagle3 --head.num_hidden_layers 2"`, and
is called by them all. What is finished is reused: run it again after an interruption.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.results.intervals import bootstrap_tau
from draftsmith.eval.results.result import DrafterResult, Result, read_result
from draftsmith.foreign.text import read_object
from draftsmith.heads.base import layer_ids_of
from draftsmith.progress import say
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.evaluation import prompts_of, result_files
from draftsmith.stages.session import Session
from draftsmith.storage import fingerprint
from scripts.bench.commands import facts_of, keep, run_command

TRIAL = 1 / 3
"""The share of the budget that a learning rate is chosen by."""


@dataclass(frozen=True)
class Training:
    """One training of a method, with keys of its own behind the name. rate: what the recipe's learning rates are multiplied by. share: of
    the budget of tokens. tau: the best held-out one, at the recipe's draft length, greedy. seconds: of training."""

    method: str
    rate: float
    share: float
    steps: int
    tau: float
    seconds: float


@dataclass(frozen=True)
class Bench:
    """What all trainings have in common. words: keys of every recipe, those of the folders and layers included."""

    recipes: str
    folder: Path
    tokens: int
    words: tuple[str, ...]

    def command(self, method: str, *more: str) -> list[str]:
        """Return the words that a command of draftsmith takes for a method."""
        name, *keys = shlex.split(method)
        return ["--recipe", f"recipes/{name}/{self.recipes}.yaml", *self.words, *keys, *more]

    def run_dir(self, method: str, rate: float, share: float) -> Path:
        """Return the folder of a training."""
        name = re.sub(r"[^a-z0-9._]+", "-", method.lower()).strip("-")
        return self.folder / f"{name}-{rate:g}-{share:.2g}"

    def train(self, method: str, rate: float, share: float) -> Training:
        """Train, or go on, in a process of one thread; raises UserError with the last line of its log where that fails."""
        plain, run = parse_recipe(self.command(method)), self.run_dir(method, rate, share)
        train = plain.train
        steps = max(1, round(self.tokens * share / (train.rows * train.row_tokens * train.accumulation)))
        keys = {"max_steps": steps, "epochs": 10_000, "lr": train.lr * rate, "muon_lr": train.muon_lr * rate}
        words = [word for key, value in keys.items() for word in (f"--train.{key}", repr(value))]
        draftsmith("train", [*self.command(method, *words), "--output_dir", str(run)], run.with_name(f"{run.name}.log"))
        found = read_object(run / "train" / "summary.json", "remove it, and train again")
        done = Training(method, rate, share, steps, found["best_tau"], found["train_seconds"])
        say(
            f"{method} x {rate:g}, {share:.0%} of the budget: held-out tau {done.tau:.3f} in {done.seconds / 60:.0f} min"
        )
        return done


def draftsmith(command: str, words: Sequence[str], log: Path) -> None:
    """Run a command in a process of its own. Raises UserError with the last line of its log where it fails."""
    if last := run_command(command, words, log):
        raise UserError(f"draftsmith {command} failed ({last}): its whole log is {log}.")


def train_all(bench: Bench, methods: Sequence[str], rates: Sequence[float], drop: float, jobs: int) -> list[Training]:
    """Choose a rate for every method, and train those that are not left behind; return all trainings, the trials first."""
    with ThreadPoolExecutor(jobs) as pool:
        if len(rates) == 1:
            return list(pool.map(lambda method: bench.train(method, rates[0], 1.0), methods))
        trials = list(
            pool.map(lambda pair: bench.train(pair[0], pair[1], TRIAL), [(m, r) for r in rates for m in methods])
        )
        best = {method: max((t for t in trials if t.method == method), key=lambda t: t.tau) for method in methods}
        bound = max(trial.tau for trial in best.values()) * (1 - drop)
        kept = [trial for trial in best.values() if trial.tau >= bound]
        for trial in best.values():
            if trial not in kept:
                say(f"{trial.method} stays at a third of the budget: its tau {trial.tau:.3f} is below {bound:.3f}")
        return trials + list(pool.map(lambda trial: bench.train(trial.method, trial.rate, 1.0), kept))


def evaluate(bench: Bench, heads: dict[str, Path], *, decode: bool) -> list[Result]:
    """Evaluate all heads together; return the result of each temperature."""
    # A result calls the head that it is of by its method alone.
    first = next(method for method in heads if " " not in method)
    others = {method: str(folder) for method, folder in heads.items() if method != first}
    place, beside = bench.folder / f"evaluation-{fingerprint([first, *others])}", json.dumps(others)
    words = bench.command(first, "--output_dir", str(place), "--evaluate.beside", beside)
    more = [] if decode else ["--no-decode"]
    draftsmith("evaluate", [*words, "--head", str(heads[first]), *more], place.with_suffix(".log"))
    return [read_result(path) for path in result_files(parse_recipe(words), decode=decode)]


def row(drafter: DrafterResult, name: str, result: Result) -> dict[str, Any]:
    """Return what the table says of a drafter at one temperature."""
    m, costs = drafter.overall, result.costs
    return {
        "draft": None if drafter.draft is None else asdict(drafter.draft),
        "tau": m.tau,
        "tau_simulated": m.tau_simulated,
        "tau_simulated_interval": m.tau_simulated_interval,
        "slices": {place: measures.tau_simulated for place, measures in drafter.slices.items()},
        "tau_by_k": {point.num_speculative_tokens: point.tau_simulated for point in m.k_sweep or ()},
        "tau_by_budget": m.budget_sweep,
        "draft_ms": None if costs is None else costs.draft_ms.get(name),
        "decode_tok_s": m.decode_tok_s,
        "speedup": m.speedup,
        "speedup_spread": m.speedup_spread,
    }


def table(result: Result, earlier: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a result and those of an earlier table, and how far each drafter's simulated tau lies from the best one's on the
    same prompts."""
    rows = dict(earlier.get("drafters", {}))
    for name, drafter in result.drafters.items():
        pairs = {p: (m.tokens, m.rounds_simulated or 0.0) for p, m in drafter.prompts.items()}
        rows[name] = row(drafter, name, result) | {"prompts": pairs}
    best = max(rows, key=lambda name: rows[name]["tau_simulated"] or 0.0)
    shared = [prompt for prompt in rows[best]["prompts"] if all(prompt in one["prompts"] for one in rows.values())]
    for name, one in rows.items():
        sides = [[rows[side]["prompts"][prompt] for prompt in shared] for side in (name, best)]
        one["behind_best"] = None if name == best else bootstrap_tau(sides[0], sides[1])
    return {"best": best, "drafters": rows}


def read_beside(path: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier result of the bench, {} without one. Raises UserError where its heads cannot be compared with these."""
    if path is None:
        return {}
    earlier = read_object(path, "name a result of this bench")
    for key in ("tokens", "target", "prompts"):
        if earlier.get(key) != facts[key]:
            raise UserError(
                f"--beside {path} has {key} {earlier.get(key)}, but here it is {facts[key]}: both need the same."
            )
    return earlier


def methods_of(recipes: str, named: Sequence[str] | None) -> Sequence[str]:
    """Return the methods to compare: those `named`, with their keys, or all that have a recipe of that name. Raises UserError for one
    without a recipe, and where each has keys."""
    found = sorted(path.parent.name for path in Path("recipes").glob(f"*/{recipes}.yaml"))
    methods = named or found
    unknown = {shlex.split(method)[0] for method in methods} - set(found)
    if unknown or not found:
        raise UserError(
            f"there is no recipe recipes/*/{recipes}.yaml of {', '.join(sorted(unknown or {recipes}))}: name others."
        )
    if not set(methods) & set(found):
        raise UserError(
            f"all of --methods have keys: name {shlex.split(methods[0])[0]} alone too, which the others stand beside."
        )
    return methods


def main(argv: list[str]) -> int:
    """Run the bench, or what is left of it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.drafters", description=__doc__)
    parser.add_argument("--recipes", default="smollm2-135m", help="recipes/METHOD/NAME.yaml of every method")
    parser.add_argument("--methods", nargs="*", help="only these, with keys of their own")
    parser.add_argument(
        "--tokens", type=int, required=True, help="the budget: tokens that a training reads, epochs counted each"
    )
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 0.5])
    parser.add_argument(
        "--drop", type=float, default=0.15, help="how far behind the best a trial may lie, as a share of its tau"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once, of one thread each")
    parser.add_argument("--folder", type=Path, default=Path("runs/drafters"))
    parser.add_argument("--no-decode", action="store_true", help="simulate alone, without times")
    parser.add_argument(
        "--beside", type=Path, help="an earlier result with other methods, whose rows stand in this one too"
    )
    parser.add_argument("--output", type=Path)
    split = argv.index("--") if "--" in argv else len(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
    own, words = parser.parse_args(argv[:split]), argv[split + 1 :]
    methods = methods_of(own.recipes, own.methods)
    data = ["--data_dir", str(own.folder / "data"), *words]
    bench = Bench(own.recipes, own.folder, own.tokens, tuple(data))
    recipes = {method: parse_recipe(bench.command(method)) for method in methods}
    session = Session(recipes[methods[0]])
    target, spec = session.target, session.recipe.evaluate
    facts = facts_of("drafters", argv) | {"tokens": own.tokens, "target": target.fingerprint}
    facts["prompts"] = prompts_of(session, target).digest(spec)
    earlier = read_beside(own.beside, facts)
    named = (layer for recipe in recipes.values() for layer in recipe.features.layer_ids or ())
    layers = sorted({layer for recipe in recipes.values() for layer in layer_ids_of(recipe.head, target)} | set(named))
    stored = ["--features.layer_ids", json.dumps(layers)] if layers else []
    bench = Bench(own.recipes, own.folder, own.tokens, (*data, *stored))
    say(f"{len(methods)} methods, layers {layers}, logs in {own.folder}")
    draftsmith("extract", bench.command(methods[0]), own.folder / "data.log")
    trainings = train_all(bench, methods, own.rates, own.drop, own.jobs)
    heads: dict[str, Path] = {}  # of each method's longest training, at its best rate, the best head first
    for one in sorted(trainings, key=lambda t: (t.share, t.tau), reverse=True):
        heads.setdefault(one.method, bench.run_dir(one.method, one.rate, one.share))
    results = evaluate(bench, heads, decode=not own.no_decode)
    done = [*earlier.get("trainings", []), *map(asdict, trainings)]
    facts["trainings"] = list({(one["method"], one["rate"], one["share"]): one for one in done}.values())
    known = earlier.get("temperatures", {})
    places = {f"{result.settings.temperature:g}": result for result in results}
    facts["temperatures"] = {at: table(result, known.get(at, {})) for at, result in places.items()}
    return keep(own.output, facts)


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(f"drafters: {error}") from None
