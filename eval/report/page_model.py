"""Model a report as plain values: results in, sections of text, tables and panels out.

Both templates (HTML and Markdown) print these values, so the two reports never differ in a number.
Pure: nothing here reads a clock, a file or the machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.errors import UserError
from draftsmith.eval.planner.decision import Decision
from draftsmith.eval.report.cells import off
from draftsmith.eval.report.plots import swatch
from draftsmith.eval.results.intervals import FEWEST_PROMPTS
from draftsmith.eval.results.result import OVERALL, DrafterResult, Measures, Piece, Result
from draftsmith.eval.training.history import History


@dataclass(frozen=True)
class System:
    """One drafter at one sampling setting; index decides colour and marker through the whole report."""

    label: str
    index: int
    name: str
    drafter: DrafterResult
    result_index: int


@dataclass(frozen=True)
class Row:
    """cells: one per column, as text. strong: set off, e.g. a total."""

    cells: tuple[str, ...]
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table. The first `heads` columns name the row; a run of equal first cells is a group.

    folded: shown on demand, as a picture shows the same. words: the cells are text rather than numbers.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    heads: int = 1
    folded: bool = False
    words: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels (SVG) under one caption; legend: (SVG swatch, name). wide: panels that need more room, two to a row. folded: shown on
    demand."""

    caption: str
    panels: tuple[str, ...]
    legend: tuple[tuple[str, str], ...] = ()
    wide: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Sample:
    """A worked example: rounds are the runs of tokens that one target pass wrote."""

    title: str
    prompt: str
    rounds: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Section:
    """One part of the report. about: how to read it. notes: always shown; words: sentences shown on demand. missing: said instead
    when nothing was measured. folded: shown on demand, as no decision needs it."""

    anchor: str
    title: str
    about: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    folded: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show but the sentence in `missing`."""
        return not (self.figures or self.tables or self.notes or self.words or self.samples or self.code)


@dataclass(frozen=True)
class View:
    """The results as the report shows them. labels: one per result. slices: OVERALL first, then as they appear. decision: what they
    come to, where costs are known; history: of the run's head."""

    results: tuple[Result, ...]
    labels: tuple[str, ...]
    systems: tuple[System, ...]
    slices: tuple[str, ...]
    decision: Decision | None = None
    history: History | None = None

    def measured(self, slice_name: str) -> list[tuple[System, Measures]]:
        """Return the systems that have a slice, with their measures there."""
        return [(system, m) for system in self.systems if (m := system.drafter.at(slice_name)) is not None]

    def rows(self, cells: Callable[[Measures], Sequence[str] | None]) -> tuple[Row, ...]:
        """Return a row per slice and system: these two, then the cells of its measures; none where these are None."""
        found = [(name, system.label, cells(m)) for name in self.slices for system, m in self.measured(name)]
        return tuple(Row((name, label, *texts), name == OVERALL) for name, label, texts in found if texts is not None)

    def spread(self, result_index: int, m: Measures, spread: tuple[float, float] | None) -> tuple[float, float] | None:
        """Return the spread of a speed over the repeats, None where one repeat or fewer than FEWEST_PROMPTS prompts made it."""
        enough = self.results[result_index].settings.repeats > 1 and m.prompts >= FEWEST_PROMPTS
        return spread if enough else None

    def where(self, result_index: int) -> str:
        """Return ", T=1" and the like to end a caption with; empty for a single result."""
        return f", {self.labels[result_index]}" if len(self.results) > 1 else ""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """The legend of a figure with a line or bar per system; one system needs none."""
        return tuple((swatch(s.index), s.label) for s in self.systems) if len(self.systems) > 1 else ()


def view_of(results: Sequence[Result], decision: Decision | None = None, history: History | None = None) -> View:
    """Label every drafter of every result by what distinguishes them. Raises UserError for no result."""
    if not results:
        raise UserError("A report needs at least one result.json; run the evaluation first.")
    # One short label per result: its temperature and, as far as needed, what else distinguishes it.
    traits = []
    for result in results:
        s = result.settings
        sampling = [f"T={s.temperature:g}", *(f"{name} {off(value)}" for name, value in s.filters.items())]
        run = [f"K={s.num_speculative_tokens}", s.dtype, f"batch {s.batch}", result.target.path, f"seed {s.seed}"]
        traits.append([*sampling, *run, (result.commit or "no commit")[:9], result.date])
    kept = [0]
    for i in range(1, len(traits[0])):
        known = len({tuple(trait[j] for j in kept) for trait in traits})
        if len({tuple(trait[j] for j in (*kept, i)) for trait in traits}) > known:
            kept.append(i)
    told = [", ".join(trait[i] for i in kept) for trait in traits]
    labels = [label if told.count(label) == 1 else f"{label}, result {i + 1}" for i, label in enumerate(told)]
    pairs = [(i, label, name) for i, label in enumerate(labels) for name in results[i].drafters]
    systems = tuple(
        System(f"{name} · {label}" if len(results) > 1 else name, index, name, results[i].drafters[name], i)
        for index, (i, label, name) in enumerate(pairs)
    )
    slices = (OVERALL, *dict.fromkeys(name for system in systems for name in system.drafter.slices))
    return View(tuple(results), tuple(labels), systems, slices, decision, history)


def best_k(m: Measures) -> int | None:
    """Return the draft length with the largest predicted speedup, the shortest of equals; None without costs."""
    known = [p for p in m.k_sweep or () if p.predicted_speedup is not None]
    return -max((p.predicted_speedup or 0.0, -p.num_speculative_tokens) for p in known)[1] if known else None


def tau_of(m: Measures) -> float | None:
    """Return the accepted length as decoded, else as simulated."""
    return m.tau if m.tau is not None else m.tau_simulated
