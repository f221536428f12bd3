"""Dashboards: Weights & Biases, TensorBoard, Trackio and MLflow, each by accelerate's tracker, and what that lacks.

Each keeps what it is given in the run directory, unless environment variables of its own name another place.
"""

import csv
import io
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from draftsmith.errors import UserError
from draftsmith.recipe.schema import Backend, TrackingSpec
from draftsmith.storage import write_text

Cell = str | int | float | None
"""What a table holds."""
TOKENS = "train/tokens"
"""The x-axis of training figures where a dashboard lets it be chosen."""


def check_installed(spec: TrackingSpec) -> None:
    """Raise UserError where a chosen dashboard's package is not installed."""
    for backend in spec.active:
        if missing := [name for name in DASHBOARDS[backend].modules if find_spec(name) is None]:
            raise UserError(
                f"tracking.backends names {backend}, but the package {missing[0]} is not installed: pip install "
                f'"draftsmith[trackers]", or leave {backend} out.'
            )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and lists into `a/b` and `a/0` keys, as dashboards want them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (list, tuple)):
            flat |= flatten({str(i): v for i, v in enumerate(value)}, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


@dataclass(frozen=True)
class RunInfo:
    """What a dashboard is started from. folder: train/ of the run. fresh: a training that starts over, so that its dashboards do
    too."""

    folder: Path
    spec: TrackingSpec
    name: str
    config: Mapping[str, Any]
    fresh: bool

    def kept_id(self, backend: Backend) -> str | None:
        """Return the identity under which the dashboard knows this run, None for a new one."""
        path = self.folder / f"{backend}_id"
        return None if self.fresh or not path.exists() else path.read_text(encoding="utf-8")

    def keep_id(self, backend: Backend, identity: str) -> None:
        """Keep the identity, so that a resumed run is one dashboard with the interrupted one."""
        write_text(self.folder / f"{backend}_id", identity)


class Dashboard:
    """What the dashboards have in common; `start`, `log` and the others are those of accelerate's trackers.

    title: its name in sentences. modules: what it needs installed. remedy: what to do where it does not start. empty: set by
    `start`: it holds no figures of this run yet, so it is sent those of the steps so far.
    """

    title: str
    modules: tuple[str, ...]
    remedy: str
    empty: bool
    log: Any
    finish: Any

    def summary(self, values: Mapping[str, float], step: int) -> None:
        """Give the figures that stand for the whole run. step: the last one."""
        self.log(values, step=step)

    def curves(self, name: str, series: Mapping[str, Sequence[float]]) -> None:
        """Add curves, whose first values stand at 1."""
        for at in range(max(map(len, series.values()))):
            self.log({f"{name}/{key}": values[at] for key, values in series.items() if at < len(values)}, step=at + 1)

    def files(self, name: str, files: Mapping[str, Path]) -> None:
        """Keep files, by their paths within what is called `name`; a dashboard that keeps none leaves them out."""

    def end(self, code: int) -> None:
        """Close the run. code: the exit code, 0 for one that succeeded."""
        self.finish()


class WandB(WandBTracker, Dashboard):
    """Weights & Biases, online or into train/wandb. Tokens are the x-axis, and held-out tau counts by its maximum."""

    title = "Weights & Biases"
    modules = ("wandb",)
    remedy = "run `wandb login`, or set tracking.wandb to offline or disabled"

    def __init__(self, info: RunInfo) -> None:
        import wandb

        spec, self.info, mode = info.spec, info, info.spec.wandb or "offline"
        # W&B takes no step twice: a run that starts over has a new identity.
        self.identity = info.kept_id("wandb") or uuid4().hex[:12]
        super().__init__(
            spec.project,
            entity=spec.entity,
            group=spec.group,
            tags=spec.tags or None,
            notes=spec.notes,
            name=info.name,
            id=self.identity,
            resume="allow" if mode == "online" else None,
            config=dict(info.config),
            dir=str(info.folder),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # `wandb sync` takes no file for the continuation of another: a new one holds all steps, the others leave its sight.
        self.empty = mode == "offline" or info.kept_id("wandb") is None

    def start(self) -> None:
        # The second one within a second has a number behind its identity.
        before = sorted((self.info.folder / "wandb").glob(f"offline-run-*-{self.identity}*"))
        self.info.keep_id("wandb", self.identity)
        super().start()
        for old in before:
            old.rename(old.with_name(old.name.replace("offline-run", "continued-run")))
        for group in ("train", "heldout"):
            self.run.define_metric(f"{group}/*", step_metric=TOKENS)
        self.run.define_metric("heldout/tau", step_metric=TOKENS, summary="max")

    def summary(self, values: Mapping[str, float], step: int) -> None:
        self.run.summary.update(dict(values))

    def rows(self, name: str, columns: Sequence[str], cells: Sequence[Sequence[Cell]]) -> None:
        self.log_table(name, list(columns), [list(row) for row in cells])

    def curves(self, name: str, series: Mapping[str, Sequence[float]]) -> None:
        import wandb

        steps = [list(range(1, len(values) + 1)) for values in series.values()]
        drawn = [list(values) for values in series.values()]
        self.log({name: wandb.plot.line_series(steps, drawn, list(series), name, "drafted tokens")})

    def files(self, name: str, files: Mapping[str, Path]) -> None:
        import wandb

        # Read where they lie, now or by `wandb sync`: an export has gigabytes.
        _log_artifact(self, wandb.Artifact, name, files, policy="immutable", skip_cache=True)

    def end(self, code: int) -> None:
        self.run.finish(exit_code=code)


class TensorBoard(TensorBoardTracker, Dashboard):
    """TensorBoard's event files in train/tensorboard. It keeps no files and has no configuration but hyperparameters."""

    main_process_only = False  # nobody else has one
    title = "TensorBoard"
    modules = ("tensorboard",)
    remedy = "leave tensorboard out of tracking.backends"

    def __init__(self, info: RunInfo) -> None:
        super().__init__("tensorboard", info.folder)
        self.info = info

    def start(self) -> None:
        events = self.info.folder / "tensorboard"
        if self.info.fresh:
            shutil.rmtree(events, ignore_errors=True)
        self.empty = not events.exists()
        super().start()
        if self.empty:  # each call makes a folder of its own
            self.store_init_configuration(flatten(self.info.config))

    def rows(self, name: str, columns: Sequence[str], cells: Sequence[Sequence[Cell]]) -> None:
        lines = [["" if c is None else str(c) for c in row] for row in (columns, ["---"] * len(columns), *cells)]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines))


class Trackio(TrackioTracker, Dashboard):
    """Trackio, into train/trackio unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a place.

    It knows runs by their names, so that ours has an identity in it.
    """

    title = "Trackio"
    modules = ("trackio",)
    remedy = "correct Trackio's environment variables, or leave trackio out of tracking.backends"

    def __init__(self, info: RunInfo) -> None:
        known = info.kept_id("trackio")
        self.info, self.empty = info, known is None
        name = known or f"{info.name}-{uuid4().hex[:6]}"
        group = info.spec.group
        super().__init__(info.spec.project, name=name, group=group, config=dict(info.config), resume="allow")
        self.run_name_there = name

    def start(self) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((self.info.folder / "trackio").absolute()))
        with redirect_stdout(sys.stderr):  # standard output is for results
            super().start()
        self.info.keep_id("trackio", self.run_name_there)

    def rows(self, name: str, columns: Sequence[str], cells: Sequence[Sequence[Cell]]) -> None:
        import trackio

        self.log({name: trackio.Table(columns=list(columns), data=[list(row) for row in cells])})

    def files(self, name: str, files: Mapping[str, Path]) -> None:
        import trackio

        _log_artifact(self, trackio.Artifact, name, files)

    def end(self, code: int) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()  # as when the process ends, where it would speak again


class MLflow(MLflowTracker, Dashboard):
    """MLflow, at MLFLOW_TRACKING_URI or in train/mlflow (a database and a folder of artifacts)."""

    main_process_only = False  # nobody else has one
    title = "MLflow"
    modules = ("mlflow", "sqlalchemy", "alembic")
    remedy = "correct MLFLOW_TRACKING_URI, or leave mlflow out of tracking.backends"

    def __init__(self, info: RunInfo) -> None:
        spec, own, known = info.spec, (info.folder / "mlflow").absolute(), info.kept_id("mlflow")
        self.info, self.empty = info, known is None
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self.uri = server or f"sqlite:///{own / 'mlflow.db'}"
        super().__init__(
            spec.project,
            logging_dir=None if server else (own / "artifacts").as_uri(),
            run_id=known,
            tags=dict.fromkeys(spec.tags, "true") | ({"group": spec.group} if spec.group else {}),
            run_name=info.name,
            description=spec.notes,
        )

    def start(self) -> None:
        import mlflow

        if self.uri.startswith("sqlite:"):
            Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(self.uri)
        super().start()
        self.info.keep_id("mlflow", self.active_run.info.run_id)
        if self.empty:  # a parameter never changes
            config = flatten(self.info.config)
            self.store_init_configuration({_plain(key, " /"): value for key, value in config.items()})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        super().log({_plain(key, " /"): value for key, value in values.items()}, step=step)

    def rows(self, name: str, columns: Sequence[str], cells: Sequence[Sequence[Cell]]) -> None:
        import mlflow

        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns, *cells])
        mlflow.log_text(text.getvalue(), f"{name}.csv")  # which MLflow shows as a table

    def files(self, name: str, files: Mapping[str, Path]) -> None:
        for inside, path in files.items():
            self.log_artifact(str(path), str(Path(name, inside).parent))

    def end(self, code: int) -> None:
        import mlflow

        mlflow.end_run("FINISHED" if code == 0 else "KILLED" if code > 128 else "FAILED")


def _log_artifact(board: Any, kind: type[Any], name: str, files: Mapping[str, Path], **how: Any) -> None:
    """Log files as one artifact of W&B or Trackio, whose calls are the same."""
    artifact = kind(_plain(f"{board.info.name}-{name}"), type=name)
    for inside, path in files.items():
        artifact.add_file(str(path), name=inside, **how)
    board.run.log_artifact(artifact)


def _plain(name: str, also: str = "") -> str:
    """Return a name with those characters alone that dashboards take, and those of `also`."""
    return re.sub(rf"[^A-Za-z0-9_.{also}-]", "_", name)


DASHBOARDS: dict[Backend, type[WandB | TensorBoard | Trackio | MLflow]] = {
    "wandb": WandB,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": MLflow,
}
