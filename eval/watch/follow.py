"""What a watch follows: the counters of a running server, or a file that grows, of answers as JSON or an engine's log.

A source is read again and again; its `position` says where it stands, and a watch that was ended goes on from it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, one_line
from draftsmith.eval.ledger.counts import Counts
from draftsmith.eval.ledger.sources import NO_COUNTS, UNKNOWN_LOG, Told, read_log, read_record, read_server
from draftsmith.eval.measure.measure import is_looping
from draftsmith.eval.watch.sequential import Observation
from draftsmith.foreign.server import SGLANG, VLLM, ModelServer
from draftsmith.foreign.text import MOST_LINE_BYTES, open_file, parse_json
from draftsmith.progress import say

ALL = "all"
"""The slice of what is not tagged."""
_DAY = 86400.0
_LATE = 3600.0
"""Seconds by which an answer may come behind one that was asked for later."""
_MOST_UNKNOWN = 1000
"""Lines of which at least one should tell of drafts."""
_CHUNK = 1 << 23
_TELLING = (b"SpecDecoding metrics", b"accept len: ", b"draft acceptance")
_TOGETHER = 20
"""Lines within which those stand that belong together."""
_REMEDY = "give a file of answers as the engine sends them, one JSON object a line, or its log"


@dataclass(frozen=True)
class Event:
    """An observation, of which slice; record: the answer's own JSON, None of counters and logs."""

    slice: str
    seen: Observation
    record: dict[str, Any] | None = None


@dataclass
class Position:
    """Where a source stands. of a file: inode, offset, lines and observations so far, and the newest time of an answer in seconds; answers:
    whether it holds these or a log, None before either was seen. of a server: its counters and the time at which they were read. engine:
    whose, "" before anything was read."""

    engine: str = ""
    answers: bool | None = None
    inode: int = 0
    offset: int = 0
    lines: int = 0
    observations: int = 0
    newest: float = 0.0
    rounds: float | None = None
    accepted: float = 0.0
    requests: float | None = None


@dataclass
class ServerSource:
    """The counters of vLLM or SGLang at an address. now: seconds of a clock."""

    server: ModelServer
    position: Position = field(default_factory=Position)
    now: Callable[[], float] = time.time

    @property
    def name(self) -> str:
        return self.server.url

    def read(self) -> list[Event]:
        """Return what the counters grew by; those that are smaller than before began anew, as after a restart."""
        told, at, last = read_server(self.server, idle=True, before=self.position.engine), self.now(), self.position
        if told.engine not in (VLLM, SGLANG) or told.counts.rounded:
            raise UserError(
                f"{self.name} shows ratios or rounded sums of {told.engine} at /metrics, which cannot be followed: keep its answers, or its log, "
                "and give the file with --records."
            )
        if at < last.newest - 1:
            raise UserError(
                f"The clock of this machine ran backwards, by {last.newest - at:.0f} seconds since {self.name} was last read: set it, or name "
                "another file with --state to begin anew."
            )
        at = max(at, last.newest)
        self.position = Position(
            told.engine, newest=at, rounds=told.counts.rounds, accepted=told.counts.accepted, requests=told.requests
        )
        if last.rounds is None:
            return []
        grown = _grown(told, last)
        if grown is None:
            say(f"{self.name} began to count anew, as after a restart: going on from there.")
            grown = _grown(told, Position(rounds=0.0, requests=0.0))
        assert grown is not None
        rounds, accepted, requests = grown
        seen = Observation(rounds, rounds + accepted, at / _DAY, requests, interval=True)
        return [Event(ALL, seen)] if rounds else []


def _grown(told: Told, last: Position) -> tuple[float, float, float | None] | None:
    """Return rounds, accepted tokens and requests since `last`; None where a counter is smaller."""
    rounds, accepted = told.counts.rounds - (last.rounds or 0.0), told.counts.accepted - last.accepted
    requests = None if told.requests is None or last.requests is None else told.requests - last.requests
    return None if min(rounds, accepted, requests or 0.0) < 0 else (rounds, accepted, requests)


@dataclass
class FileSource:
    """A file that grows. tag: the key of an answer that names its slice. per_day: observations a day, for files that tell no times.
    whole: whether the last line has come, though nothing ends it. ended: whether the last read came to the file's end."""

    path: Path
    tag: str = "slice"
    per_day: float | None = None
    position: Position = field(default_factory=Position)
    whole: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self) -> list[Event]:
        """Return what whole lines were added; from the beginning where the file is another one, or was cut, as by a rotation of logs."""
        last = self.position
        with open_file(self.path, _REMEDY) as file:
            size, inode = file.seek(0, 2), self.path.stat().st_ino
            if last.offset > size or last.inode not in (0, inode):
                say(
                    f"{self.name} began anew: going on from its start; what its earlier file got behind byte {last.offset:,} was not read."
                )
                last = replace(last, inode=0, offset=0, lines=0)
            file.seek(last.offset)
            data = file.read(_CHUNK)
            while b"\n" not in data and (more := file.read(_CHUNK)) and len(data) <= MOST_LINE_BYTES:
                data += more
        if len(data) > MOST_LINE_BYTES and b"\n" not in data:
            raise UserError(f"{self.name}, line {last.lines + 1}: the line is longer than any answer: {_REMEDY}.")
        self.ended = last.offset + len(data) >= size
        final = self.whole and self.ended
        end = data.rfind(b"\n") + 1
        # A last line that nothing ends may be half written; of a log such a one tells nothing yet.
        end = len(data) if final and (_is_record(data[end:]) or not data[end:].lstrip().startswith(b"{")) else end
        lines = data[:end].splitlines(keepends=True)
        self._at = replace(last, inode=inode, answers=_holds_answers(lines) if last.answers is None else last.answers)
        events = [*(self._answers(lines) if self._at.answers else self._log(lines))]
        taken = len(lines)
        if not self._at.answers and not final:
            # Two lines of llama.cpp's belong together: what stands behind the last line that tells something is read again.
            told = [place for place, line in enumerate(lines, 1) if any(words in line for words in _TELLING)]
            taken = max(told[-1] if told else 0, taken - _TOGETHER) or (0 if self.ended else taken)
        self._at.offset += sum(map(len, lines[:taken]))
        self._at.lines += taken
        if not self._at.engine and final:
            raise UserError(f"{self.name} {NO_COUNTS if self._at.answers else UNKNOWN_LOG}")
        if not self._at.engine and last.lines < _MOST_UNKNOWN <= self._at.lines:
            say(
                f"warning: none of the first {self._at.lines:,} lines of {self.name} tells of drafts: it is followed on, but look whether the "
                "server drafts, and whether --records names its log or its answers."
            )
        self.position = self._at
        return events

    def _log(self, lines: Sequence[bytes]) -> Iterator[Event]:
        if (told := read_log([line.decode("utf-8", "replace") for line in lines])) is not None:
            for counts in (one for one in told.parts if one.rounds):
                yield self._event(told.engine, counts, self._clock(None, 0), "", interval=not told.answers)

    def _answers(self, lines: Sequence[bytes]) -> Iterator[Event]:
        """Yield the answers of JSON lines. One that is none, as a crash leaves behind, is left out with a warning."""
        for number, line in enumerate(lines, self._at.lines + 1):
            where = f"{self.name}, line {number}"
            try:
                record = parse_json(line, where, _REMEDY) if line.strip() else {}
                found = list(read_record(record, where))
            except UserError as error:
                say(f"warning: a line of --records is left out: {error}")
                continue
            for engine, counts in found:
                made = record.get("created")
                at = self._clock(made if isinstance(made, int | float) else None, number)
                own = record.get("id")
                name = one_line(own, 80) if isinstance(own, str) else f"line {number}"
                yield self._event(engine, counts, at, name, record=record, slice=self._slice(record))

    def _event(
        self,
        engine: str,
        counts: Counts,
        at: float,
        name: str,
        *,
        interval: bool = False,
        slice: str = ALL,
        record: dict[str, Any] | None = None,
    ) -> Event:
        if self._at.engine not in ("", engine):
            raise UserError(
                f"{self.name} mixes what {self._at.engine} and {engine} tell: follow each engine by a file and a --state of its own."
            )
        self._at.engine = engine
        tokens = counts.rounds + counts.accepted
        loops = record is not None and is_looping(answer_of(record).split())
        seen = Observation(counts.rounds, tokens, at, None if interval else 1.0, name, interval, loops)
        return Event(slice, seen, record)

    def _clock(self, made: float | None, number: int) -> float:
        """Return the days at which an answer of so many seconds is taken to come; by the number of answers a day where that is given."""
        self._at.observations += 1
        if self.per_day is not None:
            return self._at.observations / self.per_day
        if made is None:
            raise UserError(
                f"{self.name} tells no times ('created', seconds), so how often an error may come is not known: say with --per-day how many "
                "answers, or lines of a log that tell acceptance, a day brings."
            )
        if made < self._at.newest - _LATE:  # taken as of the newest, since no more error may come in no time
            say(
                f"warning: {self.name}, line {number}, was made {(self._at.newest - made) / 3600:.1f} hours before one above it, and is taken "
                "to come with that one: order the lines by 'created', or leave times aside with --per-day."
            )
        self._at.newest = max(self._at.newest, made)
        return self._at.newest / _DAY

    def _slice(self, record: dict[str, Any]) -> str:
        """Return the tag of an answer: beside its other keys, or in OpenAI's metadata."""
        metadata = record.get("metadata")
        for place in (record, metadata if isinstance(metadata, dict) else {}):
            if isinstance(found := place.get(self.tag), str) and found:
                return one_line(found, 60)
        return ALL


def _holds_answers(lines: Sequence[bytes]) -> bool | None:
    """Return whether lines are answers, or a log, None where none of them says so. A log may show a template, which has braces too."""
    if any(words in line for line in lines if not line.startswith(b"{") for words in _TELLING):
        return False
    return True if any(_is_record(line) for line in lines if line.lstrip().startswith(b"{")) else None


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line, "", _REMEDY), dict)
    except UserError:
        return False


Source = ServerSource | FileSource
"""What is followed: `name` as the user gave it, `position` where the next `read` begins."""


def message_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's only answer as a message, whose content is None where it has none."""
    choices = record.get("choices")
    one = choices[0] if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict) else record
    message = one.get("message")
    return {"role": "assistant", **(message if isinstance(message, dict) else {"content": one.get("text")})}


def answer_of(record: Mapping[str, Any]) -> str:
    """Return the text of a record's only answer, "" where it has none."""
    text = message_of(record).get("content")
    return text if isinstance(text, str) else ""
