"""How tests of drafters hold what was decoded against what was simulated."""

import pytest

from draftsmith.decoder.answers import Tally


def assert_same(decoded: Tally, simulated: Tally, drafted: bool = True) -> None:
    """Hold what was decoded against what was simulated of it. drafted: whether the number of drafted tokens is compared, which a simulation does not always know."""
    assert (decoded.tokens, decoded.rounds) == (simulated.tokens, pytest.approx(simulated.rounds, abs=1e-9))
    assert decoded.accepted_K.tolist() == pytest.approx(simulated.accepted_K.tolist())
    assert decoded.reached_K.tolist() == pytest.approx(simulated.reached_K.tolist())
    if drafted:
        assert decoded.drafted == pytest.approx(simulated.drafted)
