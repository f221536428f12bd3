"""What runs before what on a pretended GPU: streams, events, and who may touch which memory when.

Work on one stream runs in the order of its launches. Two streams, or the host and a stream, are in order only where an
event, a wait or a synchronisation puts them so. Every operation tells the memory that it reads or writes; one that
touches what another may still be at is an error here, where a real GPU would give wrong numbers now and then.
"""

import itertools
from typing import Any

from tests.pretended_gpu.counts import Place, here


class RaceError(RuntimeError):
    """Two operations touch the same memory in no certain order."""


class Actor:
    """The host or a stream. done: how many operations it was given. over: its device is switched off. seen: others' work that is over before its next one."""

    def __init__(self, name: str, host: "Actor | None" = None) -> None:
        self.name, self.host, self.done, self.over = name, host, 0, False
        self.seen: dict[Actor, int] = {}

    def knows(self, other: "Actor") -> int:
        """Return how many operations of `other` are certainly over when the next one here begins."""
        # What the host has waited for is over before it launches anything more.
        return max(self.seen.get(other, 0), self.host.seen.get(other, 0) if self.host else 0)

    def learn(self, seen: dict["Actor", int]) -> None:
        """Let all of `seen` be over before the next operation here."""
        for actor, done in seen.items():
            self.seen[actor] = max(self.seen.get(actor, 0), done)

    def now(self) -> dict["Actor", int]:
        """Return what is over once everything given to this stream is."""
        return {**self.seen, self: self.done}


class Stream(Actor):
    """torch.cuda.Stream. gpu: the PretendedGpu. index: of the device."""

    def __init__(self, name: str, gpu: Any, index: int) -> None:
        super().__init__(name, gpu.host)
        self.gpu, self.index = gpu, index

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Note what this stream was given so far."""
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Let what follows here wait for an event."""
        self.learn(event.seen)

    def wait_stream(self, other: "Stream") -> None:
        """Let what follows here wait for what another stream was given so far."""
        self.learn(other.now())

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.gpu.wait("synchronize", self.now())


class Event:
    """torch.cuda.Event: a place in the work of a stream."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.seen: dict[Actor, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Note what a stream, the current one unless it is given, was given so far."""
        self.seen = (stream or self.gpu.stream_of(self.gpu.index)).now()

    def wait(self, stream: Stream | None = None) -> None:
        """Let what follows on a stream wait for this."""
        (stream or self.gpu.stream_of(self.gpu.index)).learn(self.seen)

    def synchronize(self) -> None:
        """Let the host wait for this."""
        self.gpu.wait("synchronize", self.seen)

    def query(self) -> bool:
        """Whether all before this is over, which it is whenever it is asked."""
        self.gpu.host.learn(self.seen)
        return True


class Memory:
    """Memory of a device, or pinned memory of the host. home: the stream that it was allocated on, None for the host's.

    faults: where it is noted that memory was freed too early. born: a number that grows with every allocation.
    """

    _count = itertools.count()

    def __init__(self, name: str, home: Actor | None, faults: list[str], size: int = 0) -> None:
        self.name, self.home, self.faults, self.size = name, home, faults, size
        self.born = next(Memory._count)
        self.written: tuple[Actor, int, Place] | None = None
        self.read: dict[Actor, tuple[int, Place]] = {}
        self.kept_for: set[Actor] = set()

    def touch(self, actor: Actor, place: Place, *, write: bool) -> None:
        """Let the latest operation of a stream, at `place`, read or write this."""
        self.check(actor, write=write)
        if write:
            self.written, self.read = (actor, actor.done, place), {}
        else:
            self.read[actor] = (actor.done, place)

    def check(self, actor: Actor, *, write: bool) -> None:
        """Raise RaceError where an operation of `actor` on this may meet another one."""
        earlier = [("written", self.written)] if self.written else []
        if write:
            earlier += [("read", (reader, *at)) for reader, at in self.read.items()]
        for was, (other, done, place) in earlier:
            if other is not actor and not other.over and actor.knows(other) < done:
                raise RaceError(
                    f"{actor.name} {'writes' if write else 'reads'} {self.name} at {here()}, which may still be {was} by "
                    f"{other.name} since {place}: no event or wait lies in between"
                )

    def __del__(self) -> None:
        # The allocator hands freed memory to the next operation of its home stream.
        used = [(actor, *at) for actor, at in self.read.items()] + ([self.written] if self.written else [])
        for actor, done, place in used:
            if (
                self.home
                and not self.home.over
                and actor is not self.home
                and actor not in self.kept_for
                and self.home.knows(actor) < done
            ):
                self.faults.append(
                    f"{self.name} of {self.home.name} was freed while {actor.name} may still use it, since {place}: "
                    "call record_stream, or wait for that stream first"
                )
