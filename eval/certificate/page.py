"""A certificate as it is kept: the values of certificate.json, and the page of a screen beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.certificate.certificate import Design, Outcome
from draftsmith.eval.engines.agreement import CLOSE
from draftsmith.eval.report.losslessness import count_equal, logit_step
from draftsmith.eval.results.result import Divergence, Lossless

CERTIFICATE_MARK = r'\A\{\n  "schema_version": .*"given": '
_SHOWN = 6
"""Reasons that the page lists."""


@dataclass(frozen=True)
class Greedy:
    """Greedy answers against the target's own. budget: the largest gap of the two tokens' logits at which they may part, as rounding may
    decide there. widest: the largest that was found, 0 where all are equal."""

    system: str
    checked: int
    equal: int
    budget: float
    widest: float
    divergences: tuple[Divergence, ...]
    reasons: tuple[str, ...]


def judge_greedy(system: str, found: Lossless) -> Greedy:
    """Say whether greedy answers part from the target's own at near ties alone."""
    budget = max(CLOSE, 2 * logit_step(found.dtype))
    gaps = [d.logit_gap for d in found.first_divergences]
    widest = max((abs(gap) for gap in gaps if gap is not None), default=0.0)
    unlike = sum(gap is None or abs(gap) > budget for gap in gaps)
    reasons = (
        [
            f"{unlike} of {found.checked} greedy answers part where the logits are up to {widest:.3g} apart, above {budget:.2g}"
        ]
        if unlike
        else ["no greedy answer was compared"] * (not found.checked)
    )
    return Greedy(system, found.checked, found.equal, budget, widest, found.first_divergences, tuple(reasons))


@dataclass(frozen=True)
class Certificate:
    """All of it. given: whether drafted texts are certified; reasons: why not. about: command, machine, target, head, settings."""

    schema_version: int
    given: bool
    reasons: tuple[str, ...]
    about: dict[str, Any]
    design: Design
    samples: int
    greedy: tuple[Greedy, ...]
    tested: tuple[Outcome, ...]


def make_certificate(
    about: dict[str, Any], design: Design, greedy: Sequence[Greedy], tested: Sequence[Outcome]
) -> Certificate:
    """Return the certificate, which is given where nothing speaks against it."""
    reasons = [f"{one.system}, temperature 0: {why}" for one in greedy for why in one.reasons]
    reasons += [
        f"{one.system}, temperature {one.sampling.temperature:g}: {why}" for one in tested for why in one.reasons
    ]
    return Certificate(1, not reasons, tuple(reasons), about, design, design.samples, tuple(greedy), tuple(tested))


def page(certificate: Certificate) -> str:
    """Return the page, Markdown."""
    design, about = certificate.design, certificate.about
    hardware = about["hardware"]
    verdict = "given" if certificate.given else "NOT given"
    lines = [
        f"# Losslessness certificate: {verdict}",
        "",
        f"{about['subject']}. {about['date']}, {hardware['gpu'] or hardware['cpu']}, draftsmith {about['versions']['draftsmith']}.",
        "",
        *(f"- {reason}" for reason in certificate.reasons[:_SHOWN]),
    ]
    if (more := len(certificate.reasons) - _SHOWN) > 0:
        lines.append(f"- and {more} more, in the .json file")
    lines += [""] * bool(certificate.reasons)
    for one in certificate.greedy:
        parted = f"; the others part at gaps of at most {one.widest:.2g} (allowed: {one.budget:.2g})"
        equal = count_equal(one.checked, one.equal, about["dtype"], "the target's own")
        lines += [f"{one.system}: {equal}, token for token{parted if one.equal < one.checked else ''}.", ""]
    lines += [
        f"Above temperature 0 the first {design.tokens} tokens of answers to {design.prompts} prompts are compared with the target's "
        f"own, {design.samples:,} samples of each side. Over all {design.tests} tests a right decoder fails with a probability of at "
        f"most {design.level:.2g}; so each is at a level of {design.level_of_each:.2g}. A mean total variation of {design.distance:g} over "
        f"the bins is found by each with a power of {design.power:g} or more.",
        "",
        "| drafts | temperature | drafted tokens accepted | drafts rejected | smallest p | largest distance (99% interval) | by chance | least power |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in certificate.tested:
        p, far = min(row.checks, key=lambda one: one.p), max(row.checks, key=lambda one: one.distance - one.chance)
        power = min((one.power for one in row.checks if one.freedom), default=0.0)
        cells = [
            row.system,
            f"{row.sampling.temperature:g}",
            f"{row.accepted:,}",
            f"{row.rejected:,}",
            f"{p.p:.2g} ({p.what})",
        ]
        cells += [
            f"{far.distance:.3f} ({far.interval[0]:.3f} to {far.interval[1]:.3f})",
            f"{far.chance:.3f}",
            f"{power:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    names = list(dict.fromkeys(one.name for row in certificate.tested for one in row.controls))
    if not names:
        return "\n".join(
            [*lines, "", "A server cannot be spoiled on purpose, so no fault was shown to these tests.", ""]
        )
    lines += ["", "The same tests on this decoder with a fault:", "", f"| drafts | {' | '.join(names)} |"]
    lines += [f"|---|{'---|' * len(names)}"]
    for row in certificate.tested:
        found = (
            f"found by {one.samples:,} samples, p {one.p:.0e}" if one.found else f"MISSED, p {one.p:.2g}"
            for one in row.controls
        )
        lines.append(f"| {row.system}, {row.sampling.temperature:g} | {' | '.join(found)} |")
    return "\n".join([*lines, ""])
