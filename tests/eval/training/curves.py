"""Held-out curves of trainings that reached their end, on the embedded target and on one of 7.5M parameters for real text: what
forecasts are held against."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftsmith.eval.training.forecast import Point

CURVES = Path(__file__).resolve().parents[2] / "fixtures" / "curves"


@dataclass(frozen=True)
class Curve:
    """A training. set: those that were made together, which are no evidence for one another. k: drafts that tau counts."""

    set: str
    name: str
    k: int
    points: tuple[Point, ...]

    def until(self, share: float) -> tuple[Point, ...]:
        """Return the evaluations in the first `share` of the run, a hundredth more or less."""
        return tuple(p for p in self.points if p.tokens <= (share + 0.01) * self.points[-1].tokens)


@cache
def committed_curves() -> tuple[Curve, ...]:
    """Return every committed curve that reached its end."""
    runs = json.loads((CURVES / "real-text.json").read_text(encoding="utf-8"))
    found = [Curve(x["set"], x["name"], x["k"], tuple(Point(*point) for point in x["points"])) for x in runs]
    for run in json.loads((CURVES / "embedded.json").read_text(encoding="utf-8"))["runs"]:
        if len(run["evaluations"]) > 2 and "stopped_at_step" not in run:
            points = [Point(x["step"], x["tokens"], x["heldout_tau"]) for x in run["evaluations"]]
            found.append(Curve("embedded", run["command"], run["k"], tuple(points)))
    return tuple(found)
