"""Read the result files of the comparison, and choose the run of each drafter that the tables show."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def read_entries(folder: Path, order: Sequence[str]) -> list[Entry]:
    """Return what the result files of a folder hold, in this order of their names; those of another name come last. "row" is
    the run of each that the tables show: on the answers that most drafters learned from, where it has one on them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    common = common_answers(found)
    for entry in found:
        entry["row"] = best_run(entry["runs"], common)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda entry: (rank.get(entry["name"], len(rank)), entry["name"]))


def answers_of(run: dict[str, Any]) -> str | None:
    """Return what identifies the answers that a run learned from."""
    return run["training"].get("answers")


def common_answers(entries: Sequence[Entry]) -> list[str | None]:
    """Return the set of answers that most drafters have learned from, of several the newest; none where there are no runs."""
    runs = [run for entry in entries for run in entry["runs"]]
    if not runs:
        return []

    def rank(texts: str | None) -> tuple[int, str]:
        drafters = sum(any(answers_of(run) == texts for run in entry["runs"]) for entry in entries)
        return drafters, max(run["date"] for run in runs if answers_of(run) == texts)

    return [max({answers_of(run) for run in runs}, key=rank)]


def best_run(runs: Sequence[dict[str, Any]], among: Collection[str | None] = ()) -> dict[str, Any]:
    """Return the run with the longest tau on held-out answers, which a single run need not have. Two sets of answers have
    different held-out texts, so only runs on the sets `among` are compared, or else those on the newest run's set."""
    newest = max(runs, key=lambda run: run["date"])
    alike = [run for run in runs if answers_of(run) in among]
    alike = alike or [run for run in runs if answers_of(run) == answers_of(newest)]
    return max(alike, key=lambda run: run.get("heldout_tau", 0.0))
