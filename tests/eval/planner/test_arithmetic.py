"""The planner's arithmetic against published figures."""

import pytest

from draftsmith.eval.planner.arithmetic import RoundCost


@pytest.mark.parametrize(("verify", "speedup"), [(1.0, 2.08), (3.28, 0.83)])
def test_one_acceptance_pays_or_not_by_what_a_verify_pass_costs(verify: float, speedup: float) -> None:
    """alpha 0.769, K 4, a drafted token costs 0.130 of a target step."""
    cost = RoundCost(alone=1.0, verify=verify, draft=4 * 0.130)
    assert cost.speedup(sum(0.769**i for i in range(5))) == pytest.approx(speedup, abs=0.005)


def test_at_the_limits_a_round_is_as_fast_as_was_asked() -> None:
    """Each limit, put in place of what it limits, gives the speedup that it was computed for."""
    cost = RoundCost(alone=3.0, verify=4.0, draft=1.5, overhead=0.25)
    assert cost.speedup(cost.tau_needed) == pytest.approx(1)
    for speedup in (1.0, 1.4):
        cheaper = RoundCost(3.0, 4.0, cost.draft_at_most(2.6, speedup), 0.25)
        assert cheaper.speedup(2.6) == pytest.approx(speedup)
        cheaper = RoundCost(3.0, cost.verify_at_most(2.6, speedup), 1.5, 0.25)
        assert cheaper.speedup(2.6) == pytest.approx(speedup)
    assert cost.draft_at_most(1.0) < 0
