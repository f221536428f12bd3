"""The held-out curves in docs/results, of trainings that reached their end: what forecasts are held against."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftsmith.eval.measure.forecast import Point

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


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
    found = []
    for path in sorted((RESULTS / "shared-target" / "train").glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        points = [Point(x["step"], x["tokens"], x["tau"]["overall"]) for x in lines if "tau" in x]
        found.append(Curve("shared-target", path.parent.name, 5, tuple(points)))
    for path in sorted((RESULTS / "starts").glob("*.json")):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            if len(run.get("evaluations", ())) > 2 and "stopped_at_step" not in run:
                points = [Point(x["step"], x["tokens"], x["heldout_tau"]) for x in run["evaluations"]]
                k = 4 if "hydra" in run["drafter"] else 5
                found.append(Curve(path.stem, run["command"], run.get("k", k), tuple(points)))
    return tuple(found)
