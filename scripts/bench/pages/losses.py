"""Renew the table of losses in docs/train-a-head.md from LOSSES: python -m scripts.bench.pages.losses"""

import re
from dataclasses import fields
from pathlib import Path

from draftsmith.fields import find_ranges
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.losses.spec import LossSpec
from scripts.bench.pages.tables import markdown_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "train-a-head.md"
BLOCK = re.compile(r"(?<=<!-- table: losses -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """Return a row for every loss: kind, formula, what it does, and its numbers with defaults and ranges."""
    ranges, defaults = dict(find_ranges(LossSpec, "")), {field.name: field.default for field in fields(LossSpec)}
    rows = [
        (
            f"`{loss.name}`",
            loss.formula,
            loss.summary,
            "; ".join(f"`{key}`, {defaults[key]}: {ranges[key]}" for key in loss.parameters),
        )
        for loss in LOSSES.values()
    ]
    return markdown_table(("kind", "formula", "what it does", "its numbers"), rows)


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
