"""The built-in decoder spoiled on purpose: faults that a certificate's tests must find, or they are too weak to certify anything.

Each fault stands in for one function of the decoder while `spoiled` lasts, and serves chains and trees, drawn or not. A token that was
chosen without a distribution counts as one of probability 1.

Shapes: B rows, N nodes, V target vocab, M tensors of a cache, h heads, S slots, d width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder import captured
from draftsmith.decoder import verify as rules
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import ACCEPT, EMIT, SAMPLE, Noise, Sampling, draw, probs
from draftsmith.decoder.verify import Verdict, penalize_nodes
from draftsmith.target.target import Target

_SURE = 1e4
"""Added to a logit, it leaves the other tokens no probability."""
_PENALTY = 1.3
"""The repetition penalty to leave out where sampling has nothing that could be."""

Verify = Callable[..., Verdict]


@dataclass(frozen=True)
class Control:
    """A fault. what: in words. owner, attribute: the function that it replaces. spoil: makes the replacement of the right one."""

    name: str
    what: str
    owner: Any
    attribute: str
    spoil: Callable[[Any], Any]


@contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    right = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, right)


@contextmanager
def spoiled(control: Control | None, target: Target) -> Iterator[None]:
    """Let the decoder have the fault meanwhile; None leaves it right. Verdicts that a GPU has captured are forgotten before and after."""
    if control is None:
        yield
        return
    target.kept_passes = None
    try:
        with _replaced(control.owner, control.attribute, control.spoil(getattr(control.owner, control.attribute))):
            yield
    finally:
        target.kept_passes = None


def setting_of(control: Control | None, sampling: Sampling) -> Sampling:
    """Return the sampling settings to run a control at: where it leaves something out, something must be there."""
    nothing = _without_processing(sampling) == sampling
    return replace(sampling, repetition_penalty=_PENALTY) if control is _PENALTY_OUT and nothing else sampling


def _without_processing(sampling: Sampling) -> Sampling:
    """Leave out the penalty, else the filters, else the temperature."""
    bare = Sampling(sampling.temperature)
    if sampling.repetition_penalty != 1:
        return replace(sampling, repetition_penalty=1.0)
    return bare if bare != sampling else Sampling(1.0)


def _from_whole_target(
    verdict: Verdict, draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, seen_BV: Tensor | None
) -> Verdict:
    """Return the verdict with its own token drawn from all of p, also where a token was rejected."""
    if seen_BV is not None:
        logits_BNV = penalize_nodes(draft, logits_BNV, seen_BV, sampling.repetition_penalty)
    end_B1 = verdict.path_BD.gather(1, verdict.accepted_B[:, None])
    p_BV = probs(logits_BNV[torch.arange(len(end_B1), device=end_B1.device), end_B1[:, 0]], sampling)
    return replace(verdict, next_B=draw(p_BV, noise.draw(SAMPLE, 1)[:, 0]))


def _wrong_residual(verify: Verify) -> Verify:
    def wrong(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, *rest: Any) -> Verdict:
        verdict = verify(draft, logits_BNV, sampling, noise, *rest)
        return _from_whole_target(verdict, draft, logits_BNV, sampling, noise, rest[-1])

    return wrong


def _own_probability(verify: Verify) -> Verify:
    def wrong(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, *rest: Any) -> Verdict:
        if draft.draft_probs_BMW is not None:
            with _replaced(rules, "accepts", lambda uniform, q, p: uniform < q):
                return verify(draft, logits_BNV, sampling, noise, *rest)
        row = torch.arange(len(logits_BNV), device=logits_BNV.device)[:, None]
        more = draft.valid_BN[:, 1:].to(logits_BNV.dtype) * _SURE
        places = (row, draft.parents_BN[:, 1:].clamp(min=0), draft.tokens_BN[:, 1:])
        sure_BNV = logits_BNV + torch.zeros_like(logits_BNV).index_put(places, more, accumulate=True)
        verdict = verify(draft, sure_BNV, sampling, noise, *rest)
        return _from_whole_target(verdict, draft, logits_BNV, sampling, noise, rest[-1])

    return wrong


@dataclass(frozen=True)
class _Twice(Noise):
    """The number that decides on a round's first drafted token also draws every token of the target's own."""

    def draw(self, stream: int, count: int) -> Tensor:
        if stream == EMIT:
            return super().draw(ACCEPT, 2)[:, 1:].expand(-1, count)
        return super().draw(stream, count)


def _given(change: Callable[[Sampling, Noise], tuple[Sampling, Noise]]) -> Callable[[Verify], Verify]:
    """Return what lets drafts be verified with other settings, or other random numbers."""
    return lambda verify: lambda draft, logits_BNV, *own: verify(draft, logits_BNV, *change(*own[:2]), *own[2:])


def _others_prefix(admit: Callable[[Loop, list[int]], None]) -> Callable[[Loop, list[int]], None]:
    def wrong(loop: Loop, rows: list[int]) -> None:
        admit(loop, rows)
        for buffer_MBhSd in loop.cache.buffers.values():
            buffer_MBhSd.copy_(buffer_MBhSd.roll(1, 1))

    return wrong


_VERIFY = (captured, "verify")
_PENALTY_OUT = Control(
    "penalty left out",
    "drafts are verified without the repetition penalty, or else without top-k, top-p and min-p, or else without the temperature",
    *_VERIFY,
    _given(lambda sampling, noise: (_without_processing(sampling), noise)),
)
_RESIDUAL = "after a rejection the token comes from p, not from (p - q)+"
_TWICE = _given(lambda sampling, noise: (sampling, _Twice(**vars(noise))))
_PREFIX = "the target reads the keys and values of another prompt"
CONTROLS = (
    Control("wrong residual", _RESIDUAL, *_VERIFY, _wrong_residual),
    Control("draft's own probability", "a token x stays with probability q(x)", *_VERIFY, _own_probability),
    _PENALTY_OUT,
    Control("numbers used twice", "one uniform decides on a token and draws the next", *_VERIFY, _TWICE),
    Control("another prompt's prefix", _PREFIX, Loop, "_admit", _others_prefix),
)
"""The others' prefix needs neighbouring rows with different prompts."""
