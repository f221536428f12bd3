"""What holds for every test."""

from typing import TYPE_CHECKING

import pytest

from draftsmith.progress import warn_anew

if TYPE_CHECKING:
    from draftsmith.target.target import Target


@pytest.fixture(autouse=True)
def _warnings_are_said_anew() -> None:
    """A process prints a warning once; a test is to see those of its own, whatever ran before it."""
    warn_anew()


@pytest.fixture(scope="session")
def target() -> "Target":
    """Any tiny target, which no test changes."""
    from tests.models import make_target  # here, as it is slow to import

    return make_target()
