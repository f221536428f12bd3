"""The worst requests of a watch, kept for retraining: only when asked, redacted, the worst few, for some days.

They are conversations in a file that training reads, `worst.jsonl`: a line each, with what was accepted.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.shapes import row_messages
from draftsmith.errors import UserError, first_line
from draftsmith.eval.watch.follow import Event, message_of
from draftsmith.foreign.text import read_json_lines
from draftsmith.progress import say
from draftsmith.storage import write_text

FILE = "worst.jsonl"
Redact = Callable[[str], str | None]
_SHAPES = (
    # The first, as what stands before its @ looks like an address of mail; it may hold one.
    ("PASSWORD", r"(?<=://)[^\s/]*:[^\s/]+(?=@)"),
    ("EMAIL", r"[\w.+-]+@[\w-]+\.[\w.-]+"),
    ("KEY", r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    # A word that begins so has no digit.
    ("KEY", r"\b(?:sk|pk|rk|hf|gh[oprsu]|github_pat|glpat|xox[abeprs])(?:[-_]|(?=[A-Za-z_.-]*\d))[A-Za-z0-9_.-]{16,}"),
    ("KEY", r"\b(?:AKIA|ASIA|eyJ)[-_]?[A-Za-z0-9_.-]{16,}"),
    ("KEY", r"(?i)(?<=bearer )\S{8,}|(?<=authorization: basic )\S+"),
    ("ADDRESS", r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"),
    ("NUMBER", r"\+?\d(?:[ ()./-]{0,2}\d){6,}"),
)
_NAMES = ("role", "id", "type", "tool_call_id")
"""Keys of messages, their parts, calls and tools whose texts no user wrote; `name` is one of a tool and its calls."""
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _SHAPES]


def redact(text: str) -> str:
    """Return a text with addresses of mail and machines, keys, passwords in URLs and long numbers replaced by what they were, such as
    [EMAIL]. Names and streets stay: they take a hook of the user's."""
    for name, pattern in _PATTERNS:
        text = pattern.sub(f"[{name}]", text)
    return text


class _KeptOutError(Exception):
    """A text that the user's hook keeps out."""


class Keeper:
    """Keeps the `limit` requests whose acceptance fell furthest below the baseline, each for `days`, in a folder.

    hook: redacts a text after `redact`; None keeps the request out. now: days of a clock.
    """

    def __init__(self, folder: Path, limit: int, days: float, hook: Redact | None, now: Callable[[], float]) -> None:
        self.path, self._limit, self._days, self._hook, self._now = folder / FILE, limit, days, hook, now
        self.lacking = 0
        self._again = "move it away, or name another folder with --keep"
        self.rows = [row for _, row in read_json_lines(self.path, self._again)] if self.path.exists() else []
        if not all(isinstance(row, dict) and {"kept_at", "lost"} <= row.keys() for row in self.rows):
            raise UserError(f"{self.path} holds what no watch has kept: {self._again}.")

    def add(self, events: Mapping[str, list[Event]], taus: Mapping[str, float]) -> None:
        """Take the events of slices, whose baselines are `taus`; write the file again where it changed."""
        before, now = list(self.rows), self._now()
        self.rows = [row for row in self.rows if row["kept_at"] > now - self._days]
        for name, tau in taus.items():
            for event in events.get(name, ()):
                seen = event.seen
                lost = tau * seen.rounds - seen.tokens
                full = len(self.rows) >= self._limit
                if event.record is None or lost <= 0 or (full and lost <= self.rows[-1]["lost"]):
                    continue
                texts = self._texts(event.record)
                if texts is None:
                    continue
                row: dict[str, Any] = {"id": seen.name, "slice": name, "kept_at": now, "rounds": seen.rounds}
                row |= {"tokens": seen.tokens, "lost": lost} | texts
                # Of several of one name the worst: those without ids are called by their lines, which begin anew in the next file.
                row = max([row, *(one for one in self.rows if one["id"] == seen.name)], key=lambda one: one["lost"])
                others = [one for one in self.rows if one["id"] != seen.name]
                self.rows = sorted([*others, row], key=lambda one: -one["lost"])[: self._limit]
        if self.rows != before:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows))

    def _texts(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Return the redacted messages of a request and its answer, with tools and calls; None where the record has none, and where the
        hook keeps it out."""
        inner = record.get("request")
        asked = inner if isinstance(inner, dict) else record
        messages: list[dict[str, Any]] = []
        with suppress(ValueError):
            messages = row_messages({key: asked[key] for key in ("messages", "prompt") if key in asked})
        if not messages:
            if self.lacking == 0:
                say("warning: --keep keeps no requests without 'messages': write what was asked beside the answer.")
            self.lacking += 1
            return None
        if messages[-1].get("role") != "assistant":
            with suppress(ValueError):  # without an answer
                messages = [*messages, *row_messages({"messages": [message_of(record)]})]
        try:
            row = {"messages": [self._clean(message) for message in messages]}
            return row | ({"tools": self._clean(asked["tools"])} if isinstance(asked.get("tools"), list) else {})
        except _KeptOutError:
            return None

    def _clean(self, value: Any, names: Collection[str] = _NAMES) -> Any:
        """Return a message or tools with every text redacted but those of the keys `names`. Raises _KeptOutError where the hook keeps one
        out."""
        if isinstance(value, dict):
            called = {"arguments", "parameters"} & value.keys() or value.get("role") == "tool"
            kept = (*names, "name") if names and called else names
            # What a call passes on is the user's, whatever its keys are.
            return {
                key: one
                if key in kept and isinstance(one, str)
                else self._clean(one, () if key == "arguments" else names)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._clean(one, names) for one in value]
        # Numbers that a call passes on, too; those of a schema are nobody's.
        if isinstance(value, str) or (not names and isinstance(value, int | float)):
            if (text := self._redacted(str(value))) is None:
                raise _KeptOutError
            return value if text == str(value) else text
        return value

    def _redacted(self, text: str) -> str | None:
        found: str | None = redact(text)
        if self._hook is None:
            return found
        try:
            found = self._hook(text if found is None else found)
        except Exception as error:  # the user's own code
            raise UserError(
                f"--redact raised {type(error).__name__} ({first_line(error)}), and nothing unredacted is kept: mend it, then watch again."
            ) from error
        if found is not None and not isinstance(found, str):
            raise UserError(
                f"--redact returned {type(found).__name__}: let it return the text, or None to keep it out."
            )
        return found
