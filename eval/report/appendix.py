"""Build the appendix of the report: latency, equality with the target, loops, examples, and how it was measured.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

import json

from draftsmith.eval.measure.result import Divergence, Example, Measures, Percentiles, Piece, Result
from draftsmith.eval.report.page_model import (
    DASH,
    OVERALL,
    Row,
    Sample,
    Section,
    Table,
    View,
    milliseconds,
    number,
    off,
    percent,
    some,
    whole,
)


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
        tables=tuple(Table(caption, columns, found, heads=2) for caption, found in pairs if found),
        missing="Latency was not measured.",
    )


def _percentile_cells(*both: Percentiles | None) -> list[str] | None:
    cells = [milliseconds(seconds) for one in both for seconds in ((one.p50, one.p95) if one else (None, None))]
    return cells if some(both) else None


def losslessness(view: View) -> Section:
    """Greedy equality with the target alone, and every first divergence."""
    counts: list[Row] = []
    divergences: dict[tuple[str, Divergence], None] = {}
    for name in view.slices:
        for s, m in view.measured(name):
            for one in (m.lossless, m.lossless_timed):
                if one is None:
                    continue
                cells = (name, s.label, one.dtype, whole(one.checked), whole(one.equal), whole(one.checked - one.equal))
                taus = (number(one.tau, 6), number(one.tau_simulated, 6))
                counts.append(Row((*cells, *taus), name == OVERALL))
                # The list of a slice is usually part of the overall list: show each divergence once.
                divergences |= {(s.label, d): None for d in one.first_divergences}
    tables = []
    if lossy := view.rows(lambda m: _perplexities(m) if m.agreement is None else None):
        heads = ("slice", "system", "perplexity of its texts", "of the target's own")
        tables.append(Table("Lossy drafters: their texts under the target", heads, lossy, heads=2))
    if tuned := view.rows(
        lambda m: _perplexities(m, percent(m.agreement, 2), number(m.kl, 4)) if m.agreement is not None else None
    ):
        also = ("slice", "system", "perplexity of its texts", "of the original's own", "same choice", "KL per token")
        tables.append(Table("Tuned targets against the original", also, tuned, heads=2))
    if right := view.rows(lambda m: _right(m) if m.referenced else None):
        which = ("slice", "system", "answers with a reference", "right", "right, target alone")
        tables.append(Table("Answers against references", which, right, heads=2))
    if counts:
        columns = ("slice", "system", "dtype", "prompts checked", "equal", "different", "greedy τ decoded", "simulated")
        tables.append(Table("Greedy texts against the target alone, token for token", columns, tuple(counts), heads=2))
    if divergences:
        rows = tuple(
            Row((label, d.slice, d.prompt, whole(d.position), str(d.expected), str(d.got), number(d.logit_gap, 4)))
            for label, d in divergences
        )
        names = ("system", "slice", "prompt", "position", "expected token", "got", "logit gap")
        tables.append(Table("Every first divergence", names, rows, folded=len(rows) > 20))
    return Section(
        "losslessness",
        "Losslessness",
        "With a lossless drafter greedy texts equal the target's own. In fp32 every token must be equal; in bf16 and fp16 rounding "
        "may decide a near tie, which shows as a tiny gap between the target's logits of the two candidates. A drafter marked "
        "lossy writes texts that differ from the target's: compare their perplexity with that of the target's own texts at the "
        "same setting; its speed is not a like-for-like comparison. A drafter with a tuned target (Medusa-2) is lossless with "
        "respect to the tuned target, which the counts below refer to, but not to the original. For it the report gives the "
        "perplexity under the original of its texts and of the original's own, and, on the original's texts, how often both "
        "targets' likeliest token is the same, and KL(original || tuned) per token in nats.",
        tables=tuple(tables),
        notes=() if divergences or not counts else ("No text diverged.",),
        missing="Equality with the target alone was not checked.",
    )


def _perplexities(m: Measures, *further: str) -> tuple[str, ...] | None:
    own = m.perplexity
    return None if own is None else (number(own), number(m.perplexity_baseline), *further)


def _right(m: Measures) -> tuple[str, ...]:
    return whole(m.referenced), percent(m.exact_match), percent(m.exact_match_baseline)


def memory(view: View) -> Section:
    """Peak GPU memory, and what each drafter adds to the target."""
    rows = []
    for s in view.systems:
        m, draft = s.drafter.overall, s.drafter.draft
        if draft is not None or m.peak_memory_bytes is not None:
            shape = ("chain" if draft.tree is None else draft.tree, whole(draft.nodes)) if draft else (DASH, DASH)
            peaks = (m.peak_memory_bytes, m.peak_memory_baseline_bytes)
            sizes = (number(None if size is None else size / 2**20, 0) for size in peaks)
            rows.append(Row((s.label, *shape, whole(draft.parameters if draft else None), *sizes)))
    columns = ("system", "draft", "tokens per round", "parameters", "peak MiB", "target alone MiB")
    return Section(
        "memory",
        "Drafts and memory",
        "How each system drafts, how many tokens it proposes per round at most, its parameters (the trained ones of a head), "
        "and the largest GPU memory in use while decoding, weights of the target and of everything in the comparison included "
        "(not measured without a GPU).",
        tables=(Table("Drafts and memory", columns, tuple(rows)),) if rows else (),
        missing="How the drafters draft was not recorded.",
    )


def looping(view: View) -> Section:
    """The share of answers that loop, per slice and system."""
    rows = []
    for name in view.slices:
        found = {s.index: m.looping for s, m in view.measured(name)}
        if some(list(found.values())):
            rows.append(Row((name, *(percent(found.get(s.index)) for s in view.systems)), name == OVERALL))
    return Section(
        "looping",
        "Looping answers",
        "Share of answers that repeat a 6-gram four times. A loop is easy to draft, so it raises τ and speedup.",
        tables=(Table("Looping answers", ("slice", *(s.label for s in view.systems)), tuple(rows)),) if rows else (),
        missing="Loops were not counted.",
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
        "of an answer, a correction where a draft was rejected, and a bonus where the whole draft was accepted.",
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
    columns = ("", *(view.labels if len(view.results) > 1 else ("value",)))
    return Section(
        "method",
        "How this was measured",
        "Systems are interleaved in one run after a warm-up; clocks include the first draft; the median over repeats counts.",
        tables=(Table("Settings, target, machine and versions", columns, rows, words=True),),
        code=tuple(dict.fromkeys(code)),
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
        ("machine", f"{h.cpu}, {h.cores} cores, {h.threads} torch threads"),
        ("memory", None if h.memory_gib is None else f"{h.memory_gib:g} GiB"),
        ("accelerator", h.gpu or "none"),
        ("commit", result.commit or "not in a git checkout"),
        ("date", result.date),
        *result.versions.items(),
        *result.supplement.items(),
    ]
    return [(name, DASH if value is None else str(value)) for name, value in facts]
