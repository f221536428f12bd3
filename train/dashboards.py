"""All dashboards of a run together: what training logs, what an evaluation found, and what they are given again.

A dashboard never ends a training: one that fails on the way is left out from there on, with a warning; only one that cannot start is
an error.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import PartialState

from draftsmith.errors import UserError, first_line
from draftsmith.eval.report.page_model import OVERALL
from draftsmith.eval.results.result import Measures, Result, read_result
from draftsmith.eval.training.history import Forecast, Point, forecast, point_of
from draftsmith.foreign.text import parse_json, read_lines
from draftsmith.progress import say
from draftsmith.recipe.schema import Recipe, TrackingSpec
from draftsmith.storage import explain_os_error, fingerprint, sha256_file, write_text
from draftsmith.train.process import code_of
from draftsmith.train.trackers import DASHBOARDS, Cell, RunInfo, flatten

_COLUMNS: dict[str, Callable[[Measures], Cell]] = {
    "prompts": lambda m: m.prompts,
    "rounds": lambda m: m.rounds,
    "tau": lambda m: m.tau,
    "tau_low": lambda m: m.tau_interval and m.tau_interval[0],
    "tau_high": lambda m: m.tau_interval and m.tau_interval[1],
    "tau_simulated": lambda m: m.tau_simulated,
    "acceptance_rate": lambda m: m.acceptance_rate,
    "decode_tok_s": lambda m: m.decode_tok_s,
    "baseline_tok_s": lambda m: m.baseline_tok_s,
    "speedup": lambda m: m.speedup,
}
"""What a table has of each slice."""
_FINDINGS = ("evaluation", "simulation")
"""The folders of a run that hold results."""


@dataclass(frozen=True)
class Past:
    """What metrics.jsonl holds: lines and records up to a step, and the last step of which there is a line."""

    lines: list[bytes]
    records: list[dict[str, Any]]
    seen: int


def read_past(path: Path, last: float = inf) -> Past:
    """Return the lines of metrics.jsonl up to step `last`; a line that was cut short ends them. Raises UserError for a damaged one."""
    past = Past([], [], -1)
    remedy, after = "remove that line, or add --redo train to begin again", 0
    for number, line in enumerate(read_lines(path, remedy) if path.exists() else (), start=1):
        if not line.endswith(b"\n"):
            break
        if after:
            after += 1
            continue
        where = f"{path}, line {number}"
        record = parse_json(line, where, remedy)
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f"{where} holds no step of a training: {remedy}.")
        if record["step"] > last:
            after = 1
            continue
        past.lines.append(line)
        past.records.append(record)
    return replace(past, seen=(past.records[-1]["step"] if past.records else 0) + after)


class Dashboards:
    """The dashboards that are on: a context that ends their runs with the exit code.

    train/dashboards.jsonl keeps what they get beyond metrics.jsonl, for those that have to be given all again: the configuration,
    clocks and memory by step, the summary.
    """

    def __init__(
        self, folder: Path, spec: TrackingSpec, name: str, config: Mapping[str, Any] | None, past: Past, *, fresh: bool
    ) -> None:
        """Start them. config: None takes that of the training. fresh: a training that starts over."""
        self._path, self._boards, self._seen = folder / "dashboards.jsonl", list[Any](), past.seen
        self._step = past.records[-1]["step"] if past.records else 0
        self.failed = False
        if not spec.active:
            return
        self.kept = {} if fresh else read_kept(self._path)
        if config is not None:
            self.kept["config"] = dict(config)
        lines = ({kind: {key: value}} for kind, values in self.kept.items() for key, value in values.items())
        write_text(self._path, "".join(f"{json.dumps(line)}\n" for line in lines))
        # Accelerate's trackers want one; that of a training is left as it is.
        PartialState(cpu=not torch.cuda.is_available())
        info = RunInfo(folder, spec, spec.name or name, self.kept.get("config", {}), fresh)
        try:
            for backend in spec.active:
                kind = DASHBOARDS[backend]
                try:
                    board = kind(info)
                    board.start()
                except Exception as error:
                    why = " ".join(str(error).split())
                    raise UserError(f"{kind.title} did not start ({why}): {kind.remedy}.") from error
                self._boards.append(board)
        except BaseException:
            self._each(lambda board: board.end(1))
            raise
        self._each(lambda board: self._give_past(board, past) if board.empty else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda board: board.end(0 if error is None else code_of(error)))

    def _give_past(self, board: Any, past: Past) -> None:
        clocks = self.kept.get("clocks", {})
        for record in past.records:
            board.log(_prefixed(record, clocks.get(str(record["step"]), {})), step=record["step"])
        if summary := self.kept.get("summary"):
            board.summary(summary, self._step)

    def _each(self, act: Callable[[Any], None]) -> None:
        for board in tuple(self._boards):
            try:
                act(board)
            except Exception as error:  # noqa: BLE001 - whatever a network and its client do, training goes on
                self._boards.remove(board)
                self.failed = True
                what = "metrics.jsonl has them all, and result.json those of an evaluation"
                say(f"warning: {board.title} failed and gets no more figures ({first_line(error)}): {what}.")

    def keep(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keep values in dashboards.jsonl."""
        with explain_os_error(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: values}) + "\n")

    def log(self, record: Mapping[str, Any], clocks: Mapping[str, float] | None = None) -> None:
        """Give them a line of metrics.jsonl and what the clock says of it. Those that went on already have what the interrupted
        process logged after its last checkpoint."""
        self._step = record["step"]
        if self._boards:
            self.keep("clocks", {str(self._step): clocks or {}})
            values = _prefixed(record, clocks or {})
            new = self._step > self._seen
            self._each(lambda board: board.log(values, step=self._step) if new or board.empty else None)

    def summary(self, values: Mapping[str, float]) -> None:
        """Give them the figures that stand for the whole run."""
        if self._boards:
            self.keep("summary", values)
            self._each(lambda board: board.summary(values, self._step))

    def rows(self, name: str, columns: Sequence[str], cells: Sequence[Sequence[Cell]]) -> None:
        """Give them a table."""
        self._each(lambda board: board.rows(name, columns, cells))

    def curves(self, name: str, series: Mapping[str, Sequence[float]]) -> None:
        """Give them curves, whose first values stand at 1."""
        if series:
            self._each(lambda board: board.curves(name, series))

    def files(self, name: str, files: Mapping[str, Path]) -> None:
        """Let them keep files, by their paths within what is called `name`."""
        self._each(lambda board: board.files(name, files))


class Tracker(Dashboards):
    """The dashboards of a training, with metrics.jsonl, which gets a JSON object per step.

    curve: the evaluations so far, also those before an interruption. The file holds no clock times, so that an interrupted and
    resumed run leaves the same file.
    """

    def __init__(self, folder: Path, spec: TrackingSpec, name: str, config: dict[str, Any], resume_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        # A run that starts over evaluates its initial head again, as step 0.
        past = read_past(self.path, resume_step or -1)
        if self.path.exists():  # what a killed run wrote after its last checkpoint will be written again
            write_text(self.path, b"".join(past.lines).decode())
        self.curve = [point for record in past.records if (point := point_of(record, str(self.path)))]
        super().__init__(folder, spec, name, config, past, fresh=resume_step == 0)

    def foresee(self, record: dict[str, Any], total: int, num_speculative_tokens: int) -> Forecast | None:
        """Add the evaluation in `record` to the curve, and the forecast of tau after `total` steps to the record; return it,
        None where none can be made or the training ends here."""
        point = Point(record["step"], record["tokens"], record["tau"]["overall"])
        self.curve.append(point)
        if not 0 < point.step < total:
            return None
        expected = forecast(self.curve, round(point.tokens * total / point.step), num_speculative_tokens)
        if expected is not None:
            record["forecast"] = asdict(expected)
        return expected

    def log(self, record: Mapping[str, Any], clocks: Mapping[str, float] | None = None) -> None:
        """Log one step; its `clocks` (speeds, memory) go to the dashboards alone."""
        with explain_os_error(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        super().log(record, clocks)


def read_kept(path: Path) -> dict[str, dict[str, Any]]:
    """Return what dashboards.jsonl holds, later values in place of earlier ones; a line that was cut short is left out."""
    kept: dict[str, dict[str, Any]] = {}
    remedy = "remove the file, which holds clocks alone"
    for number, line in enumerate(read_lines(path, remedy) if path.exists() else (), start=1):
        values = parse_json(line, f"{path}, line {number}", remedy) if line.endswith(b"\n") else {}
        if not isinstance(values, dict) or not all(isinstance(value, dict) for value in values.values()):
            raise UserError(f"{path}, line {number} holds nothing for a dashboard: {remedy}.")
        for key, value in values.items():
            kept.setdefault(key, {}).update(value)
    return kept


def _prefixed(record: Mapping[str, Any], clocks: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step under train/ and heldout/."""
    named: dict[str, Any] = {"train": dict(clocks), "heldout": {}}
    for key, value in record.items():
        if key == "tau":
            named["heldout"] |= {"tau": value["overall"], "tau_by_slice": value["slices"]}
        elif key.startswith("heldout_") or key == "forecast":
            named["heldout"][key.removeprefix("heldout_")] = value
        elif key != "step":
            named["train"][key] = value
    return flatten(named)


def track_results(recipe: Recipe) -> None:
    """Give the dashboards of a run's training what its evaluation found: a table and curves per slice, and the files that
    `tracking.artifacts` names; nothing where they have them already."""
    run, spec, folder = recipe.run_dir, recipe.tracking, recipe.run_dir / "train"
    results = {kind: sorted(run.glob(f"{kind}/t*/result.json")) for kind in _FINDINGS}
    folders = {"results": _FINDINGS} | ({"head": ("export",)} if spec.artifacts == "all" else {})
    files = {
        kind: {path.relative_to(run).as_posix(): path for path in paths}
        for kind, names in (folders.items() if spec.artifacts != "none" else ())
        if (paths := [p for name in names for p in sorted((run / name).rglob("*")) if p.is_file() and p.name[0] != "."])
    }
    heads = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files.get("head", {}).values()]
    digests = [sha256_file(path) for paths in results.values() for path in paths]
    sent = {"digest": fingerprint([spec.active, spec.artifacts, heads, digests])}
    if not (digests or heads) or read_kept(folder / "dashboards.jsonl").get("sent") == sent:
        return
    past = read_past(folder / "metrics.jsonl")
    with Dashboards(folder, spec, recipe.name, None, past, fresh=False) as boards:
        for kind, paths in results.items():
            if paths:
                _give_results(boards, kind, [read_result(path) for path in paths])
        for name, inside in files.items():
            boards.files(name, inside)
        if not boards.failed:  # else the next evaluation tries again
            boards.keep("sent", sent)


def tell_offline(recipe: Recipe) -> list[str]:
    """Return a line that says where W&B kept what it was given without a network, and how to send it; none where it kept nothing."""
    runs = sorted((recipe.run_dir / "train" / "wandb").glob("offline-run-*"))
    if "wandb" not in recipe.tracking.active or recipe.tracking.wandb == "online" or not runs:
        return []
    return [f"W&B: offline, in {runs[-1]}; `wandb sync {shlex.quote(str(runs[-1]))}` sends it"]


def _give_results(boards: Dashboards, kind: str, results: Sequence[Result]) -> None:
    measured = [
        ((name, result.settings.temperature, slice_name), measures)
        for result in results
        for name, drafter in result.drafters.items()
        for slice_name, measures in ((OVERALL, drafter.overall), *drafter.slices.items())
    ]
    table = [[*labels, *(column(measures) for column in _COLUMNS.values())] for labels, measures in measured]
    boards.rows(f"{kind}/slices", ["drafter", "temperature", "slice", *_COLUMNS], table)
    named = {f"{name}/t{temperature:g}/{part}": measures for (name, temperature, part), measures in measured}
    at = {key: m.acceptance_at or m.acceptance_at_simulated or () for key, m in named.items()}
    lengths = {key: [point.tau_simulated for point in m.k_sweep or ()] for key, m in named.items()}
    for curve, series in (("acceptance_at", at), ("tau_by_length", lengths)):
        # Up to the first that was not measured.
        drawn: dict[str, Any] = {key: [*takewhile(lambda x: x is not None, values)] for key, values in series.items()}
        boards.curves(f"{kind}/{curve}", {key: values for key, values in drawn.items() if values})
    figures = {
        f"{kind}/{name}/t{temperature:g}/{column}": value
        for (name, temperature, part), measures in measured
        if part == OVERALL
        for column in ("tau", "tau_simulated", "speedup")
        if isinstance(value := _COLUMNS[column](measures), float)
    }
    boards.summary(figures)
