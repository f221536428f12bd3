"""What tests of drafters decode with, and how they hold what was decoded against what was simulated."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from draftsmith.decoder.answers import Generation, Request, Tally
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.target.target import Target


def decode_like_alone(
    target: Target, make: Callable[[], Drafter], requests: Sequence[Request], batch: int
) -> list[Generation]:
    """Decode greedily in groups whose rows end at different times, and check that every text is that of the target alone."""
    asked = [replace(r, max_new_tokens=2 + 4 * i) for i, r in enumerate(requests)]
    found: list[Generation] = []
    for start in range(0, len(asked), batch):
        group = asked[start : start + batch]
        alone = decode_batch(target, TargetAlone(), group, Sampling()).generations
        found += (drafted := decode_batch(target, make(), group, Sampling()).generations)
        assert [g.output_ids for g in drafted] == [g.output_ids for g in alone]
    return found


def assert_same(decoded: Tally, simulated: Tally, drafted: bool = True) -> None:
    """Hold what was decoded against what was simulated of it. drafted: whether the number of drafted tokens is compared, which a simulation does not always know."""
    assert (decoded.tokens, decoded.rounds) == (simulated.tokens, pytest.approx(simulated.rounds, abs=1e-9))
    assert decoded.accepted_K.tolist() == pytest.approx(simulated.accepted_K.tolist())
    assert decoded.reached_K.tolist() == pytest.approx(simulated.reached_K.tolist())
    if drafted:
        assert decoded.drafted == pytest.approx(simulated.drafted)
