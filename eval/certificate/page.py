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
    far = f"answers part where the logits are up to {widest:.3g} apart, above {budget:.2g}"
    reasons = (f"{unlike} of {found.checked} greedy {far}",) if unlike else ()
    reasons = reasons if found.checked else ("no greedy answer was compared",)
    return Greedy(system, found.checked, found.equal, budget, widest, found.first_divergences, reasons)


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
    every = [(one.system, 0.0, one.reasons) for one in greedy]
    every += [(one.system, one.sampling.temperature, one.reasons) for one in tested]
    reasons = [f"{system}, temperature {heat:g}: {why}" for system, heat, found in every for why in found]
    return Certificate(1, not reasons, tuple(reasons), about, design, design.samples, tuple(greedy), tuple(tested))


def page(certificate: Certificate) -> str:
    """Return the page, Markdown."""
    design, about = certificate.design, certificate.about
    hardware = about["hardware"]
    lines = [
        f"# Losslessness certificate: {'given' if certificate.given else 'NOT given'}",
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
        drafted = f"{row.system} | {row.sampling.temperature:g} | {row.accepted:,} | {row.rejected:,}"
        distance = f"{far.distance:.3f} ({far.interval[0]:.3f} to {far.interval[1]:.3f}) | {far.chance:.3f}"
        lines.append(f"| {drafted} | {p.p:.2g} ({p.what}) | {distance} | {power:.3f} |")
    names = list(dict.fromkeys(one.name for row in certificate.tested for one in row.controls))
    if not names:
        told = "A server cannot be spoiled on purpose, so no fault was shown to these tests."
        return "\n".join([*lines, "", told, ""])
    lines += ["", "The same tests on this decoder with a fault:", "", f"| drafts | {' | '.join(names)} |"]
    lines += [f"|---|{'---|' * len(names)}"]
    for row in certificate.tested:
        found = (
            f"found by {one.samples:,} samples, p {one.p:.0e}" if one.found else f"MISSED, p {one.p:.2g}"
            for one in row.controls
        )
        lines.append(f"| {row.system}, {row.sampling.temperature:g} | {' | '.join(found)} |")
    return "\n".join([*lines, ""])
