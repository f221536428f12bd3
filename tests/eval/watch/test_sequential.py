"""The sequential test: its errors on simulated traffic, evidence that is fair while nothing changes, and state that chunks do not change."""

from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest

from draftsmith.eval.watch import sequential
from draftsmith.eval.watch.sequential import HIGH, LOW, Observation, Watched, gain, learn, limit, score, share_of

PER_DAY = 4000


def traffic(
    seed: int, n: int, alpha: float = 0.5, together: int = 1, start: int = 0, interval: bool = False
) -> list[Observation]:
    """Return answers of geometric length whose acceptance differs from prompt to prompt; `together` in a row share theirs."""
    rng = np.random.default_rng(seed)
    rounds = 1 + rng.geometric(1 / 40, n)
    p = np.repeat(rng.uniform(alpha - 0.2, alpha + 0.2, -(-n // together)), together)[:n]
    tokens = rounds + rng.binomial(3 * rounds, p)
    rows = zip(rounds.tolist(), tokens.tolist(), strict=True)
    return [Observation(r, x, (start + i) / PER_DAY, 1.0, f"{start + i}", interval) for i, (r, x) in enumerate(rows, 1)]


def watched(seed: int, share: float = 0.5) -> Watched:
    """Return a slice whose baseline is learned."""
    one = Watched(share, 500, 500)
    assert one.take(traffic(seed, 500))
    return one


def alarms(alpha: float, runs: int) -> list[tuple[str | None, int]]:
    """Return the alarm of each run of a day, and the requests until it."""
    found = []
    for seed in range(runs):
        one = watched(seed)
        one.take(traffic(1000 + seed, PER_DAY, alpha, start=500))
        found.append((one.alarm, one.alarmed - 500))
    return found


def test_stationary_days_have_no_alarm_and_changes_of_tau_are_seen() -> None:
    assert [alarm for alarm, _ in alarms(0.5, 40)] == [None] * 40
    # tau is 1 + 3 alpha: 10% less, and 10% more, within the 2,000 requests that are promised.
    for alpha, side in ((0.4167, LOW), (0.5833, HIGH)):
        assert all(alarm == side and within <= 2000 for alarm, within in alarms(alpha, 15))


def test_a_fall_right_behind_the_baseline_is_said_to_begin_there() -> None:
    one = watched(0)
    one.take([Observation(40.0, 40.0, (500 + i) / PER_DAY, 1.0, f"{i}") for i in range(1, 400)])
    assert (one.alarm, one.sides[LOW].since) == (LOW, 500)
    assert one.sides[LOW].rounds == 40 * (one.alarmed - 500)


def test_the_limit_is_what_keeps_false_alarms_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "DAILY", 5000.0)
    assert sum(alarm is not None for alarm, _ in alarms(0.5, 20)) > 10


@pytest.mark.parametrize("name", [LOW, HIGH])
def test_evidence_does_not_grow_at_the_edge_of_the_baselines_error_and_grows_behind_it(name: str) -> None:
    rows = traffic(0, 400_000)
    rounds, tokens = np.array([one.rounds for one in rows]), np.array([one.tokens for one in rows])
    base = learn(rounds[:2000], tokens[:2000], 0.5, 0.5)
    bets = base.low if name == LOW else base.high
    at_edge = tokens * (bets.tau * rounds.sum() / tokens.sum())
    for factor, least, most in ((1.0, 0.0, 1.001), (0.93 if name == LOW else 1.07, 1.005, np.inf)):
        scores = score(name, bets.tau, base.centre, base.bounds, rounds, at_edge * factor)
        # The bet alone: what clumping takes off comes on top.
        assert all(least < gain(size, scores, 1.0).mean() < most for size in bets.sizes)
        assert (1 + bets.sizes[0] * scores).min() > 0.05


def test_one_answer_at_a_time_and_all_at_once_leave_the_same_state() -> None:
    rows = [*traffic(3, 1700), *traffic(4, 700, 0.35, start=1700)]
    whole, single, halves = (Watched(0.5, 500, 1000) for _ in range(3))
    whole.take(rows)
    for row in rows:
        single.take([row])
    halves.take(rows[:777])
    halves = deepcopy(halves)
    halves.take(rows[777:])
    assert whole.alarm == LOW
    assert whole.sides[LOW].since == pytest.approx(1700, abs=60)
    assert {int(seen.name) > 1600 for seen in whole.sides[LOW].worst} == {True}
    for other in (single, halves):
        assert (other.alarm, other.alarmed, other.rounds) == (whole.alarm, whole.alarmed, whole.rounds)
        for name in (LOW, HIGH) if other is halves else (LOW,):
            assert other.sides[name].since == whole.sides[name].since
            assert other.sides[name].worst == whole.sides[name].worst
        assert asdict(other.sides[LOW])["evidence"] == pytest.approx(whole.sides[LOW].evidence)


def test_evidence_is_that_of_the_plain_recursion() -> None:
    one = watched(8)
    assert one.baseline is not None
    rows = traffic(9, 300, 0.42, start=500)
    one.take(rows)
    base, evidence, run = one.baseline, [0.0, 0.0], 0.0
    for row in rows:
        scores = score(LOW, base.low.tau, base.centre, base.bounds, np.array([row.rounds]), np.array([row.tokens]))
        gains = [float(gain(size, scores, base.clumping)[0]) for size in base.low.sizes]
        evidence = [(e + 1 / PER_DAY) * g for e, g in zip(evidence, gains, strict=True)]
        run = max(0.0, run + float(np.log(gains[0])))
        if row.name == str(one.alarmed):
            break
    assert one.sides[LOW].evidence == pytest.approx(evidence)
    assert one.sides[LOW].run == pytest.approx(run)


def test_answers_alike_in_a_row_make_the_baseline_careful() -> None:
    def base(together: int) -> sequential.Baseline:
        one = Watched(0.5, 4000, 4000)
        one.take(traffic(5, 4000, together=together))
        assert one.baseline is not None
        return one.baseline

    alone, alike = base(1), base(8)
    assert alone.clumping < 1.5 < 3 < alike.clumping < 9
    assert alike.tau - alike.low.tau > 1.5 * (alone.tau - alone.low.tau)
    assert alike.low.within > 2 * alone.low.within


def test_a_baseline_grows_until_it_can_see_a_fall() -> None:
    rng = np.random.default_rng(0)
    pairs = zip(rng.geometric(0.01, 20_000).tolist(), (200 + rng.geometric(0.01, 20_000)).tolist(), strict=True)
    rows = [Observation(r, x, i / PER_DAY) for i, (r, x) in enumerate(pairs, 1)]
    one, fixed = Watched(0.5, 250, 4000), Watched(0.5, 250, 250)
    one.take(rows)
    fixed.take(rows)
    assert one.baseline is not None and one.baseline.observations == 4000  # noqa: PT018 - of one object
    assert fixed.baseline is not None and fixed.baseline.observations == 250  # noqa: PT018


def test_intervals_of_any_size_weigh_by_their_rounds() -> None:
    """A server that is ten times as busy is no other one."""
    quiet = traffic(6, 1000, interval=True)
    one = Watched(0.5, 1000, 1000)
    one.take(quiet)
    busy = [Observation(10 * row.rounds, 10 * row.tokens, row.at + 0.25, None, "", True) for row in traffic(7, 1000)]
    one.take(busy)
    assert (one.alarm, one.requests) == (None, None)
    assert one.tokens == sum(row.tokens for row in (*quiet, *busy))


def test_shares_of_all_slices_together_are_less_than_one() -> None:
    shares = [share_of(number) for number in range(1000)]
    assert shares == sorted(shares, reverse=True)
    assert 0.99 < sum(shares) < 1
    assert limit(shares[0]) == 2 / (sequential.DAILY * 0.5)


def test_times_that_stand_still_are_refused() -> None:
    one = Watched(0.5, 100, 100)
    with pytest.raises(ValueError, match="no time passed"):
        one.take([Observation(5, 8, 1.0)] * 100)
