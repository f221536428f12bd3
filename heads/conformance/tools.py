"""What the checks of heads/conformance/suite.py share: their tolerances, and how figures, distributions and logits are compared.

Shapes: k drafted tokens, n draws, W draft vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.eval.decode.answers import Tally
from draftsmith.eval.decode.sampling import Sampling, probs
from draftsmith.heads.conformance.recorded_drafts import Drafted, Draw
from draftsmith.heads.conformance.spec import Spec, pack

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
CLOSE = 1e-4
"""Distributions may differ by this in total variation: float32 rounds differently in a pass over a text and in a cached one."""
FEW = 20
"""A comparison of fewer rounds or drafts than this would mean nothing."""
LEARN = ": raise Spec.learning_rate or Spec.steps if the head has learned too little"


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with the sentence, also where Python leaves assertions out."""
    if not holds:
        raise AssertionError(f"{otherwise[0].upper()}{otherwise[1:]}.")


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are None, or tensors of the same numbers."""
    return a is b if a is None or b is None else torch.equal(a.cpu(), b.cpu())


def figures(tally: Tally) -> Tensor:
    """Return what simulated and decoded rounds have to agree on."""
    return torch.tensor([tally.tokens, tally.rounds, tally.drafted, *tally.accepted_K, *tally.reached_K])


def drawn_from(draws: Sequence[Draw]) -> bool:
    """Whether tokens may have been drawn from the distributions they come with: of tokens drawn from q, log q has the mean -H(q),
    so that the sum of the differences is a few deviations at most."""
    excess = variance = 0.0
    for probs_W, column in draws:
        log_W = probs_W.double().clamp_min(1e-300).log()
        mean = float((probs_W * log_W).sum())
        excess += float(log_W[column]) - mean
        variance += float((probs_W * log_W**2).sum()) - mean**2
    return abs(excess) <= 4.5 * max(variance, 0.0) ** 0.5 + 1e-6


def require_training_probs(spec: Spec, rounds: Sequence[Drafted], sampling: Sampling) -> None:
    """Require that drafted tokens, or the distributions they were drawn from, are the training pass's for the same text."""
    for drafted, logits_kW in zip(rounds, _training_logits(spec, rounds), strict=True):
        for k, token in enumerate(drafted.tokens):
            if drafted.probs_kW is None:
                ids = spec.head.target_ids(torch.arange(logits_kW.shape[1]))
                gap = float(logits_kW[k].max() - logits_kW[k][ids == token].sum())
                require(gap < 1e-3, f"draft token {k + 1} is not the training pass's most likely one (by {gap:.3g})")
            else:
                apart = float((probs(logits_kW[k], sampling) - drafted.probs_kW[k]).abs().sum()) / 2
                told = f"draft token {k + 1} was drawn from another distribution than training's, {apart:.3g} off"
                require(apart < CLOSE, told)
        if drafted.probs_kW is not None:
            same = equal(drafted.vocab_W, spec.head.draft_vocab)
            require(same, "a draft's distributions are over other tokens than the head's draft vocabulary")


@torch.no_grad()
def _training_logits(spec: Spec, rounds: Sequence[Drafted]) -> list[Tensor]:
    """Return the training pass's logits [k, W] of each round's drafted tokens, the draft being the text."""
    batch = pack(spec, [[drafted.sample] for drafted in rounds])
    steps, length = spec.head.eval()(batch, spec.length).steps, batch.ids.shape[1]
    table = [dict(zip(step.rows.tolist(), step.logits.float().cpu(), strict=True)) for step in steps]
    roots = [row * length + len(drafted.text) - 2 for row, drafted in enumerate(rounds)]
    return [torch.stack([table[k][root] for k in range(len(d.tokens))]) for root, d in zip(roots, rounds, strict=True)]
