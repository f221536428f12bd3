"""Chi-square, total variation and power, against simulation and exact values."""

import numpy as np
import pytest

from draftsmith.eval.certificate.distributions import (
    Counts,
    check,
    count_exact,
    count_two,
    group,
    power_of,
    samples_needed,
    tail,
)


def test_tails_are_those_of_chi_square() -> None:
    """Central ones from tables; noncentral ones from sums of squares of shifted normals."""
    for freedom, value, expected in ((1, 3.841459, 0.05), (10, 18.307038, 0.05), (30, 59.702, 0.001)):
        assert tail(value, freedom) == pytest.approx(expected, rel=1e-3)
    normal = np.random.default_rng(0).normal(size=(200_000, 8))
    normal[:, 0] += 3.0
    drawn = (normal**2).sum(1)
    for value in (10.0, 17.0, 30.0):
        assert tail(value, 8, 9.0) == pytest.approx((drawn > value).mean(), abs=4e-3)
    assert tail(2500.0, 60, 2400.0) == pytest.approx(0.34, abs=0.06), "many weights are summed"


@pytest.mark.parametrize("exact", [True, False])
def test_so_many_samples_find_so_small_a_distance(exact: bool) -> None:
    """The power that the formula promises, of the distribution of that distance that is hardest to find; and the false alarms."""
    prompts, bins, level, distance, random = 3, 8, 0.02, 0.08, np.random.default_rng(1)
    needed = samples_needed(prompts * (bins - 1), level, 0.9, distance, exact=exact) // prompts
    even = np.full(bins, 1 / bins)
    shifted = even * (1 + 2 * distance * np.where(np.arange(bins) % 2, 1, -1))
    assert abs(shifted - even).sum() / 2 == pytest.approx(distance)
    found, covered = {"even": 0, "shifted": 0}, 0
    runs = 800
    for _ in range(runs):
        for name, own in (("even", even), ("shifted", shifted)):
            pairs = [
                Counts(random.multinomial(needed, own), even if exact else random.multinomial(needed, even), exact)
                for _ in range(prompts)
            ]
            one = check("", pairs, level, distance)
            found[name] += one.p < level
            covered += name == "shifted" and one.interval[0] <= distance <= one.interval[1]
    assert one.power == pytest.approx(0.9, abs=0.01)
    assert found["shifted"] / runs == pytest.approx(0.9, abs=0.035)
    assert found["even"] / runs == pytest.approx(level, abs=0.015)
    assert covered > 0.98 * runs


@pytest.mark.parametrize("outcomes", [2, 30, 5000])
def test_bins_made_of_the_samples_favour_neither_side(outcomes: int) -> None:
    """Few heavy outcomes, some, and more than there are samples: as many p below a level as it says."""
    random, p = np.random.default_rng(2), 1 / np.arange(1, outcomes + 1)
    p /= p.sum()
    low = 0
    for _ in range(600):
        counts = [count_two(*random.choice(outcomes, (2, 300), p=p), bins=16) for _ in range(3)]
        assert all((one.ours_k + one.reference_k >= 10).all() for one in counts)
        low += check("", counts, 0.05, 0.1).p < 0.05
    assert low / 600 == pytest.approx(0.05, abs=0.025)


def test_bins_are_of_about_equal_mass_and_hold_all() -> None:
    mass = np.array([0.4, 0.001, 0.3, *[0.01] * 29, 0.009])
    label = group(mass, 8)
    sums = np.bincount(label, mass)
    assert label[0] != label[2]
    assert (sums[sums > 0] > 0.04).all()
    assert len(sums) == 8
    counted = count_exact(np.repeat(label, 100), np.bincount(label, mass / mass.sum(), minlength=8))
    assert counted.ours_k.sum() == 100 * len(mass)
    assert counted.reference_k.sum() == pytest.approx(1)


def test_a_certain_token_tells_nothing() -> None:
    one = check("", [count_two(np.zeros(50, int), np.zeros(50, int), 16)], 0.01, 0.1)
    assert (one.p, one.freedom, one.distance, one.power) == (1.0, 0, 0.0, 0.0)
    assert power_of(0.0, 5, 0.01) == pytest.approx(0.01)
