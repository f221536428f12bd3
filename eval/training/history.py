"""How a head came to be: what it learned from, its held-out tau evaluation by evaluation, and what more data would bring.

It is read from the run directory: train/metrics.jsonl, train/summary.json and run.json. Tau over the tokens n that training has
read is forecast by a power law, in its logit between 1 (nothing is accepted) and K + 1 (everything is):

    y = log((tau - 1) / (K + 1 - tau))        y(n) = a - b * ((n / N)^-c - 1) / c

a is y at the N tokens that are forecast for, b its slope there per e-fold of the data, c how fast the slope falls. The learning
rate's decay lifts every curve towards its end, and is a part of what b and c describe. A grid over b, c and the noise, with a
integrated out, gives the distribution of tau at N: its median and an interval. tests/eval/training/test_history.py measures how
far this holds, on every committed curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import parse_json, read_lines, read_object
from draftsmith.heads.record import read_passport
from draftsmith.heads.vocab import Coverage

LEVEL = 0.9
"""The share of forecasts whose interval is to hold what comes."""
FEWEST = 2
"""Evaluations that a forecast takes. The start, tau 1 before the first token, is a third point: every curve passes through it."""
DRIFT = 0.4
"""How far a curve strays from one power law, as a share of its slope, per e-fold of data between a point and the last one:
the least with which the forecasts of test_forecast.py hold."""

_MOST_POINTS = 100
_SLOPES = np.geomspace(0.01, 3.0, 40)
_CURVATURES = np.geomspace(0.03, 3.0, 20)
_NOISES = np.geomspace(0.004, 0.064, 5)
_ROUNDING = 0.005
"""Noise of tau itself, which counts near 1, where its logit is steep."""
# Priors, wide enough for every curve that is known: mean and deviation of log b and of log c; deviation of a around 0.
_LOG_SLOPE, _LOG_CURVATURE, _END = (np.log(0.2), 1.0), (np.log(0.3), 1.0), 2.0
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 40) for i in range(40)])


@dataclass(frozen=True)
class Point:
    """An evaluation of a training. tokens: that it had read by then, prompts included. tau: on the held-out answers."""

    step: int
    tokens: int
    tau: float


@dataclass(frozen=True)
class Forecast:
    """Tau when training has read so many `tokens`: the median, and the interval that holds it with `LEVEL`."""

    tokens: int
    tau: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.tau:.2f} [{self.low:.2f}, {self.high:.2f}]"


def forecast(points: Sequence[Point], tokens: int, num_speculative_tokens: int) -> Forecast | None:
    """Forecast tau at `tokens` from the evaluations in `points`; None where these are fewer than `FEWEST`.

    tokens: of a training with the same recipe, which ends there. num_speculative_tokens: K of the held-out tau. An evaluation
    before the first step, as a warm start has it, says nothing of how fast the head learns and is left out.
    """
    read = [point for point in points if point.tokens > 0]
    if len(read) < FEWEST:
        return None
    read = read[-1 :: -max(1, -(-len(read) // _MOST_POINTS))][::-1]
    highest = 1.0 + num_speculative_tokens
    tau = np.clip([point.tau for point in read], 1.002, highest - 0.002)
    share = np.array([point.tokens / tokens for point in read])
    weight, mean, variance = _posterior(share, tau, highest)
    values = (mean[:, None] + np.sqrt(variance)[:, None] * _NORMAL).ravel()
    order = values.argsort()
    cumulated = np.repeat(weight / len(_NORMAL), len(_NORMAL))[order].cumsum()
    quantiles = np.interp([(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], cumulated, values[order])
    low, median, high = (1.0 + (highest - 1.0) / (1.0 + np.exp(-quantiles))).tolist()
    return Forecast(tokens, median, low, high)


def _posterior(share: np.ndarray, tau: np.ndarray, highest: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weight, mean and variance of y at N for every likely (noise, b, c).

    Axes: noise, b, c, points. share: n / N of the points [P]; tau [P].
    """
    y, steepness = np.log((tau - 1.0) / (highest - tau)), 1.0 / (tau - 1.0) + 1.0 / (highest - tau)
    slope, curvature, noise = _SLOPES[:, None, None], _CURVATURES[:, None], _NOISES[:, None, None, None]
    ends = y + slope * (share**-curvature - 1.0) / curvature  # what a would be by each point alone
    drift = (DRIFT * slope) ** 2
    variance = noise**2 + (_ROUNDING * steepness) ** 2 + drift * np.log(share[-1] / share) ** 2
    weight = 1.0 / variance
    total = weight.sum(-1) + _END**-2.0
    end = (weight * ends).sum(-1) / total
    misfit = (weight * (ends - end[..., None]) ** 2).sum(-1) + (end / _END) ** 2
    prior = sum(
        ((np.log(grid) - mean) / deviation) ** 2
        for grid, (mean, deviation) in ((_SLOPES[:, None], _LOG_SLOPE), (_CURVATURES, _LOG_CURVATURE))
    )
    log_weight = -0.5 * (misfit + np.log(variance).sum(-1) + np.log(total) + prior)
    ahead = 1.0 / total + noise[..., 0] ** 2 + drift[..., 0] * np.log(share[-1]) ** 2
    likelihood = np.exp(log_weight - log_weight.max())
    likely = likelihood > 1e-4
    return likelihood[likely] / likelihood[likely].sum(), end[likely], np.broadcast_to(ahead, end.shape)[likely]


UNTAUGHT = 1.1
"""The held-out tau below which a head has learned next to nothing; the target alone has 1."""
_NEAR_CHANCE = 0.05
_LITTLE = 0.02
"""The share of tau that twice the data must bring to be worth mentioning."""
_REMEDY = "restore the file, or train again with --redo train"


@dataclass(frozen=True)
class History:
    """How a head came to be; None stands for what was not recorded, by an earlier version or because training is not done.

    method: of the head. answers, heldout_answers: that it learned from, and that were kept out. supervised_tokens: rows that it learned from, over all
    epochs. points: the evaluations, one before the first step where training started from a head. epochs: at the last one.
    accuracy, chance: of the best evaluation, for the first draft token: the head's, and that of always guessing the target's
    most common choice. num_speculative_tokens: K of tau. coverage: of the draft vocabulary; also None where the head drafts
    the whole one. forecast: at the end of a training that is not done, by its last evaluation.
    """

    method: str | None
    answers: int | None
    heldout_answers: int | None
    supervised_tokens: int | None
    epochs: float | None
    points: tuple[Point, ...]
    accuracy: float | None
    chance: float | None
    num_speculative_tokens: int | None
    coverage: Coverage | None
    finished: bool
    forecast: Forecast | None

    @property
    def best(self) -> Point:
        """The evaluation whose head is kept."""
        return max(self.points, key=lambda point: point.tau)

    @property
    def tokens(self) -> int:
        """Tokens that training had read at the last evaluation, prompts included, over all epochs."""
        return self.points[-1].tokens

    @property
    def learned_nothing(self) -> bool:
        """Whether tau is about 1, and accuracy, where both are recorded, about that of always guessing the same token."""
        near = self.accuracy is None or self.chance is None or self.accuracy <= self.chance + _NEAR_CHANCE
        return self.best.tau < UNTAUGHT and near

    def at(self, tokens: int) -> Forecast | None:
        """Forecast tau of a training like this one that reads so many tokens; None where the evaluations are too few, or K is not
        known.

        In a longer training the learning rate falls later. So for more tokens than this one's schedule has, only its first half
        counts, where the rate had hardly fallen; and more data are not taken to make a worse head. Such a forecast is cautious: this
        training repeats its answers where one with more data reads new ones (docs/train-a-head.md has the figures).
        """
        k, points, least = self.num_speculative_tokens, self.points, 1.0
        end = self.tokens if self.finished else tokens if self.forecast is None else self.forecast.tokens
        if tokens > end:
            points, least = tuple(point for point in points if 2 * point.tokens <= end), self.best.tau
        ahead = None if k is None else forecast(points, tokens, k)
        if ahead is None:
            return None
        return replace(ahead, **{name: max(getattr(ahead, name), least) for name in ("tau", "low", "high")})

    @property
    def twice(self) -> Forecast | None:
        """Tau with twice the data, in as many epochs."""
        return self.at(2 * self.tokens)


def read_history(run: Path) -> History | None:
    """Return how the head in a run directory came to be; None where no evaluation is recorded.

    run: the run directory, or a folder that has metrics.jsonl itself. Raises UserError for files that are damaged; a last line
    that was cut short is left out.
    """
    folder = run / "train" if (run / "train").is_dir() else run
    path, records = folder / "metrics.jsonl", list[tuple[Point, dict[str, Any]]]()
    for number, line in enumerate(read_lines(path, _REMEDY) if path.exists() else (), start=1):
        if b'"tau"' in line and line.endswith(b"\n"):  # one in hundreds has it
            place = f"{path}, line {number}"
            record = parse_json(line, place, _REMEDY)
            if not isinstance(record, dict):
                raise UserError(f"{place} is no step of a training: {_REMEDY}.")
            if point := point_of(record, place):
                records.append((point, record))
    if not records:
        return None
    points = tuple(point for point, _ in records)
    best = max(records, key=lambda pair: pair[0].tau)[1]
    summary = read_object(folder / "summary.json", _REMEDY) if (folder / "summary.json").exists() else {}
    inputs, facts = read_stage(run / "run.json", "train")
    last, covered = records[-1][1], facts.get("coverage")
    # As many as the head drafts, where that is less than the recipe asks for.
    own = last["tau"] if isinstance(last["tau"], dict) else {}
    promised = last.get("forecast")
    method = inputs.get("method")
    return History(
        method=method if isinstance(method, str) else None,
        answers=_number(facts, "answers"),
        heldout_answers=_number(facts, "heldout_answers"),
        supervised_tokens=_number(summary, "rows"),
        epochs=_figure(last.get("epoch")),
        points=points,
        accuracy=_figure(best.get("heldout_accuracy")),
        chance=_figure(best.get("heldout_chance")),
        num_speculative_tokens=_number({**inputs, **own}, "num_speculative_tokens"),
        coverage=None if covered is None else read_dataclass(Coverage, covered, f"{run / 'run.json'}, coverage"),
        finished=bool(summary),
        forecast=None if summary or promised is None else read_dataclass(Forecast, promised, str(folder)),
    )


def run_of(head: Path) -> Path | None:
    """Return the run directory that the folder of a head or of an export lies in, None where it lies in none."""
    return next((folder for folder in head.resolve().parents[:3] if (folder / "run.json").is_file()), None)


def trained_length(head: Path) -> int | None:
    """Return the tokens of the longest text that the head in a folder of a run, or of an export, learned from; None where neither the
    run nor a passport records it. Raises UserError for a damaged record."""
    if (run := run_of(head)) is not None:
        return _number(read_stage(run / "run.json", "train")[1], "longest")
    passport = read_passport(head)
    return None if passport is None or passport.trained is None else passport.trained.longest


def tell(past: History) -> list[str]:
    """Return in sentences how a head came to be, and what more data would bring."""
    first, best, last = past.points[0], past.best, past.points[-1]
    parts = [f"{past.answers:,} answers" if past.answers is not None else ""]
    parts += [f"{past.supervised_tokens:,} supervised tokens" if past.supervised_tokens is not None else ""]
    parts += [f"{past.epochs:.3g} epoch{'' if past.epochs == 1 else 's'}" if past.epochs is not None else ""]
    ends = dict.fromkeys(f"{point.tau:.2f} at step {point.step}" for point in (first, last))  # one evaluation is both
    curve = f"held-out tau {', '.join(ends)}"
    kept = "" if best is last else f"; the head of step {best.step} is kept, with {best.tau:.2f}"
    lines = [f"learned from {', '.join(part for part in parts if part)}: {curve}{kept}" if any(parts) else curve + kept]
    if past.coverage is not None:
        held, inside = past.coverage.heldout, past.coverage.training
        lines.append(
            f"the draft vocabulary covers {held:.1%} of the held-out answers, {inside:.1%} of those learned from"
        )
    if past.learned_nothing:
        lines.append(f"warning: {untaught(past)}")
    elif past.finished and (more := past.twice) is not None:
        worth = (
            f"after {best.tau:.2f}" if more.tau >= best.tau * (1 + _LITTLE) else "so more of the same may bring little"
        )
        lines.append(f"with twice the data tau would be about {more} by this curve, {worth}")
    return lines


def untaught(past: History) -> str:
    """Return in a sentence that a head has learned nothing, and what to check."""
    guess = ""
    if past.accuracy is not None and past.chance is not None:
        guess = f", its accuracy {past.accuracy:.3f} where guessing the most common token gives {past.chance:.3f}"
    return (
        f"the head has learned nothing: its best held-out tau is {past.best.tau:.2f} (the target alone has 1)"
        f"{guess}; before it is measured, check train.lr (metrics.jsonl holds its course), with `draftsmith inspect` "
        "that the supervised tokens are the answers, and that the target wrote these answers; then train again or for longer."
    )


def point_of(record: Mapping[str, Any], place: str) -> Point | None:
    """Return the evaluation in a line of metrics.jsonl, None for a step without one. Raises UserError, naming the `place`."""
    if "tau" not in record:
        return None
    tau = record["tau"]
    fields = {"step": record.get("step"), "tokens": record.get("tokens")}
    return read_dataclass(Point, fields | {"tau": tau.get("overall") if isinstance(tau, dict) else tau}, place)


def read_stage(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs and facts of a stage in run.json, empty where it is not recorded."""
    stage = read_object(path, _REMEDY).get(name, {}) if path.exists() else {}
    inputs, facts = (stage.get(name, {}) if isinstance(stage, dict) else None for name in ("inputs", "facts"))
    if not isinstance(inputs, dict) or not isinstance(facts, dict):
        raise UserError(f"{path} is no record of a run (its {name!r} has no inputs and facts): {_REMEDY}.")
    return inputs, facts


def _number(values: Mapping[str, Any], name: str) -> int | None:
    return values[name] if type(values.get(name)) is int else None


def _figure(value: Any) -> float | None:
    """Return a number, or the first of a list of numbers; None for anything else."""
    value = value[0] if isinstance(value, list) and value else value
    return float(value) if isinstance(value, int | float) else None
