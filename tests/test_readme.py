"""Figures in README and docs are those of the committed result files, and their commands exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli.commands import COMMANDS
from draftsmith.eval.results.result import read_result
from scripts.bench.pages import rendered

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_and_references_are_rendered_from_the_code_and_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rendered(text), "run python -m scripts.bench.pages, which writes it"


def test_pages_have_the_blocks_that_are_rendered() -> None:
    marks = {
        "README.md": "results overall: ",
        "docs/train-a-head.md": "table: losses -->",
        "docs/trees.md": "table: trees -->",
        "docs/watch.md": "table: drift -->",
        "docs/api.md": "reference -->",
    }
    assert all(f"<!-- {mark}" in (ROOT / page).read_text(encoding="utf-8") for page, mark in marks.items())


def test_tables_of_the_decoding_bench_are_those_of_committed_results() -> None:
    page = ROOT / "docs" / "decoder.md"
    found = re.findall(r"<!-- bench: (.+?) -->\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    for name, table in found:
        facts = json.loads((page.parent / name).with_suffix(".json").read_text(encoding="utf-8"))
        assert f"commit {facts['commit']}, " in table
        for row in facts["rows"]:
            assert bench_row(row) in table
            if profile := row["profile"]:
                parts = ("target", "draft", "draft_other", "verify_other", "commit", "total")
                cells = [row["batch"], row["system"], *(f"{profile[part]:.2f}" for part in parts)]
                cells += [f"{profile['outside'] / profile['total']:.1%}"]
                assert f"| {' | '.join(map(str, cells))} |" in table
        assert table.strip() == (page.parent / name).read_text(encoding="utf-8").strip()


def bench_row(row: dict[str, Any]) -> str:
    """The row of a table of docs/decoder.md that a system of a bench.json has."""
    low, high = row["tok_s_spread"]
    less, more = row["speedup_spread"]
    cells = [row["batch"], row["system"], f"{row['tok_s']:.0f}", f"{low:.0f} to {high:.0f}", f"{row['speedup']:.2f}x"]
    cells += [f"{less:.2f} to {more:.2f}"]
    cells += ["" if row[key] is None else f"{row[key]:.2f}" for key in ("tau", "share_of_ideal")]
    cells += ["" if row["equal"] is None else f"{row['equal']}/{row['texts']}"]
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_commands_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for command in re.findall(r"(?<![\w/])draftsmith ([a-z-]+) --", text):
        assert command in COMMANDS
    for path in re.findall(r"(?<![\w./])((?:recipes|scripts|train)/[\w./-]+\.(?:yaml|sh|py|json))(?!\w)", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").rglob("result.json")), ids=str)
def test_committed_results_can_be_read_and_say_where_they_come_from(path: Path) -> None:
    result = read_result(path)
    assert result.commit
    assert result.command.startswith("draftsmith ")
    assert result.hardware.cpu
