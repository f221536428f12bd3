"""How the processes of a training meet, wait for each other, agree, and end together.

They meet at a key-value store at MASTER_ADDR:MASTER_PORT, before anything else; collective operations of torch are for training
steps alone.
"""

import atexit
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO

from draftsmith.errors import StoppedError, UserError, first_line
from draftsmith.storage import explain_os_error
from draftsmith.train.process import ENDING, INTERRUPTED, LAUNCHED, LOST, World, code_of, leave_note, on_signals, world

MEET = timedelta(minutes=10)
"""How long processes wait until all have come."""
STEP = timedelta(minutes=30)
"""How long processes wait for each other in a step: the longest is a checkpoint, which one of them writes."""
DATA = timedelta(days=7)
"""How long processes wait for each other while they make answers and hidden states."""
_SAY_SECONDS, _GRACE, _SILENT_SECONDS = 15.0, 5.0, 100.0
"""Seconds between two lines of a process that waits, until a failure has reached all, and without a sign of life."""
_PEERS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL", "Timed out waiting")
"""How torch says in a RuntimeError that another process is gone."""


class Meeting:
    """The processes of a training, after all of them have come. folder: where checkpoints are, once it is known."""

    def __init__(self, here: World, output: TextIO) -> None:
        self.here, self.output = here, output
        self.rank, self.size, self.writes = here.rank, here.size, True  # as a Team
        self.folder: Path | None = None
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._exchanges = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._ended = Event()
        self._store = self._open()
        size = self.here.size
        if self._store.add(f"draftsmith/rank/{self.here.rank}", 1) > 1:
            raise UserError(f"Two processes have RANK {self.here.rank} at {self.address}: give each its own.")
        self._store.add("draftsmith/come", 1)

        def come() -> int:
            return int(self._store.add("draftsmith/come", 0))

        def say() -> None:
            self._say(f"waiting for {size - come()} of {size} processes at {self.address}")

        if not wait_until(lambda: come() >= size, MEET, say):
            raise UserError(
                f"Only {come()} of {size} processes came to {self.address} within {_minutes(MEET)}: start the others with "
                "the same MASTER_ADDR and MASTER_PORT, or set WORLD_SIZE to as many as there are."
            )
        Thread(target=self._beat, daemon=True).start()
        atexit.register(self._ended.set)

    def _open(self) -> Any:
        """Return the store, as soon as the launcher or rank 0 serves it."""
        from torch.distributed import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._serves = self.here.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not self._serves and not wait_for_port(
            host, port, MEET, lambda: self._say(f"waiting for rank 0 at {self.address}")
        ):
            raise UserError(
                f"Nobody is at {self.address}, where {self.here} waited for rank 0 for {_minutes(MEET)}: start rank 0 there, and "
                "check that MASTER_ADDR and MASTER_PORT are the same everywhere and that no firewall is between."
            )
        opened: list[Any] = []

        def connect() -> None:
            try:
                opened.append(TCPStore(host, port, None, self._serves, MEET, wait_for_workers=False, multi_tenant=True))
            except (RuntimeError, ValueError) as error:
                opened.append(error)

        # In a thread, as a store that never answers, such as another program at this port, holds its caller for ever.
        Thread(target=connect, daemon=True).start()
        waiting = f"waiting for an answer of rank 0 at {self.address}"
        answered = wait_until(lambda: bool(opened), MEET, lambda: self._say(waiting))
        if not answered or isinstance(opened[0], Exception):
            why = first_line(opened[0])[:200] if opened else f"what listens there has not answered for {_minutes(MEET)}"
            raise UserError(
                f"{self.here} cannot meet the others at {self.address} ({why}): set MASTER_ADDR to a name of the machine of "
                "rank 0, and MASTER_PORT to a port that is free there."
            ) from (opened[0] if opened else None)
        # A launcher that starts processes again keeps its store, with what the earlier ones said.
        return PrefixStore(f"draftsmith/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", opened[0])

    def _say(self, text: str) -> None:
        """Say for whom this machine waits; a process that no launcher started, as of SLURM, says it for itself."""
        if self.here.main or self.here.local_rank == 0 or "LOCAL_WORLD_SIZE" not in os.environ:
            print(f"{text} ({self.here})", file=self.output, flush=True)

    def _beat(self) -> None:
        """Count up for as long as this process is there, which the others see."""
        with suppress(RuntimeError):  # the store is gone with rank 0
            while self._store.add(f"draftsmith/alive/{self.here.rank}", 1) and not self._ended.wait(_SAY_SECONDS):
                pass

    def _silent(self) -> str:
        """Return in words which ranks have not counted up since this process first asked, minutes ago."""
        now = time.monotonic()
        for rank in range(self.here.size):
            count = int(self._store.add(f"draftsmith/alive/{rank}", 0))
            if self._heard.get(rank, (-1, now))[0] != count:
                self._heard[rank] = (count, now)
        silent = ", ".join(str(rank) for rank, (_, since) in self._heard.items() if now - since > _SILENT_SECONDS)
        return f"; nothing is heard of rank {silent}: see there whether it is gone" if silent else ""

    def _until(
        self, ready: Callable[[], bool], most: timedelta, say: Callable[[], None] | None = None, pause: float = 0.05
    ) -> bool:
        """Wait as `wait_until` does. Raises OthersFailedError where another process has failed."""

        def there() -> bool:
            if ready():
                return True
            self.end_with_others(0.0)
            return False

        return wait_until(there, most, say, lines=4, pause=pause)

    @contextmanager
    def first(self) -> Iterator[bool]:
        """Let rank 0 do the work within first; yield whether this is rank 0. The others wait for as long as servers may take to
        answer, which may be days."""
        self._exchanges += 1
        done = f"draftsmith/turn/{self._exchanges}"
        if self.here.main:
            yield True
            self._store.set(done, "done")
            return
        waiting = "waiting for rank 0, which reads and checks the data or has servers answer"
        if not self._until(lambda: bool(self._store.check([done])), DATA, lambda: self._say(waiting + self._silent())):
            raise UserError(f"Rank 0 has kept {self.here} waiting for 7 days: see there whether it is still at work.")
        yield False

    def tell(self, make: Callable[[], Any]) -> Any:
        """Return the JSON value that rank 0 makes, on every process; the others wait as in `first`."""
        with self.first() as first:
            name = f"draftsmith/told/{self._exchanges}"
            if first:
                self._store.set(name, json.dumps(make()))
        return json.loads(self._store.get(name))

    def tally(self, name: str, count: int) -> int:
        """Add to a count that all processes share, and return it."""
        return int(self._store.add(f"draftsmith/tally/{name}", count))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is ready that other processes make. Raises OthersFailedError where one of them has failed."""
        waiting = "waiting for the other processes, which make their share of answers and hidden states"
        if not self._until(ready, DATA, lambda: self._say(waiting + self._silent()), 0.2):
            raise UserError(f"The others have kept {self.here} waiting for 7 days: see whether they are still at work.")

    def compare(self, facts: dict[str, Any], remedy: str) -> None:
        """Raise UserError, on every process, where a fact is not the same on all of them."""
        self._exchanges += 1
        mine = json.dumps({"host": socket.gethostname()} | facts, default=str)
        self._store.set(f"draftsmith/facts/{self._exchanges}/{self.here.rank}", mine)
        first = self._read_facts(0)
        for rank in range(1, self.here.size):
            other = self._read_facts(rank)
            for name in facts:
                if other[name] != first[name]:
                    raise UserError(
                        f"{name} is {first[name]} for rank 0 on {first['host']}, but {other[name]} for rank {rank} on "
                        f"{other['host']}: {remedy}."
                    )

    def _read_facts(self, rank: int) -> dict[str, Any]:
        key = f"draftsmith/facts/{self._exchanges}/{rank}"
        if not self._until(lambda: bool(self._store.check([key])), STEP):
            raise UserError(
                f"Rank {rank} has kept {self.here} waiting for {_minutes(STEP)}: see there what holds it up."
            )
        facts: dict[str, Any] = json.loads(self._store.get(key))
        return facts

    def check_shared(self, key: str, folder: Path) -> None:
        """Raise UserError where `folder`, the value of the recipe's `key`, is not one and the same on all machines."""

        def leave_mark() -> str:
            # Swept with everything half-written, should this process be killed here.
            left = folder / f".shared.draftsmith-{secrets.token_hex(6)}.tmp"
            with explain_os_error(left):
                folder.mkdir(parents=True, exist_ok=True)
                left.touch(exist_ok=False)
            return left.name

        mark = folder / self.tell(leave_mark)

        def seen() -> bool:
            if folder.is_dir():
                os.listdir(folder)  # which has network file systems look again
            return mark.exists()

        shared = wait_until(seen, timedelta(seconds=_GRACE), pause=0.2)
        try:
            which = "the folder of rank 0" if shared else "another folder"
            self.compare({key: which}, f"{folder} must lie on a disk that all machines share")
        finally:
            if self.here.main:
                mark.unlink(missing_ok=True)

    def leave(self) -> None:
        """Be done, which rank 0 is not before the others where it serves the store: they may still ask it for what was told."""
        with suppress(RuntimeError):  # the store is gone with the launcher
            self._store.add("draftsmith/left", 1)
            if self._serves:
                self._until(lambda: int(self._store.add("draftsmith/left", 0)) >= self.here.size, STEP)

    def announce(self, code: int) -> bool:
        """Make a failure known to all, with its exit code; return whether nobody else has said why it ends. Rank 0 goes first."""
        with suppress(RuntimeError):  # the store is gone with the launcher
            if not self.here.main:
                self.end_with_others(1.0)
            if self._store.add("draftsmith/failures", 1) > 1:
                return False
            self._store.set("draftsmith/failed", str(code))
        return True

    def end_with_others(self, seconds: float) -> None:
        """Raise OthersFailedError where another process has failed, within `seconds`."""
        if wait_until(lambda: bool(self._store.check(["draftsmith/failed"])), timedelta(seconds=seconds)):
            raise OthersFailedError(int(self._store.get("draftsmith/failed")))

    def explain(self, error: BaseException) -> UserError | None:
        """Return the sentence for an exception that comes of another process that is gone; None for any other.

        Raises OthersFailedError where that process has said why.
        """
        from torch.distributed import DistError

        if not isinstance(error, RuntimeError) or not (
            isinstance(error, DistError) or any(words in str(error) for words in _PEERS)
        ):
            return None
        with suppress(RuntimeError):  # the store is gone with the launcher
            self.end_with_others(_GRACE)
        return UserError(
            f"Another process of this training is gone ({first_line(error)[:200]}; said by {self.here}): {self.how_to_resume()}."
        )

    def how_to_resume(self) -> str:
        """Return in words from where the same command goes on."""
        from draftsmith.train.checkpoints import latest_checkpoint

        checkpoint = None if self.folder is None else latest_checkpoint(self.folder, warn=False)
        start = "what is done; there is no checkpoint yet" if checkpoint is None else str(checkpoint)
        return f"run the same command again to go on from {start}"


def wait_until(
    ready: Callable[[], bool],
    most: timedelta,
    say: Callable[[], None] | None = None,
    *,
    lines: int = 1,
    pause: float = 0.05,
) -> bool:
    """Return True as soon as `ready` does, False after `most`. say: called again and again while it waits, every `lines` times
    15 seconds. pause: seconds between two questions."""
    begin, said = time.monotonic(), 0.0
    while not ready():
        waited = time.monotonic() - begin
        if waited >= most.total_seconds():
            return False
        if say is not None and waited - said > lines * _SAY_SECONDS:
            said = waited
            say()
        time.sleep(pause)
    return True


def wait_for_port(host: str, port: int, most: timedelta, say: Callable[[], None] | None = None) -> bool:
    """Return True as soon as somebody listens at a port, False after `most`; call `say` while it waits."""

    def listens() -> bool:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=5).close()
            return True
        return False

    return wait_until(listens, most, say, pause=0.5)


class OthersFailedError(Exception):
    """Another process has failed and said why. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__("another process failed")
        self.code = code


_meeting: Meeting | None = None


def meeting() -> Meeting | None:
    """Return where the processes of this training meet; None where it has one process."""
    return _meeting


@contextmanager
def together() -> Iterator[None]:
    """Be one of the processes of a training: only rank 0 prints, and a failure of any is said once, as the last words.

    Raises SystemExit in place of a failure that another process has said.
    """
    global _meeting
    here = world()
    if here.size == 1:
        yield
        return
    streams = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as silence:
        try:
            _meeting = _meeting or Meeting(here, sys.stderr)
            if not here.main:
                sys.stdout = sys.stderr = silence
            try:
                yield
                _meeting.leave()
            except Exception as error:  # told to all, and raised again
                # The launcher ends all when one has failed: that one needs a moment to say why.
                with on_signals(signal.SIG_IGN, ENDING):
                    ending = _ending(_meeting, error)
                if ending is error:
                    raise
                raise ending from error
            except KeyboardInterrupt as stop:
                raise _interrupted(_meeting, stop) from None
        finally:
            sys.stdout, sys.stderr = streams


def _ending(met: Meeting, error: Exception) -> BaseException:
    """Return what this process ends with: its own error where it is the one to say it."""
    try:
        if isinstance(error, OthersFailedError):
            return SystemExit(error.code)
        if isinstance(error, StoppedError):  # as all agreed
            return error if met.here.main else SystemExit(error.code)
        lost = met.explain(error)
        if lost is not None:
            leave_note(str(lost))
            # The launcher knows more, such as which process was killed.
            return SystemExit(LOST) if LAUNCHED in os.environ or not met.announce(1) else lost
        if not isinstance(error, UserError):
            error.add_note(f"draftsmith: {met.here} failed: {met.how_to_resume()}.")
        elif not met.here.main:
            error = UserError(f"{error} ({met.here})")
        said_here = met.announce(code_of(error))
    except OthersFailedError as ended:
        return SystemExit(ended.code)
    leave_note(str(error))
    return error if said_here else SystemExit(code_of(error))


def _interrupted(met: Meeting, stop: KeyboardInterrupt) -> BaseException:
    """Return what a process ends with that a signal has ended: the launcher's, perhaps, as another one has failed."""
    try:
        with suppress(RuntimeError):  # the store is gone with the launcher
            met.end_with_others(0.0)
    except OthersFailedError as ended:
        return SystemExit(ended.code)
    if LAUNCHED in os.environ:  # whose launcher says what it was: this signal, or another process that was killed
        leave_note(INTERRUPTED)
        return SystemExit(LOST)
    return stop if met.here.main else SystemExit(code_of(stop))


def _minutes(time_: timedelta) -> str:
    return f"{int(time_.total_seconds() // 60)} minutes"
