"""What holds for every test."""

import pytest

from draftsmith.progress import warn_anew


@pytest.fixture(autouse=True)
def _warnings_are_said_anew() -> None:
    """A process prints a warning once; a test is to see those of its own, whatever ran before it."""
    warn_anew()
