"""The order of the stages: answers -> features -> train -> evaluate or simulate -> export."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.batch import Tokenized
from draftsmith.data.features.store import FeatureSource, FeatureStore
from draftsmith.errors import UserError
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.progress import say
from draftsmith.recipe.record import STAGES
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.data import answers_stage, begin_features, features_stage, load_samples, stored_samples
from draftsmith.stages.evaluation import evaluate_stage
from draftsmith.stages.exporting import export_stage
from draftsmith.stages.session import Session, team
from draftsmith.stages.training import Start, learned, prepare_training, train_stage, warn_of_untaught
from draftsmith.train.dashboards import tell_offline, track_results
from draftsmith.train.meeting import meeting
from draftsmith.train.process import LAUNCHED, world

COMMAND_STAGES = {
    "run": ("answers", "features", "train", "evaluate", "export"),
    "regenerate": ("answers",),
    "extract": ("answers", "features"),
    "train": ("answers", "features", "train"),
    "evaluate": ("evaluate",),
    "evaluate --no-decode": ("simulate",),
    "export": ("export",),
}
"""The stages that commands make where they are missing."""


@dataclass
class Made:
    """What the stages made, as far as the command has them.

    answers: the file, None where the recipe takes the answers in the data. samples, features: what the head learns from.
    head: the folder of the best one. results: the result.json files. export: the directory that an engine loads, None
    where no layout holds such heads.
    """

    answers: Path | None = None
    samples: Sequence[Tokenized] = ()
    features: FeatureSource | None = None
    head: Path | None = None
    results: list[Path] = field(default_factory=list)
    export: Path | None = None


def make_stages(
    session: Session,
    command: str,
    show: Callable[[list[Path]], None] = lambda results: None,
    *,
    train_here: bool = True,
) -> Made:
    """Make the stages of `draftsmith COMMAND` in order, each from what earlier ones made; finished ones are reused.

    show: receives the result files as soon as they are written. train_here: False ends before a training that
    `session.processes` are to carry out, of which all but the training itself is checked."""
    try:
        return _make_stages(session, command, show, train_here)
    finally:
        session.put_back()  # what --redo set aside for a stage that came to nothing


def _make_stages(session: Session, command: str, show: Callable[[list[Path]], None], train_here: bool) -> Made:
    stages, made, start = COMMAND_STAGES[command], Made(), None
    if met := meeting():
        met.check_shared("--output_dir", session.recipe.run_dir)
        met.check_shared("--data_dir", session.recipe.data_path)
    for stage in session.redo:
        for directory in {session.directory(stage), session.run}:
            directory.check_aside(stage)
    if "train" in stages and (head := learned(session)):
        made.head, stages = head, stages[stages.index("train") + 1 :]
    if "answers" in stages:
        made.answers = answers_stage(session)
    if "features" in stages:
        start = _make_features(session, made, training="train" in stages)
    if not train_here:
        return made
    if start is not None and made.features is not None:
        made.head = train_stage(session, start, made.features)
    if {"evaluate", "simulate", "export"} & {*stages}:
        warn_of_untaught(session)
    if "evaluate" in stages or "simulate" in stages:
        made.results = evaluate_stage(session, decode="evaluate" in stages)
        show(made.results)
    if "export" in stages and (command == "export" or layouts_of(session.recipe.method)):
        made.export = Path(team().tell(lambda: str(export_stage(session))))
    if session.recipe.tracking.active and (made.results or made.export) and world().main:
        # Whatever is wrong with the dashboards, what they are given is made.
        if session.named_head is not None:
            say("tracking: --head names a head that was not trained here, so no dashboard is given its results")
        else:
            try:
                track_results(session.recipe)
            except UserError as error:
                where = f"The results are in {session.recipe.run_dir}"
                say(f"warning: {error} {where}; the next export or evaluation tries again.")
    if world().main and LAUNCHED not in os.environ:  # else the process that launched this one says it
        for line in tell_offline(session.recipe):
            say(line)
    return made


def _make_features(session: Session, made: Made, *, training: bool) -> Start | None:
    """Set `made.samples` and `made.features`, and return what a training begins with. Rank 0 looks at the samples first; the others
    read them from the store that it makes."""
    ours, recipe, start = team(), session.recipe, None

    def begin() -> dict[str, Any]:
        nonlocal start
        known, before = stored_samples(session), len(session.warnings)
        made.samples = load_samples(session, made.answers) if known is None else known
        if session.processes > len(made.samples):
            raise UserError(
                f"{session.processes} processes were started for {len(made.samples)} samples, so that some would have none: start fewer, or "
                "add data."
            )
        about = session.warnings[before:]
        # First, so that mistakes are found before hidden states are made and an earlier head is removed.
        start = prepare_training(session, made.samples) if training else None
        digest = None if recipe.answers.regenerate else session.conversations_digest
        return {"todo": begin_features(session), "conversations": digest, "warnings": about}

    told = ours.tell(begin)
    if ours.rank and told["conversations"]:
        session.conversations_digest = told["conversations"]  # which would read all of them
    if ours.rank and recipe.features.source == "online":
        made.samples = load_samples(session, made.answers)
    made.features = features_stage(session, made.samples, todo=told["todo"], warnings=told["warnings"])
    if isinstance(made.features, FeatureStore):
        made.samples = made.features.samples
    if ours.rank and training:
        start = prepare_training(session, made.samples)
    return start


def check_redo(names: Sequence[str], command: str, recipe: Recipe) -> None:
    """Refuse to remove what is no stage, and what `draftsmith COMMAND` would not make again with this recipe."""
    absent = {"answers": not recipe.answers.regenerate, "features": recipe.features.source == "online"}
    made = [stage for stage in COMMAND_STAGES.get(command, ()) if not absent.get(stage)]
    for name in names:
        if name not in STAGES:
            raise UserError(f"--redo {name}: the stages are {', '.join(STAGES)}.")
        if name not in made:
            others = f"only {', '.join(made)}" if made else "nor any other"
            raise UserError(
                f"--redo {name}: `draftsmith {command}` does not make that stage here, {others}: leave --redo {name} out."
            )
