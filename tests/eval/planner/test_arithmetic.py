"""The planner's arithmetic against published figures."""

import pytest

from draftsmith.eval.planner.arithmetic import RoundCost, tau_of_alphas, tau_of_rates


@pytest.mark.parametrize(
    ("rates", "tau"), [((0.7296, 0.5208, 0.3545), 2.60), ((0.6541, 0.3993, 0.2020), 2.26)], ids=["first", "second"]
)
def test_rates_of_each_position_give_the_published_tau(rates: tuple[float, ...], tau: float) -> None:
    """vLLM's counters of two heads that draft three tokens."""
    assert tau_of_rates(rates) == pytest.approx(tau, abs=0.005)


def test_conditional_rates_give_the_published_tau() -> None:
    assert tau_of_alphas((0.816, 0.777, 0.750)) == pytest.approx(2.925, abs=0.001)


@pytest.mark.parametrize(("verify", "speedup"), [(1.0, 2.08), (3.28, 0.83)])
def test_one_acceptance_pays_or_not_by_what_a_verify_pass_costs(verify: float, speedup: float) -> None:
    """alpha 0.769, K 4, a drafted token costs 0.130 of a target step."""
    cost = RoundCost(alone=1.0, verify=verify, draft=4 * 0.130)
    assert cost.speedup(tau_of_alphas([0.769] * 4)) == pytest.approx(speedup, abs=0.005)


def test_a_constant_rate_is_the_geometric_sum() -> None:
    assert tau_of_alphas([0.8] * 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert tau_of_alphas([0.0] * 5) == 1
    assert tau_of_alphas([1.0] * 5) == 6
    assert tau_of_rates(()) == 1


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
