"""The processes that make answers and hidden states together, as those who make them see each other."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from draftsmith.progress import Bar


class Team(Protocol):
    """Processes that share work out by number. rank of size; rank 0 puts together what all have made."""

    rank: int
    """The number of this process."""
    size: int
    """How many processes there are."""
    writes: bool
    """Whether this process keeps what it makes; another one that makes the same keeps it else."""

    def tell(self, make: Callable[[], Any]) -> Any:
        """Return the JSON value that rank 0 makes, on every process; the others wait for it."""

    def tally(self, name: str, count: int) -> int:
        """Add to a count that all share, and return it."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is ready. Raises where another process has failed."""


class Alone:
    """A team of one process."""

    rank, size, writes = 0, 1, True

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def tell(self, make: Callable[[], Any]) -> Any:
        """Return the value."""
        return make()

    def tally(self, name: str, count: int) -> int:
        """Add to a count, and return it."""
        self._counts[name] += count
        return self._counts[name]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Everything is ready: this process has made it."""
        there = ready()  # which takes in what it finds
        assert there, "nobody else makes it"


class Groups:
    """A team whose members are groups of `size` processes, all of which make the same, as they share the layers of a target; the first
    of each keeps it."""

    def __init__(self, team: Team, size: int) -> None:
        self._team, self.tell, self.wait = team, team.tell, team.wait  # as of all processes
        self.rank, self.size, self.writes = team.rank // size, team.size // size, team.rank % size == 0

    def tally(self, name: str, count: int) -> int:
        """Add to a count what the first of a group has made."""
        return self._team.tally(name, count if self.writes else 0)


class SharedBar:
    """A bar that shows what all processes of a team have made. name: of their common count."""

    def __init__(self, team: Team, name: str, bar: Bar) -> None:
        self._team, self._name, self._bar, self._told = team, name, bar, 0

    def update(self, count: int) -> None:
        """Count what this process has made."""
        made = self._team.tally(self._name, count)
        self._bar.update(made - self._told)
        self._told = made

    def skip(self, count: int) -> None:
        """Count what an earlier run has made, which has no part in the rate of rank 0."""
        self._bar.skip(count)
        self._told += count
        self.update(count)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is ready, and show what the others make until then."""

        def there() -> bool:
            self.update(0)
            return ready()

        self._team.wait(there)
