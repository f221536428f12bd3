"""Build the appendix of the report: the training, latency, memory, loops, examples, and how it was measured.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

import json
from typing import Any

from draftsmith.eval.planner.plan import Memory, memory_at
from draftsmith.eval.report.cells import DASH, milliseconds, number, off, percent, significant, some, whole
from draftsmith.eval.report.page_model import OVERALL, Figure, Row, Sample, Section, System, Table, View
from draftsmith.eval.report.plots import Series, line_panel
from draftsmith.eval.results.conditions import sharers
from draftsmith.eval.results.result import Example, Percentiles, Piece, Result
from draftsmith.eval.training.history import tell


def training(view: View) -> Section:
    """The training of the run's head."""
    past = view.history
    about = (
        "Held-out tau is the simulated accepted length on answers that the head did not learn from. While it rises, more data or more "
        "epochs still help."
    )
    head = ("training", "How the head came to be", about)
    if past is None:
        return Section(*head, missing="The training of this head is not in the run.")
    points = past.points
    labels = [significant(p.tokens / 1e6, "M") for p in points]
    taus = tuple(p.tau for p in points)
    k = "" if past.num_speculative_tokens is None else f", K = {past.num_speculative_tokens}"
    lines, ends = [Series("tau", 0, taus)], (1.0, max(2.0, *taus))
    panel = line_panel(f"held-out tau{k}", labels, lines, x_title="tokens read", show=number, y_range=ends)
    rows = tuple(Row((f"{p.step}", f"{p.tokens:,}", number(p.tau)), p == past.best) for p in points)
    tables = [Table("Held-out evaluations", ("step", "tokens", "τ"), rows, folded=True)]
    if past.coverage is not None and past.coverage.heldout_by_slice:
        covered = tuple(Row((name, percent(share))) for name, share in past.coverage.heldout_by_slice.items())
        caption = "Tokens of held-out answers that the draft vocabulary has"
        tables.append(Table(caption, ("slice", "covered"), covered, folded=True))
    warned = {f"warning: {text}" for result in view.results for text in result.warnings}  # which the page says above
    figure = Figure("Held-out tau over the training; the best head is kept.", (panel,))
    notes = tuple(line[0].upper() + line[1:].rstrip(".") + "." for line in tell(past) if line not in warned)
    return Section(*head, (figure,), tuple(tables), notes)


def latency(view: View) -> Section:
    """Seconds per request and per token, with and without speculation."""
    rows = view.rows(lambda m: _percentile_cells(m.latency_baseline_s, m.latency_s))
    per_token = view.rows(lambda m: _percentile_cells(m.token_wait_baseline_s, m.token_wait_s))
    columns = ("slice", "system", "target alone p50", "target alone p95", "with drafts p50", "with drafts p95")
    pairs = (("Latency per request", rows), ("Wait per token", per_token))
    return Section(
        "latency",
        "Latency",
        "Per request: from its start to its last token, where requests are decoded one at a time. Per token: the wait for each token "
        "after the first, as somebody sees it who reads along. A round's tokens come together, so with drafts many take no time "
        "(p50 is 0 where more than half do), and p95 is about a whole round: longer than a pass of the target alone. The median and "
        "the 95th percentile over requests or tokens.",
        tables=tuple(Table(caption, columns, body, heads=2) for caption, body in pairs if body),
        missing="Latency was not measured.",
        folded=True,
    )


def _percentile_cells(*both: Percentiles | None) -> list[str] | None:
    cells = [milliseconds(seconds) for one in both for seconds in ((one.p50, one.p95) if one else (None, None))]
    return cells if some(both) else None


def memory(view: View) -> Section:
    """How each system drafts, and the memory that it takes, by formula and measured."""
    rows = []
    for s in view.systems:
        m, draft = s.drafter.overall, s.drafter.draft
        if draft is not None or m.peak_memory_bytes is not None:
            shape = ("chain" if draft.tree is None else draft.tree, whole(draft.nodes)) if draft else (DASH, DASH)
            held = (draft.parameters, draft.weight_bytes) if draft else (None, None)
            taken = _memory(view.results[s.result_index], s)
            formula = (taken.drafted, taken.alone) if taken else (None, None)
            pairs = zip(formula, (m.peak_memory_bytes, m.peak_memory_baseline_bytes), strict=True)
            sizes = (cell for one, peak in pairs for cell in (_mebibytes(one, 1), _mebibytes(peak)))
            rows.append(Row((s.label, *shape, whole(held[0]), _mebibytes(held[1], 1), *sizes)))
    sizes_of = (f"{who}, {how} MiB" for who in ("with drafts", "target alone") for how in ("formula", "peak"))
    columns = ("system", "draft", "tokens per round", "parameters", "weights MiB", *sizes_of)
    tables = [Table("Drafts and memory", columns, tuple(rows))] if rows else []
    if by_place := _memory_rows(view):
        parts = ("target's weights", "its cache", "drafts in its cache", "drafter's weights", "drafter's cache")
        names = ("system", "batch", "context", *parts, "target alone", "with drafts", "more")
        tables.append(Table("Memory in MiB by batch and context, by formula", names, by_place, heads=3))
    return Section(
        "memory",
        "Drafts and memory",
        "How each system drafts, how many tokens it proposes per round at most, its parameters (the trained ones of a head) and the size "
        "of their weights, as rounded where they are. By formula: the weights, and the keys and values of the decoded batch, each text as "
        "long as the longest prompt and answer. Peak: the largest GPU memory in use while decoding (not measured without a GPU), with "
        "what passes work with, and with the weights of everything in the comparison. Context: tokens of a text and its answer.",
        tables=tuple(tables),
        missing="How the drafters draft was not recorded.",
        folded=True,
    )


def _memory(result: Result, system: System, batch: int | None = None, context: int | None = None) -> Memory | None:
    """Return the memory by formula at a batch and context, or at those that were decoded."""
    batch, context = batch or result.settings.batch, context or result.settings.longest_text
    return None if context is None else memory_at(result.target, system.drafter.draft, batch, context)


def _memory_rows(view: View) -> tuple[Row, ...]:
    """List the memory at the batches and contexts of the plan, and at the decoded ones, which are set off. Systems that differ in
    nothing but how tokens are sampled are one."""
    table = None if view.decision is None else view.decision.plan.table
    planned = {(batch, context) for batch in table.batches for context in table.contexts} if table else set()
    alike: dict[Any, System] = {}
    for s in view.systems:
        result = view.results[s.result_index]
        own = (result.settings.batch, result.settings.longest_text)
        alike.setdefault((s.name, s.drafter.draft, result.target, own), s)
    rows = []
    for (name, _, _, own), s in alike.items():
        label = name if [key[0] for key in alike].count(name) == 1 else s.label
        for place in sorted(planned | ({own} if own[1] else set())):
            if (taken := _memory(view.results[s.result_index], s, *place)) is not None:
                parts = (taken.target, taken.target_cache, taken.draft_entries, taken.drafter, taken.draft_cache)
                sizes = (_mebibytes(size, 1) for size in (*parts, taken.alone, taken.drafted))
                more = percent(taken.drafted / taken.alone - 1)
                rows.append(Row((label, *map(whole, place), *sizes, more), place == own))
    return tuple(rows)


def _mebibytes(size: int | None, digits: int = 0) -> str:
    return number(None if size is None else size / 2**20, digits)


def looping(view: View) -> Section:
    """The share of answers that loop, per slice and system."""
    rows = []
    for name in view.slices:
        looped = {s.index: m.looping for s, m in view.measured(name)}
        prompts = max((m.prompts for _, m in view.measured(name)), default=0)
        if some(list(looped.values())):
            shares = (percent(looped.get(s.index)) for s in view.systems)
            rows.append(Row((name, whole(prompts), *shares), name == OVERALL))
    table = Table("Looping answers", ("slice", "prompts", *(s.label for s in view.systems)), tuple(rows))
    return Section(
        "looping",
        "Looping answers",
        "Share of answers that repeat a 6-gram four times. A loop is easy to draft, so it raises τ and speedup.",
        tables=(table,) if rows else (),
        missing="Loops were not counted.",
        folded=True,
    )


def examples(view: View) -> Section:
    """Generations, token by token."""
    samples = [
        Sample(f"{e.slice}, {e.drafter}{view.where(i)}", e.prompt, _rounds(e))
        for i, result in enumerate(view.results)
        for e in result.examples
    ]
    return Section(
        "examples",
        "Worked examples",
        "Answers with their tokens marked: drafted tokens that were accepted, and the target's own, which are the first token "
        "of an answer, a correction where a draft was rejected, and a bonus where the whole draft was accepted. A round is what one "
        "target pass wrote.",
        samples=tuple(samples),
        missing="No examples were kept.",
    )


def _rounds(example: Example) -> tuple[tuple[Piece, ...], ...]:
    """Cut the tokens after each of the target's own: a run is what one target pass wrote."""
    rounds: list[tuple[Piece, ...]] = []
    run: list[Piece] = []
    for piece in example.pieces:
        run.append(piece)
        if piece.position is None:
            rounds.append(tuple(run))
            run = []
    return tuple(rounds) + ((tuple(run),) if run else ())


def method(view: View) -> Section:
    """Settings, machine, versions, command and recipe: what a repetition needs."""
    facts = [dict(_facts(result)) for result in view.results]
    names = dict.fromkeys(name for one in facts for name in one)
    rows = tuple(Row((name, *(one.get(name, DASH) for one in facts))) for name in names)
    code = []
    for i, result in enumerate(view.results):
        code.append((f"Command{view.where(i)}", result.command))
        if result.recipe is not None:
            text = json.dumps(result.recipe, indent=2, ensure_ascii=False, default=str)
            code.append((f"Recipe{view.where(i)}", text))
    columns = ("setting", *(view.labels if len(view.results) > 1 else ("value",)))
    return Section(
        "method",
        "How this was measured",
        "Systems are interleaved in one run after a warm-up; clocks include the first draft; the median over repeats counts."
        if view.systems
        else "The machine and its versions are those of the client that asked.",
        tables=(Table("Settings, target, machine and versions", columns, rows, words=True),),
        code=tuple(dict.fromkeys(code)),
        folded=True,
    )


def _facts(result: Result) -> list[tuple[str, str]]:
    s, t, h = result.settings, result.target, result.hardware
    facts: list[tuple[str, object]] = [
        ("temperature", f"{s.temperature:g}" + (" (greedy)" if s.temperature == 0 else "")),
        *((name, off(value)) for name, value in s.filters.items()),
        ("speculative tokens K", s.num_speculative_tokens),
        ("batch", s.batch),
        ("dtype", s.dtype),
        ("seed", s.seed),
        ("repeats", s.repeats),
        ("target", t.path),
        ("target parameters", None if t.parameters is None else f"{t.parameters:,}"),
        ("target layers x hidden", None if t.num_layers is None else f"{t.num_layers} x {t.hidden_size or '?'}"),
        ("target vocabulary", None if t.vocab_size is None else f"{t.vocab_size:,}"),
        ("target fingerprint", t.fingerprint),
        *([("target shared by", f"{shared} processes")] if (shared := sharers(result.recipe)) > 1 else []),
        ("machine", f"{h.cpu}, {h.cores} core{'s' * (h.cores != 1)}, {h.threads} torch thread{'s' * (h.threads != 1)}"),
        ("memory", None if h.memory_gib is None else f"{h.memory_gib:g} GiB"),
        ("accelerator", h.gpu or "none"),
        ("commit", result.commit or "not in a git checkout"),
        ("date", result.date),
        *result.versions.items(),
        *result.supplement.items(),
    ]
    return [(name, DASH if value is None else str(value)) for name, value in facts]
