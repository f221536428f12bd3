"""Train the drafters that are compared, each from the same answers and with the same number of supervised tokens.

A run is trained by the stages of `draftsmith train`, in a directory of its own, so that it is resumed and reused too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.files import fingerprint
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.data import answers_stage, head_layers, load_samples
from draftsmith.stages.pipeline import make_stages
from draftsmith.stages.preflight import preflight
from draftsmith.stages.session import Session, say
from draftsmith.stages.training import pick_draft_vocab, split_samples, train_inputs
from scripts.bench.drafters.table import ROOT, ComparedDrafter

BUDGET = 3_000_000
"""Supervised tokens of a training."""

_SUMS = ("seconds", "tokens", "supervised_tokens", "steps")
"""What a training of two stages took is the sum of both."""


@dataclass(frozen=True)
class Bench:
    """Where things are. store: the shared answers and hidden states. runs: the run directories. words: overrides of every
    recipe. budget: supervised tokens per training. root: where recipes are looked for."""

    store: Path
    runs: Path
    words: tuple[str, ...] = ()
    budget: int = BUDGET
    root: Path = ROOT

    def recipe(self, drafter: ComparedDrafter, *further: str) -> Recipe:
        """Return a drafter's recipe on the shared data, with its own overrides, then those of the bench, then `further`."""
        words = ["--recipe", str(self.root / drafter.recipe), f"--data_dir={self.store}", "--train.patience=null"]
        return parse_recipe([*words, *drafter.overrides, *self.words, *further], "bench_drafters", __doc__ or "")


@dataclass(frozen=True)
class Trained:
    """A trained head. folder: of the run or of the head. lr, muon_lr: its peak learning rates. overrides: of its recipe.
    answers: fingerprint of the texts that it learned from. seconds, tokens, steps: of its training, both stages where
    there are two; supervised_tokens: with repetition. parameters: None where the head itself tells. settings: what another
    package trained it with. head_step: the step whose head it is, None for the last one."""

    name: str
    folder: Path
    lr: float
    muon_lr: float | None
    overrides: tuple[str, ...]
    seconds: float
    tokens: int
    supervised_tokens: int
    steps: int
    parameters: int | None = None
    settings: dict[str, Any] | None = None
    head_step: int | None = None
    answers: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The training as it stands in the result file."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("folder", "parameters")}
        return kept | {"overrides": list(self.overrides)}


def epochs_for(budget: int, supervised_tokens: int) -> int:
    """Return how many epochs of so many supervised tokens come nearest to the budget, at least one.

    Raises UserError where an epoch holds none.
    """
    if supervised_tokens < 1:
        raise UserError("The answers hold no supervised token to train on: make them again with --redo answers.")
    return max(1, round(budget / supervised_tokens))


def _supervised(samples: Sequence[Tokenized], places: Sequence[int]) -> int:
    return sum(int(samples[place].mask.sum()) for place in places)


def identify_texts(samples: Sequence[Tokenized]) -> str:
    """Return a fingerprint of the answers: a target that answers anew on another machine samples other texts."""
    return fingerprint([[one.sample_id, one.ids.tolist()] for one in samples])


def train_runs(bench: Bench, drafter: ComparedDrafter, *, train: bool = True) -> list[Trained]:
    """Return the runs of a drafter, trained first where they are not yet; without `train` those that are trained."""
    if not drafter.recipe:
        found = [_imported(bench.runs / name, name) for name in drafter.run_names]
        return [one for one in found if one is not None]
    before = ComparedDrafter(f"{drafter.name}-first", drafter.first) if drafter.first else None
    session = Session(bench.recipe(before or drafter))
    samples = load_samples(session, answers_stage(session))
    per_epoch, texts = _supervised(samples, split_samples(session, samples)[0]), identify_texts(samples)
    epochs = epochs_for(bench.budget, per_epoch)
    words, earlier = [], dict.fromkeys(_SUMS, 0)
    if before is not None:
        # Both stages share the budget.
        halves = max(1, epochs // 2), max(1, epochs - epochs // 2)
        folder, epochs = bench.runs / before.name, halves[1]
        places = (f"--name={before.name}", f"--output_dir={folder}", f"--train.epochs={halves[0]}", *_source(session))
        begun = _finished(Session(bench.recipe(before, *places)), train)
        if begun is None:
            return []
        earlier = _sums(begun, halves[0] * per_epoch)
        words = [f"--train.warm_start={folder}"]
    plain = bench.recipe(drafter, *words)
    words += [f"--train.epochs={epochs}", *_source(Session(plain))]
    runs = []
    for name, factor in zip(drafter.run_names, drafter.factors, strict=True):
        rates = (plain.train.lr * factor, plain.train.muon_lr * factor)
        own = (*words, f"--train.lr={rates[0]:.12g}", f"--train.muon_lr={rates[1]:.12g}")
        recipe = bench.recipe(drafter, f"--name={name}", f"--output_dir={bench.runs / name}", *own)
        facts = _finished(Session(recipe), train)
        if facts is None:
            continue
        muon = rates[1] if recipe.train.optimizer == "muon" else None
        done = {key: value + earlier[key] for key, value in _sums(facts, epochs * per_epoch).items()}
        # Folders of this machine have no place in a result file.
        overrides = tuple(w.replace(f"={bench.runs}/", "=RUNS/") for w in (*drafter.overrides, *bench.words, *own))
        done |= {"head_step": earlier["steps"] + facts["best_step"], "answers": texts}
        runs.append(Trained(name, recipe.run_dir, rates[0], muon, overrides, **done))
    return runs


def _sums(facts: Mapping[str, Any], supervised_tokens: int) -> dict[str, Any]:
    """Return what a finished training took, by the names of `Trained`."""
    return dict(zip(_SUMS, (whole_seconds(facts), facts["tokens"], supervised_tokens, facts["step"]), strict=True))


def whole_seconds(facts: Mapping[str, Any]) -> float:
    """Return how many seconds a finished training took, by its facts.

    Their clock is that of the last process: a run that was interrupted counts as if all of it had run at that one's speed.
    """
    speed = facts["tokens_per_second"]
    return facts["tokens"] / speed if speed else facts["train_seconds"]


def _source(session: Session) -> list[str]:
    """Return the override that computes hidden states online, for a head that reads layers which are not stored."""
    known = session.directory("features").record("features")
    stored = known.inputs.get("layer_ids", ()) if known and known.state == "done" else ()
    needed = head_layers(session)
    if not stored or set(needed) <= set(stored) or session.recipe.features.source == "online":
        return []
    say(
        f"{session.recipe.method} reads the layers {list(needed)}, but {list(stored)} are stored: they are computed online"
    )
    return ["--features.source=online"]


def _finished(session: Session, train: bool) -> dict[str, Any] | None:
    """Return the facts of a training with these settings, after training if `train`; None where it is not trained."""
    if train:
        preflight(session, "train")
        make_stages(session, "train")
    directory = session.directory("train")
    if not directory.holds("train", train_inputs(session)):
        say(f"{session.recipe.name}: not trained with these settings yet")
        return None
    record = directory.record("train")
    assert record is not None
    return record.facts


def _imported(folder: Path, name: str) -> Trained | None:
    """Return a head that another package trained, None where it has not yet. Raises UserError for a broken record."""
    file = folder / "training.json"
    if not file.is_file():
        say(f"{name}: there is no {file.name} in {folder}")
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        kept = {key: record.get(key) for key in ("cpu_seconds", "row_tokens")}
        settings = {"trainer": record["trainer"], **kept, **record["settings"]}
        done = (record["seconds"], record["tokens"], record["supervised_tokens"], record["steps"])
        rates = (record["settings"]["lr"], record["settings"].get("muon_lr"))
        texts = record.get("answers")
        return Trained(name, folder / "head", *rates, (), *done, record["parameters"], settings, answers=texts)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no record of a training ({error!r}): train the head again.") from error


def rival_jobs(bench: Bench, drafter: ComparedDrafter, ours: ComparedDrafter) -> dict[str, dict[str, Any]]:
    """Return the jobs that scripts/bench/rivals/speculators_eagle3.py trains, by run: the documents, the draft vocabulary, the layers,
    the steps and the epochs that `ours` is trained with."""
    recipe = bench.recipe(ours)
    session = Session(recipe)
    samples = load_samples(session, answers_stage(session))
    places, _ = split_samples(session, samples)
    vocab = pick_draft_vocab(session, samples, places)
    common = {
        "store": str((bench.store / "features").resolve()),
        "target": str(Path(session.target_path).resolve()),
        "layer_ids": list(head_layers(session)),
        "vocab": None if vocab is None else vocab.tolist(),
        "train": [samples[place].sample_id for place in places],
        "ttt_steps": session.head_options.ttt_steps,
        "answers": identify_texts(samples),
        "epochs": epochs_for(bench.budget, _supervised(samples, places)),
        "step_tokens": recipe.train.row_tokens * recipe.train.rows * recipe.train.accumulation,
        "row_tokens": max(recipe.train.row_tokens, *(len(samples[place].ids) for place in places)),
        "dtype": "float32",
        "checkpoint_minutes": recipe.train.checkpoint_minutes,
    }
    names = zip(drafter.run_names, drafter.rates, strict=True)
    return {name: {**common, "lr": rate, "output": str((bench.runs / name).resolve())} for name, rate in names}
