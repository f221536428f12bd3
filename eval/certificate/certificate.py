"""Make a losslessness certificate: sample, test, and run the same tests on spoiled decoders, which must fail; then its values, as
certificate.json has them, and the page of a screen beside it.

Under test are the first T tokens of answers to the same prompts, against the target's own: each token after the first, as that one
involves no draft, and tokens together, as two may each be right and not belong together. Of the first two the built-in decoder knows
the target's exact probabilities.

Shapes: P prompts, n samples of each, T tokens of an answer, V target vocab, E first tokens whose next one is known, k bins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling, penalize, probs
from draftsmith.eval.certificate.controls import CONTROLS, Control, setting_of, spoiled
from draftsmith.eval.certificate.distributions import Check, check, count_exact, count_two, group, samples_needed
from draftsmith.eval.drafters.system import Way
from draftsmith.eval.engines.agreement import CLOSE
from draftsmith.eval.report.losslessness import count_equal, logit_step
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.foreign.records import Journal
from draftsmith.progress import Bar
from draftsmith.target.target import Target

BINS = 16
"""Bins of a prompt's distribution, at most."""
_EXPANDED = 32
"""First tokens whose next token's probabilities are computed: the likeliest. Of the others the first token alone counts."""
_TOGETHER = ((0, 1), (1, 2), (1, 2, 3))
"""The tokens that are tested together, counted from 0."""
_PARTS = 8
"""A control is tested after each eighth of the samples, and is found at the first that shows it."""

Draw = Callable[[Sampling, Control | None, int], Mapping[str, Any]]
"""From settings, a fault and the number of a batch to its samples: tokens [P][repeats][T], and of the drafts how many were accepted and
rejected."""


@dataclass(frozen=True)
class Design:
    """What is tested, and how much of it.

    level: the probability that the certificate fails a right decoder, over all its tests. power: of finding `distance`, a mean total
    variation over the prompts' bins. prompts, tokens: how many. tests: of the whole certificate. repeats: samples of each prompt in a
    batch.
    """

    level: float
    power: float
    distance: float
    prompts: int
    tokens: int
    tests: int
    repeats: int

    @property
    def level_of_each(self) -> float:
        """The level of one test (Bonferroni)."""
        return self.level / self.tests

    @cached_property
    def batches(self) -> int:
        """How many batches each side takes, a multiple of _PARTS."""
        needed = samples_needed(self.prompts * (BINS - 1), self.level_of_each, self.power, self.distance)
        return -(-needed // (self.prompts * self.repeats * _PARTS)) * _PARTS

    @property
    def samples(self) -> int:
        """How many samples each side takes, of all prompts together."""
        return self.batches * self.prompts * self.repeats


def checks_of(tokens: int) -> int:
    """Return how many tests one way of writing takes at one setting."""
    return tokens - 1 + len(_TOGETHER)


@dataclass(frozen=True)
class Found:
    """What became of a control. samples: after how many it was found, or all. check: the test with the smallest p, which is `p`."""

    name: str
    what: str
    found: bool
    samples: int
    check: str
    p: float


@dataclass(frozen=True)
class Outcome:
    """One way of writing at one setting. accepted: drafted tokens that stayed. rejected: drafts that ended in a rejection, of a server
    drafted tokens that did not stay. reasons: why it cannot be certified."""

    system: str
    sampling: Sampling
    accepted: int
    rejected: int
    checks: tuple[Check, ...]
    controls: tuple[Found, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """Exact probabilities of the first two tokens after a prompt. row: of a first token whose next one is known. label: the bin of every
    outcome, [V] first tokens, then [E * V] pairs. mass_k: the bins' probabilities."""

    row: Mapping[int, int]
    vocab: int
    label: np.ndarray
    mass_k: np.ndarray

    def bins_of(self, tokens_nT: np.ndarray) -> np.ndarray:
        """Return the bin [n] of each sample."""
        rows = [self.row.get(int(first)) for first in tokens_nT[:, 0]]
        pairs = zip(rows, tokens_nT[:, :2].tolist(), strict=True)
        return self.label[[a if row is None else self.vocab * (row + 1) + b for row, (a, b) in pairs]]


@torch.no_grad()
def exact_pairs(target: Target, request: Request, sampling: Sampling) -> Pairs:
    """Compute the probabilities of the first two tokens after a prompt, by plain passes of the target."""

    def next_probs(ids_EL: torch.Tensor) -> torch.Tensor:
        logits_EV = target.head.logits(target.forward(ids_EL).last[:, -1])
        seen_EV = torch.zeros_like(logits_EV, dtype=torch.bool).scatter(1, ids_EL, True)
        return probs(penalize(logits_EV, seen_EV, sampling.repetition_penalty), sampling).double()

    ids_1L = torch.tensor([request.prompt_ids], device=target.device)
    first_V = next_probs(ids_1L)[0]
    goes_on_V = first_V.index_fill(0, torch.tensor(target.eos_ids, device=target.device, dtype=torch.long), 0)
    top = goes_on_V.topk(min(_EXPANDED, len(first_V)))
    chosen_E = top.indices[top.values > 0]
    known_EV = first_V[chosen_E, None] * next_probs(torch.cat([ids_1L.expand(len(chosen_E), -1), chosen_E[:, None]], 1))
    mass = torch.cat([first_V.index_fill(0, chosen_E, 0), known_EV.flatten()]).cpu().numpy()
    label = group(mass, BINS)
    row = {token: place for place, token in enumerate(chosen_E.tolist())}
    return Pairs(row, len(first_V), label, np.bincount(label, mass / mass.sum(), minlength=BINS))


def draw_decoded(way: Way, prompts: Sequence[Request], tokens: int, repeats: int, seed: int, name: str) -> Draw:
    """Return how the built-in decoder samples the first tokens of answers, neighbouring rows with different prompts."""

    def draw(sampling: Sampling, control: Control | None, number: int) -> dict[str, Any]:
        requests = [
            Request.seeded(f"{name}/{number}/{repeat}/{p.sample_id}", p.slice, p.prompt_ids, tokens, seed)
            for repeat in range(repeats)
            for p in prompts
        ]
        with spoiled(control, way.target):
            answers = way.decode(requests, sampling, rows=len(requests)).generations
        ids = [[answers[i].output_ids for i in range(p, len(answers), len(prompts))] for p in range(len(prompts))]
        drafted = [(len(a.output_ids), r) for a in answers for r in a.rounds if r.drafted]
        # Where the answer has no token behind the accepted ones, it ended the draft, and not a rejection.
        rejected = sum(
            r.accepted < (len(r.levels) or r.drafted) and r.root + r.accepted + 1 < length for length, r in drafted
        )
        return {"tokens": ids, "accepted": sum(r.accepted for _, r in drafted), "rejected": rejected}

    return draw


@dataclass
class Judge:
    """Tests ways of writing against the target's own samples.

    reference: draws these. exact: gives the exact probabilities after each prompt, where they are known. journal: keeps the samples.
    """

    design: Design
    reference: Draw
    journal: Journal
    bar: Bar
    exact: Callable[[Sampling], Sequence[Pairs]] | None = None

    def test(self, system: str, draw: Draw, sampling: Sampling, controls: Sequence[Control] = CONTROLS) -> Outcome:
        """Test one way of writing at one setting, and every control on it."""
        batches, level = self.design.batches, self.design.level_of_each
        own = [self.batch("target alone", self.reference, sampling, None, number) for number in range(batches)]
        theirs = [self.batch(system, draw, sampling, None, number) for number in range(batches)]
        checks = self._checks(theirs, own, sampling)
        counts = {key: sum(batch[key] for batch in theirs) for key in ("accepted", "rejected")}
        reasons = [
            f"{one.what}: p = {one.p:.2g}, below {level:.2g}, at a distance of {one.distance:.3f} where chance gives {one.chance:.3f}"
            for one in checks
            if one.p < level
        ]
        if alone := sum(batch["accepted"] + batch["rejected"] for batch in own):
            reasons.append(
                f"the side that writes alone drafts too ({alone} drafted tokens), so it says nothing of the other"
            )
        reasons += [
            f"no draft was {what}, so nothing is known of what happens when one is"
            for what, n in counts.items()
            if not n
        ]
        found = tuple(self._find(control, system, draw, sampling) for control in controls)
        reasons += [f"the tests are too weak: {one.name} was not found" for one in found if not one.found]
        return Outcome(system, sampling, **counts, checks=checks, controls=found, reasons=tuple(reasons))

    def _find(self, control: Control, system: str, draw: Draw, sampling: Sampling) -> Found:
        """Test a decoder with a fault, on more and more samples until it is found."""
        sampling, spoilt, own = setting_of(control, sampling), list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        for number in range(self.design.batches):
            own.append(self.batch("target alone", self.reference, sampling, None, number))
            spoilt.append(self.batch(system, draw, sampling, control, number))
            if (number + 1) % (self.design.batches // _PARTS) == 0:
                checks = self._checks(spoilt, own, sampling)
                worst = min(checks, key=lambda one: one.p)
                if found := worst.p < self.design.level_of_each:
                    break
        return Found(control.name, control.what, found, worst.samples, worst.what, worst.p)

    def batch(
        self, system: str, draw: Draw, sampling: Sampling, control: Control | None, number: int
    ) -> Mapping[str, Any]:
        """Return a batch of samples, from the journal where that has it."""
        spoilt = "" if control is None else f", {control.name}"
        name = f"{system} at {sampling}{spoilt}/{number}"
        self.bar.set_description_str(f"{system}{spoilt}", refresh=False)
        if (kept := self.journal.get(name)) is None:
            kept = draw(sampling, control, number)
            self.journal.add(name, kept)
            drawn = sum(map(len, kept["tokens"]))
            if control is not None:  # how many a control takes is not known beforehand
                self.bar.total = (self.bar.total or 0) + drawn
            self.bar.update(drawn)
        return kept

    def _checks(
        self, ours: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> tuple[Check, ...]:
        """Run all tests on some batches of samples, and on some of the target's own."""
        level, distance, checks = self.design.level_of_each, self.design.distance, []
        ours_PnT, own_PmT = (_tokens(batches, self.design.tokens) for batches in (ours, own))
        places = [*((t,) for t in range(1, self.design.tokens)), *_TOGETHER]
        for together in places:
            what = f"tokens {together[0] + 1} to {together[-1] + 1}" if together[1:] else f"token {together[0] + 1}"
            if together == (0, 1) and self.exact is not None:
                pairs = zip(ours_PnT, self.exact(sampling), strict=True)
                counts = [count_exact(pair.bins_of(ours_nT), pair.mass_k) for ours_nT, pair in pairs]
                what += ", against exact probabilities"
            else:
                sides = zip(_names(ours_PnT, together), _names(own_PmT, together), strict=True)
                counts = [count_two(ours, own, BINS) for ours, own in sides]
            checks.append(check(what, counts, level, distance))
        return tuple(checks)


def _tokens(batches: Sequence[Mapping[str, Any]], most: int) -> np.ndarray:
    """Return the samples of some batches, [P, n, T], -1 behind an end."""
    rows = [
        [[*ids, *[-1] * (most - len(ids))] for batch in batches for ids in batch["tokens"][prompt]]
        for prompt in range(len(batches[0]["tokens"]))
    ]
    return np.array(rows)


def _names(tokens_PnT: np.ndarray, together: Sequence[int]) -> np.ndarray:
    """Return a whole number [P, n] for the tokens at some places, another for every other sequence."""
    names = np.zeros(tokens_PnT.shape[:2], np.int64)
    for place in together:
        names = names * (1 << 20) + tokens_PnT[..., place] + 1
    return names


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
    parts = {
        f"the logits are up to {widest:.3g} apart, above {budget:.2g}": sum(
            abs(g) > budget for g in gaps if g is not None
        ),
        "one has ended, or the other server does not tell how likely the token is": gaps.count(None),
    }
    reasons = tuple(f"{n} of {found.checked} greedy answers part where {where}" for where, n in parts.items() if n)
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
        known = any(d.logit_gap is not None for d in one.divergences)
        gaps = f"gaps of at most {one.widest:.2g}" if known else "unknown gaps"
        parted = f"; the others part at {gaps} (allowed: {one.budget:.2g})"
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
