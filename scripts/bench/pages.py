"""Renew what docs/ and README.md say of the code and of committed results: python -m scripts.bench.pages

That is the reference of docs/api.md (from docstrings), the table of losses in docs/train-a-head.md (from LOSSES), and the tables of
results and of trees. With --results, committed results are first given the fields that `Measures` has since, as null.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import indent

import draftsmith
from draftsmith.eval.report.cells import DASH
from draftsmith.eval.report.page_model import OVERALL, Row, Table
from draftsmith.eval.report.report import HEADLINE_COLUMNS, as_markdown, headline_rows
from draftsmith.eval.results.intervals import wilson
from draftsmith.eval.results.result import Measures, Result, read_result
from draftsmith.fields import find_ranges
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.storage import write_json
from scripts.bench.drift import AFTER

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells, a row per line; `head` names the columns."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def rendered(page: str) -> str:
    """Return a page with its reference and its tables as code and results have them."""
    made = {"reference": reference} | {f"table: {one.__name__}": one for one in (losses, trees, drift)}
    for mark, text in made.items():
        page = _block(mark).sub(lambda found, text=text: found[1] + text() + found[3], page)  # type: ignore[misc]
    of_files = {one.__name__: one for one in (drafters, contexts)}
    page = _block(rf"table: ({'|'.join(of_files)}) (.+?)").sub(
        lambda found: found[1] + of_files[found[2]](*found[3].split()) + found[5], page
    )
    return _block("results( overall)?: (.+?)").sub(
        lambda found: f"{found[1]}\n{results(found[3].split(), overall_only=bool(found[2]))}\n{found[5]}", page
    )


def _block(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def reference() -> str:
    """Return signature and docstring of every public function, in Markdown."""
    public = {name: getattr(draftsmith, name) for name in draftsmith.__all__}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    shown = {name: f"{name}({_parameters(one)})\n\n{inspect.getdoc(one)}\n" for name, one in functions.items()}
    return "\n".join(f"### {name}\n\n{indent(text, '    ')}" for name, text in shown.items())


def _parameters(function: object) -> str:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    plain = [str(one.replace(annotation=one.empty)) for one in found]
    named = [one.kind is one.KEYWORD_ONLY for one in found]
    return ", ".join([*plain[: named.index(True)], "*", *plain[named.index(True) :]] if True in named else plain)


def losses() -> str:
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


def trees() -> str:
    """Return what rules of trees get accepted by size, and how much more than others the first one does, of scripts/bench/trees.py."""
    facts = json.loads((ROOT / "docs" / "results" / "trees.json").read_text(encoding="utf-8"))
    sizes, rows = [], list[list[str]]()
    for temperature, found in facts["temperatures"].items():
        for rule, by_size in found["rules"].items():
            sizes = [*by_size]
            rows.append([temperature, f"`{rule}`", *(f"{one['tau']:.3f}" for one in by_size.values())])
        first = next(iter(found["rules"]))
        for rule, by_size in found["differences"].items():
            cells = [(one["difference"], *one["interval"]) for one in by_size.values()]
            rows.append(
                [temperature, f"`{first}` - `{rule}`", *("{:+.3f} ({:+.3f} to {:+.3f})".format(*c) for c in cells)]
            )
    return markdown_table(("temperature", "rule", *sizes), rows)


def drafters(file: str) -> str:
    """Return a row for every drafter of a result of scripts/bench/drafters.py: its size, tau, and how far it lies from the best one at
    temperature 0."""
    found = json.loads((ROOT / file).read_text(encoding="utf-8"))
    tables, head, rows = found["temperatures"], ["drafter", "M parameters"], list[list[str]]()
    swept = list(next(iter(tables["0"]["drafters"].values()))["tau_by_k"])
    lengths = [k for k in swept if k in ("1", "3", "5", "7") or (k == swept[-1] and int(k) < 5)]
    head += [f"τ at {temperature}, K = {k}" for temperature in tables for k in lengths] + ["behind the best at 0"]
    for name, one in sorted(tables["0"]["drafters"].items(), key=lambda pair: -pair[1]["tau_simulated"]):
        taus = [at["drafters"][name]["tau_by_k"].get(k) for at in tables.values() for k in lengths]
        behind = one["behind_best"]
        interval = DASH if behind is None else f"[{behind[0]:+.2f}, {behind[1]:+.2f}]"
        size = f"{one['draft']['parameters'] / 1e6:.1f}"
        rows.append([name, size, *(DASH if tau is None else f"{tau:.2f}" for tau in taus), interval])
    return markdown_table(head, rows)


def contexts(*files: str) -> str:
    """Return tau of every head and window by the length of the context, of results of scripts/bench/contexts.py with the same lengths."""
    found = [json.loads((ROOT / file).read_text(encoding="utf-8")) for file in files]
    lengths, rows = [str(length) for length in found[0]["lengths"]], list[list[str]]()
    for name, one in (pair for facts in found for pair in facts["temperatures"]["0"].items()):
        taus = [one["tau"][length] for length in lengths]
        rows.append([name, *(f"{tau:.2f} ({low:.2f} to {high:.2f})" for tau, (low, high) in taus)])
    return markdown_table(("drafter", "the question alone", *(f"{int(n):,} tokens" for n in lengths[1:])), rows)


def drift() -> str:
    """Return the errors of `draftsmith watch` on every kind of traffic, of scripts/bench/drift.py."""
    facts = json.loads((ROOT / "docs" / "results" / "drift.json").read_text(encoding="utf-8"))
    changes = [*next(iter(facts["traffic"].values()))["changes"]]
    rows = []
    for name, found in facts["traffic"].items():
        cells = [
            name,
            f"{sum(found['false_alarms'].values())} of {found['days']}",
            f"{found['baseline_requests']:,.0f}",
        ]
        for change in found["changes"].values():
            median, late = (DASH if change[at] is None else f"{change[at]:,.0f}" for at in ("median", "p95"))
            cells.append(f"{median} ({late}), {change['within_2000']:.0%}")
        rows.append(cells)
    table = markdown_table(("traffic", "days with a false alarm", "requests of the baseline", *changes), rows)
    days, wrong = (
        sum(one)
        for one in zip(*((f["days"], sum(f["false_alarms"].values())) for f in facts["traffic"].values()), strict=True)
    )
    hardware, most = facts["hardware"], wilson(wrong / days, days)[1]
    return f"{table}\nTogether {wrong} of {days:,} days: at most {most:.1%} a day (95%). Requests until the alarm: median (95th percentile), and the share within 2,000; {DASH}: not in {AFTER:,}. {facts['requests_per_day']:,} requests a day. `{facts['command']}`, commit {facts['commit'][:7]}, {hardware['cpu']}, {facts['date'][:10]}.\n"


def results(files: Sequence[str], *, overall_only: bool) -> str:
    """Return the closing table of results, without columns that hold nothing, such as speeds of a simulation. overall_only leaves out
    the slices."""
    rows = headline_rows([read_result(ROOT / name) for name in files])
    rows = [row for row in rows if not overall_only or row[1] == OVERALL]
    kept = [i for i in range(len(HEADLINE_COLUMNS)) if any(row[i] != DASH for row in rows)]
    columns, *lines = (tuple(cells[i] for i in kept) for cells in (HEADLINE_COLUMNS, *rows))
    return as_markdown(Table("", columns, tuple(map(Row, lines)), heads=2))


def add_fields() -> None:
    """Write the committed results again, under the version of now."""
    nulls = dict.fromkeys(field.name for field in fields(Measures))
    for path in (ROOT / "docs" / "results").rglob("result.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] not in (Result.schema_version - 1, Result.schema_version):
            raise SystemExit(f"{path} has the version {value['schema_version']}: evaluate again")
        for drafter in value["drafters"].values():
            drafter["overall"] = nulls | drafter["overall"]
            drafter["slices"] = {name: nulls | measures for name, measures in drafter["slices"].items()}
        write_json(path, value | {"schema_version": Result.schema_version})


if __name__ == "__main__":
    if "--results" in sys.argv[1:]:
        add_fields()
    for one in PAGES:
        one.write_text(rendered(one.read_text(encoding="utf-8")), encoding="utf-8")
