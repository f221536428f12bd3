"""A comparison in print: within 80 columns, what a terminal leaves out is in the file, and nothing is taken for markup."""

import io
import json
from dataclasses import asdict, replace

from rich.console import Console

from draftsmith.eval.gate.compare import Comparison, compare_results
from draftsmith.eval.report.comparison import comparison_markdown, comparison_text
from tests.eval.gate.test_compare import decoded, drafting


def printed(comparison: Comparison) -> list[str]:
    page = io.StringIO()
    Console(width=80, file=page).print(comparison_text(comparison))
    return page.getvalue().splitlines()


def test_a_terminal_shows_what_matters() -> None:
    lines = printed(compare_results(decoded(), decoded(2.6, ttft_s=0.031), ("old/result.json", "new/result.json")))
    assert all(len(line) <= 80 for line in lines)
    cells = [line.split() for line in lines]
    assert ["overall", "tau", "3.00", "2.60", "-0.40", "-0.62", "to", "-0.18", "worse"] in cells
    assert ["overall", "TTFT", "ms", "20.0", "31.0", "+11.0", "–"] in cells
    assert ["overall", "position", "2", "0.500", "0.500", "+0.000", "–"] in cells
    assert ["overall", "unequal", "timed", "1", "1", "+0", "-4", "to", "+4", "same"] in cells
    assert {row[1] for row in cells if row[:1] == ["chat"]} == {"tau", "speedup"}, "tau simulated is worse too"
    assert cells[-1][:3] == ["Of", "24", "numbers"]


def test_a_slice_shows_what_is_beyond_noise() -> None:
    lines = printed(compare_results(decoded(), decoded(looping=0.9)))
    assert any(line.split()[:2] == ["code", "looping"] for line in lines)
    assert not any(line.split()[:2] == ["code", "TTFT"] for line in lines)


def test_other_draft_lengths_are_named_where_they_are_compared() -> None:
    found = compare_results(drafting(5, {1: 1.5, 3: 1.9, 5: 2.0}), drafting(3, {1: 1.6, 3: 2.1}), ("runs/a", "runs/b"))
    lines = printed(found)
    assert all(len(line) <= 80 for line in lines)
    assert lines[:2] == ["old  runs/a (temperature 0)", "new  runs/b (temperature 0)"]
    assert "eagle3, K = 5 -> 3" in [line.rstrip() for line in lines]
    cells = [line.split() for line in lines]
    assert ["overall", "tau", "at", "K", "=", "1", "1.50", "1.60", "+0.10", "–"] in cells
    assert [row for row in cells if row[:2] == ["code", "tau"]] == [
        ["code", "tau", "at", "K", "=", "3", "1.90", "2.10", "+0.20", "–"]
    ]
    assert "## eagle3, K = 5" in comparison_markdown(compare_results(decoded(), decoded()))


def test_files_hold_everything() -> None:
    found = compare_results(decoded(), decoded(2.6))
    rows = [line for line in comparison_markdown(found).splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(found.drafters[0].differences)
    assert "| code | TTFT ms | 20.0 | 20.0 | +0.0 | – |  |" in rows
    kept = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert kept["drafters"][0]["differences"][0]["metric"] == "tau"
    assert len(kept["drafters"][0]["differences"]) == len(found.drafters[0].differences)


def test_names_are_no_markup() -> None:
    odd = replace(decoded(), drafters={"a [red]b|c": decoded().drafters["eagle3"]})
    found = compare_results(odd, odd, ("x[/].json", "y.json"))
    assert any("a [red]b|c" in line for line in printed(found))
    assert any("x[/].json" in line for line in printed(found))
    assert r"## a \[red\]b\|c" in comparison_markdown(found)
