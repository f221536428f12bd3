"""Render the tables of the decoding bench, as JSON and as Markdown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.eval.measure.round_profile import RoundProfile
from scripts.bench.pages.markdown import markdown_table

_SPEEDS = ("batch", "system", "tok/s", "spread", "speedup", "spread", "tau", "of the ideal", "equal texts")
_ROUNDS = ("target forward", "draft forward", "choosing drafts", "masks", "verify and commit", "round", "outside")


@dataclass(frozen=True)
class SystemSpeed:
    """A system at one batch size. Speeds are medians over the repeats with their smallest and largest; speedup is paired
    with the target alone of the same repeat. ideal: at batch 1, tau over the separately timed passes of a round. equal:
    greedy texts that are those of the target alone. profile: milliseconds per round."""

    system: str
    batch: int
    tok_s: float
    tok_s_spread: tuple[float, float]
    speedup: float
    speedup_spread: tuple[float, float]
    tau: float | None
    ideal_tok_s: float | None
    share_of_ideal: float | None
    equal: int | None
    texts: int
    profile: RoundProfile | None


def as_json(row: SystemSpeed) -> dict[str, Any]:
    """Return a row with the sums of its profile."""
    found = asdict(row)
    if row.profile is not None:
        found["profile"] |= {"total": row.profile.total, "outside": row.profile.outside}
    return found


def render(rows: Sequence[SystemSpeed], facts: Mapping[str, Any]) -> str:
    """Return the tables: speeds, then where a round's time goes."""
    hardware = facts["hardware"]
    intro = (
        f"Decoding of {facts['prompts']} prompts, {facts['repeats']} interleaved repeats, {facts['target']['dtype']}, "
        f"temperature {facts['sampling']['temperature']:g}, {facts['date']}, commit {facts['commit']}, "
        f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} thread(s)."
    )
    speeds, rounds = [], []
    for row in rows:
        name = [str(row.batch), row.system]
        low, high = row.tok_s_spread
        cells = [f"{row.tok_s:.0f}", f"{low:.0f} to {high:.0f}", f"{row.speedup:.2f}x"]
        cells.append(f"{row.speedup_spread[0]:.2f} to {row.speedup_spread[1]:.2f}")
        cells += ["" if value is None else f"{value:.2f}" for value in (row.tau, row.share_of_ideal)]
        speeds.append([*name, *cells, "" if row.equal is None else f"{row.equal}/{row.texts}"])
        if (p := row.profile) is not None and p.rounds:
            parts = (p.target, p.draft, p.draft_other, p.verify_other, p.commit, p.total)
            rounds.append([*name, *(f"{ms:.2f}" for ms in parts), f"{100 * p.outside / p.total:.1f}%"])
    profile = markdown_table(("batch", "system", *_ROUNDS), rounds)
    return f"{intro}\n\n{markdown_table(_SPEEDS, speeds)}\nMilliseconds per round:\n\n{profile}"


def read_bench(path: Path) -> tuple[list[SystemSpeed], dict[str, Any]]:
    """Return the rows and the facts of a bench.json, as `render` takes them."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = [field.name for field in fields(RoundProfile)]
    rows = []
    for row in facts.pop("rows"):
        profile = row["profile"] and RoundProfile(**{name: row["profile"][name] for name in names})
        rows.append(SystemSpeed(**{**row, "profile": profile}))
    return rows, facts
