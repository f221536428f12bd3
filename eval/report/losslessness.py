"""Build the section on equality with the target alone, and the sentence about it that the report opens with.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

import math
from collections import defaultdict

from draftsmith.eval.report.cells import DASH, number, percent, significant, whole
from draftsmith.eval.report.page_model import OVERALL, Row, Section, Table, View
from draftsmith.eval.results.result import Divergence, Lossless, Measures

_FRACTION_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
_LOGIT = 16
"""A likely token's logit is of this order in the models that we know: what a dtype rounds it to is the scale for a gap."""


def evidence(view: View) -> str:
    """Say how many greedy answers equal the target's own, in the measured dtype where that was checked, and how wide the gaps are
    where one does not; empty where nothing was checked."""
    measured = view.results[0].settings.dtype
    kinds: dict[tuple[str, str], dict[tuple[str | None, ...], Lossless]] = defaultdict(dict)
    for system in view.systems:
        result = view.results[system.result_index]
        # Greedy answers are checked once for all temperatures of an evaluation.
        own = (system.name, result.command, result.commit, result.target.fingerprint)
        m = system.drafter.overall
        checks = [one for one in (m.lossless_timed, m.lossless) if one is not None and one.checked]
        if checks and not any(own in checked_of for checked_of in kinds.values()):
            kinds[checks[0].dtype, whose_texts(m)][own] = checks[0]
    sentences = []
    for (dtype, whose), checked_of in kinds.items():
        checked, equal = (sum(getattr(one, key) for one in checked_of.values()) for key in ("checked", "equal"))
        where = f"{dtype}, as measured," if dtype == measured else f"{dtype} (not in {measured}, as measured),"
        text = f"{count_equal(checked, equal, where, whose)}, token for token"
        gaps = [d.logit_gap for one in checked_of.values() for d in one.first_divergences if d.logit_gap is not None]
        if gaps:
            gap = max(map(abs, gaps))
            text += (
                f"; where they part, the target's logits of the two tokens differ by at most {gap:.3g}, so that its own "
                f"token was {_odds(gap)} times as likely"
            )
        step = logit_step(dtype) if gaps else 0.0
        sentences.append(f"{text}." + (f" {dtype} rounds a logit of {_LOGIT} to steps of {step:.3g}." if step else ""))
    return " ".join(sentences)


def count_equal(checked: int, equal: int, where: str, whose: str) -> str:
    """Say how many of the checked texts are the same."""
    many = f"All {checked:,}" if equal == checked else f"{equal:,} of {checked:,}"
    return f"{many} greedy answers checked in {where} equal {whose}"


def whose_texts(m: Measures) -> str:
    """Say which texts a drafter's must equal."""
    return "the target's own" if m.agreement is None else "those of the tuned target alone"


def logit_step(dtype: str) -> float:
    """Return the step to which a dtype rounds a likely token's logit; 0 where we do not know it."""
    return _LOGIT / 2 ** _FRACTION_BITS[dtype] if dtype in _FRACTION_BITS else 0.0


def _odds(gap: float | None) -> str:
    """Return how many times as likely the expected token was: e to the gap of the logits."""
    return "more than 10⁸" if gap is not None and gap > 20 else significant(None if gap is None else math.exp(gap))


def section(view: View) -> Section:
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
    lossy = view.rows(lambda m: _perplexities(m) if m.agreement is None else None)
    tuned = view.rows(
        lambda m: _perplexities(m, percent(m.agreement, 2), number(m.kl, 4)) if m.agreement is not None else None
    )
    right = view.rows(lambda m: _shares(m.referenced, m.exact_match, m.exact_match_baseline))
    valid = view.rows(lambda m: _shares(m.json_answers, m.valid_json, m.valid_json_baseline))
    perplexity, of_tuned = "perplexity of its texts", ("of the original's own", "same choice", "KL per token")
    which: list[tuple[str, tuple[str, ...], tuple[Row, ...]]] = [
        ("Lossy drafters: their texts under the target", (perplexity, "of the target's own"), lossy),
        ("Tuned targets against the original", (perplexity, *of_tuned), tuned),
        ("Answers against references", ("answers with a reference", "right", "right, target alone"), right),
        ("Answers that are valid JSON", ("answers of json slices", "valid JSON", "valid JSON, target alone"), valid),
    ]
    tables = [Table(caption, ("slice", "system", *names), rows, heads=2) for caption, names, rows in which if rows]
    if counts:
        columns = ("slice", "system", "dtype", "prompts checked", "equal", "different", "greedy τ decoded", "simulated")
        caption = "Greedy texts against the target alone, token for token"
        tables.append(Table(caption, columns, tuple(counts), heads=2, folded=True))
    if divergences:
        rows = []
        for label, d in divergences:
            tokens = (whole(d.position), str(d.expected), str(d.got))
            gap = DASH if d.logit_gap is None else f"{d.logit_gap:.3g}"
            rows.append(Row((label, d.slice, d.prompt, *tokens, gap, _odds(d.logit_gap))))
        names = ("system", "slice", "prompt", "position", "expected token", "got", "logit gap", "times as likely")
        tables.append(Table("Every first divergence", names, tuple(rows), heads=3, folded=len(rows) > 20))
    return Section(
        "losslessness",
        "Losslessness",
        _about(lossy=bool(lossy), tuned=bool(tuned)),
        tables=tuple(tables),
        notes=(said,) if (said := evidence(view)) else (),
        missing="Equality with the target alone was not checked.",
    )


def _about(*, lossy: bool, tuned: bool) -> str:
    """Say how to read the section: what is there only for lossy drafters or tuned targets is said only where there are some."""
    about = [
        "With a lossless drafter greedy texts equal the target's own. In fp32 every token must be equal; in bf16 and fp16 rounding "
        "may decide a near tie, which shows as a tiny gap between the target's logits of the two candidates."
    ]
    if lossy:
        about.append(
            "A drafter marked lossy writes texts that differ from the target's: compare their perplexity with that of the target's own "
            "texts at the same setting; its speed is not a like-for-like comparison."
        )
    if tuned:
        about.append(
            "A drafter with a tuned target (Medusa-2) is lossless with respect to the tuned target, which the counts refer to, but not to "
            "the original: for it stand the perplexity under the original of its texts and of the original's own, and, on the original's "
            "texts, how often both targets' likeliest token is the same, and KL(original || tuned) per token in nats."
        )
    return " ".join(about)


def _perplexities(m: Measures, *further: str) -> tuple[str, ...] | None:
    own = m.perplexity
    return None if own is None else (number(own), number(m.perplexity_baseline), *further)


def _shares(count: int | None, *shares: float | None) -> tuple[str, ...] | None:
    return (whole(count), *map(percent, shares)) if count else None
