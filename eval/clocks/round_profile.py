"""Profile a round: time target and draft forwards against everything around them, by wrapping a few functions.

The forwards are what no decoder can do without: the target's layers and its projection, and the draft's own layers and
projections. What is left, from masks and random numbers to verification and bookkeeping, is the decoder's own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.clock import Stopwatch
from draftsmith.decoder.decode import check_requests
from draftsmith.decoder.draft import Drafter
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.target.target import Target

FORWARDS = ("forward", "begin", "logits")
"""What computes in a drafter (`forward`: one pass of its layer) and in its head."""


@dataclass(frozen=True)
class RoundProfile:
    """Mean milliseconds per round. target, draft: their forwards. draft_other: the rest of drafting (choosing tokens,
    masks, positions); verify_other: masks for the target; commit: verification, cache and bookkeeping."""

    rounds: int
    target: float
    draft: float
    draft_other: float
    verify_other: float
    commit: float

    @property
    def total(self) -> float:
        """A whole round."""
        return self.target + self.draft + self.outside

    @property
    def outside(self) -> float:
        """What is neither a target nor a draft forward."""
        return self.draft_other + self.verify_other + self.commit


@torch.no_grad()
def profile_rounds(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, batch: int = 1
) -> RoundProfile:
    """Decode `requests`, `batch` at a time, with the forwards timed."""
    check_requests(target, requests, drafter)
    forwards = Stopwatch(target.device)
    head = getattr(drafter, "head", None)
    model = getattr(drafter, "model", None)
    watched = [(target, "forward", "target"), (target.head, "logits", "target")]
    for owner, names in ((drafter, FORWARDS[:1]), (head, FORWARDS[1:])):
        watched += [(owner, name, "draft") for name in names if hasattr(owner, name)]
    if isinstance(model, Target):
        watched += [(model, "forward", "draft"), (model.head, "logits", "draft")]
    loop = Loop(target, drafter, requests, sampling, None, min(batch, len(requests)))
    laps: Counter[str] = Counter()
    rounds = 0
    while loop.fill():
        # Only what happens within a round counts: prompts are read in between.
        laps.subtract(loop.watch.seconds)
        with _timed(watched, forwards):
            loop.round()
        laps.update(loop.watch.seconds)
        rounds += 1
    spent = forwards.seconds
    parts = {
        "target": spent["target"],
        "draft": spent["draft"],
        "draft_other": laps["draft"] - spent["draft"],
        "verify_other": laps["verify"] - spent["target"],
        "commit": laps["commit"],
    }
    return RoundProfile(rounds, **{name: 1000 * value / max(rounds, 1) for name, value in parts.items()})


@contextmanager
def _timed(watched: Sequence[tuple[Any, str, str]], watch: Stopwatch) -> Iterator[None]:
    """Time each watched method as laps of `watch`; nested calls count once."""
    depth = 0

    def wrap(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            if depth == 0:
                watch.lap("outside")
            depth += 1
            try:
                return call(*arguments, **options)
            finally:
                depth -= 1
                if depth == 0:
                    watch.lap(name)

        return timed

    for owner, method, name in watched:
        # On the instance, so that the class stays as it is.
        object.__setattr__(owner, method, wrap(getattr(owner, method), name))
    try:
        yield
    finally:
        for owner, method, _ in watched:
            object.__delattr__(owner, method)
