"""The tables of the decoding bench, as JSON and as Markdown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftsmith.eval.measure.round_profile import RoundProfile


@dataclass(frozen=True)
class Row:
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


def as_json(row: Row) -> dict[str, Any]:
    """Return a row with the sums of its profile."""
    found = asdict(row)
    if row.profile is not None:
        found["profile"] |= {"total": row.profile.total, "outside": row.profile.outside}
    return found


def render(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the tables: speeds, then where a round's time goes."""
    hardware = facts["hardware"]
    lines = [
        f"Decoding of {facts['prompts']} prompts, {facts['repeats']} interleaved repeats, {facts['target']['dtype']}, "
        f"temperature {facts['sampling']['temperature']:g}, {facts['date']}, commit {facts['commit']}, "
        f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} thread(s).",
        "",
        "| batch | system | tok/s | spread | speedup | spread | tau | of the ideal | equal texts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row.tok_s_spread
        slow, fast = row.speedup_spread
        tau = "" if row.tau is None else f"{row.tau:.2f}"
        share = "" if row.share_of_ideal is None else f"{row.share_of_ideal:.2f}"
        equal = "" if row.equal is None else f"{row.equal}/{row.texts}"
        lines.append(
            f"| {row.batch} | {row.system} | {row.tok_s:.0f} | {low:.0f} to {high:.0f} | {row.speedup:.2f}x | "
            f"{slow:.2f} to {fast:.2f} | {tau} | {share} | {equal} |"
        )
    lines += [
        "",
        "Milliseconds per round:",
        "",
        "| batch | system | target forward | draft forward | choosing drafts | masks | verify and commit | round | outside |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if (p := row.profile) is not None and p.rounds:
            lines.append(
                f"| {row.batch} | {row.system} | {p.target:.2f} | {p.draft:.2f} | {p.draft_other:.2f} | "
                f"{p.verify_other:.2f} | {p.commit:.2f} | {p.total:.2f} | {100 * p.outside / p.total:.1f}% |"
            )
    return "\n".join(lines) + "\n"


def read_bench(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows and the facts of a bench.json, as `render` takes them."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = [field.name for field in fields(RoundProfile)]
    rows = []
    for row in facts.pop("rows"):
        profile = row["profile"] and RoundProfile(**{name: row["profile"][name] for name in names})
        rows.append(Row(**{**row, "profile": profile}))
    return rows, facts
