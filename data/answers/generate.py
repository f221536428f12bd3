"""The target's own answers to the prompts of a data set: writing the file, reading it again, and holding some out of training.

A head must learn to predict what the target writes, not what somebody else once answered. The file is JSONL with a line
per answer in the order of the prompts: `prompt_ids` and `output_ids` as the model saw them, the text for people, and who served it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.data.answers.served import AnswerServer, answer_all
from draftsmith.data.conversations.masks import OnTooLong, TokenizedSet, tokenize_answers
from draftsmith.data.conversations.templates import Prompt
from draftsmith.data.team import Alone, SharedBar, Team
from draftsmith.decoder.answers import Generation, Request
from draftsmith.decoder.decode import check_requests, decode
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.foreign.text import open_file, read_json_lines
from draftsmith.progress import Bar
from draftsmith.storage import atomic_path, explain_os_error, fingerprint
from draftsmith.target.target import Target

BATCHES_PER_CHUNK = 4
"""Batches of answers that are decoded, and written, together."""


def regenerate(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    sampling: Sampling,
    seed: int,
    batch: int = 64,
    servers: Sequence[AnswerServer] = (),
    kept: Sequence[Path] = (),
    team: Team | None = None,
) -> Path:
    """Answer every prompt and stream the answers to `path`; resumes from what an interrupted run left.

    Random numbers depend on `seed` and the id of the conversation only. Works in chunks of a few batches, with prompts of
    similar length together so that little is padding. A chunk that was cut off is done again, so that the final file does
    not depend on interruptions, nor on how many processes of a `team` share the chunks out. kept: files of earlier answers, taken where the prompt is the same. `servers`, where there are
    any, answer for the target, by random numbers of their own; then every whole answer stays.
    """
    team = team or Alone()
    requests = [Request.seeded(p.conversation.id, p.conversation.slice, p.ids, p.max_new_tokens, seed) for p in prompts]
    file = _AnswersFile(path, 1 if servers else batch * BATCHES_PER_CHUNK, len(prompts))
    with explain_os_error(path):
        begun = team.tell(lambda: None if path.exists() else _begin(target, requests, file))
        if begun is None:
            return path
        (done, there), earlier = begun, _Earlier(kept, prompts)
        own = [c for c in file.chunks[team.rank :: team.size] if c.start >= done and c.start not in there]
        numbers = {id(request): i for i, request in enumerate(requests)}
        before = done + sum(len(chunk) for chunk in file.chunks if chunk.start in there)
        bar = Bar(total=len(prompts), initial=before, desc="answers", unit="answer")
        shown = SharedBar(team, f"answers in {path}", bar)

        def line_of(answer: Generation, server: AnswerServer | None = None) -> str:
            tokens = team.tally(f"tokens in {path}", len(answer.output_ids))
            shown.update(1)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
            own = _to_record(prompts[numbers[id(answer.request)]], answer, tokenizer)
            return json.dumps(own | ({"server": server.url} if server else {}), ensure_ascii=False, default=str) + "\n"

        with bar:
            if servers:  # asked by one process
                asked = [requests[chunk.start] for chunk in own if earlier.line(chunk.start) is None]
                shown.skip(len(own) - len(asked))
                with closing(answer_all(servers, asked, sampling, batch, target.vocab_size)) as served:
                    file.take_all(((numbers[id(a.request)], line_of(a, server)) for server, a in served), earlier.line)
            for chunk in () if servers else own:
                lines = {i: line for i in chunk if (line := earlier.line(i)) is not None}
                shown.skip(len(lines))
                left = sorted((requests[i] for i in chunk if i not in lines), key=_by_length)
                for answer in decode(target, TargetAlone(), left, sampling, batch):
                    lines[numbers[id(answer.request)]] = line_of(answer)
                if team.writes:
                    file.add(chunk, "".join(lines[i] for i in chunk).encode(), merge=team.rank == 0)
            if team.writes and team.rank == 0:
                shown.wait(file.merge)
                file.finish()
        team.wait(path.exists)
    return path


def _by_length(request: Request) -> tuple[int, str]:
    return len(request.prompt_ids), request.sample_id


def _begin(target: Target, requests: Sequence[Request], file: "_AnswersFile") -> tuple[int, list[int]]:
    """Check what is asked for and get the file ready to go on; return how many answers it holds, and where chunks begin that have
    come before their turn: who makes them learns it here, as they are gone once they are put in order."""
    check_requests(target, requests)
    return file.begin(), [chunk.start for chunk in file.chunks if file.part(chunk).exists()]


class _AnswersFile:
    """Answers that come in whole chunks of several processes: next to `path`, in a file that grows in order, and in one for each
    chunk that has come before its turn."""

    def __init__(self, path: Path, size: int, total: int) -> None:
        self.path, self.partial, self._total, self._size = path, path.with_suffix(path.suffix + ".partial"), total, size
        self.chunks = [range(start, min(start + size, total)) for start in range(0, total, size)]
        self._next = 0

    def part(self, chunk: range) -> Path:
        """Return the file of a chunk that has come before its turn."""
        return self.path.with_name(f"{self.path.name}.part-{chunk.start}-{chunk.stop}")

    def begin(self) -> int:
        """Remove what was cut off, and return how many answers stay in order."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        done = _keep_whole_chunks(self.partial, self._size, self._total)
        self.partial.touch()
        self._next = sum(chunk.stop <= done for chunk in self.chunks)
        self.merge()
        return self.chunks[self._next - 1].stop if self._next else 0

    def add(self, chunk: range, lines: bytes, *, merge: bool) -> None:
        """Keep the lines of a chunk. merge: this is the process that puts them in order."""
        if merge and chunk == self.chunks[self._next]:
            self._append(lines)
            self.merge()
        else:
            with atomic_path(self.part(chunk)) as temporary:
                temporary.write_bytes(lines)

    def take_all(self, arriving: Iterable[tuple[int, str]], known: Callable[[int], str | None]) -> None:
        """Keep answers in chunks of one as they come, by their numbers, and those that are known when their turn comes."""
        for number, line in chain([(-1, "")], arriving):
            if number >= 0:
                self.add(self.chunks[number], line.encode(), merge=True)
            while self._next < len(self.chunks) and (found := known(self._next)) is not None:
                self._append(found.encode())
                self.merge()

    def merge(self) -> bool:
        """Put chunks that are next in order, as far as they are there; return whether all are."""
        while self._next < len(self.chunks) and (part := self.part(self.chunks[self._next])).exists():
            with open_file(part, "make the answers again with --redo answers") as file:
                self._append(file.read())
            part.unlink()
        return self._next == len(self.chunks)

    def _append(self, lines: bytes) -> None:
        with self.partial.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self._next += 1

    def finish(self) -> None:
        """Give the whole file its name; what an earlier run with other chunks left goes."""
        for part in self.path.parent.glob(f"{self.path.name}.part-*"):
            part.unlink()
        self.partial.replace(self.path)


class _Earlier:
    """Earlier answers: where each lies in its file, by id, slice and tokens of its prompt; the first of two to a prompt counts."""

    def __init__(self, files: Sequence[Path], prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._places = dict[str, tuple[Path, int]]()
        for path in files:
            if path.suffix == ".partial":
                _keep_whole_chunks(path, 1, 0)
            offset = 0
            with path.open("rb") as file:
                for line, row in zip(file, _rows(path), strict=True):
                    self._places.setdefault(fingerprint([row["id"], row["slice"], row["prompt_ids"]]), (path, offset))
                    offset += len(line)

    def line(self, number: int) -> str | None:
        """Return the line that answers a prompt, by its number; None where there is none."""
        prompt = self._prompts[number]
        said = prompt.conversation
        place = self._places and self._places.get(fingerprint([said.id, said.slice, list(prompt.ids)]))
        if not place:
            return None
        with place[0].open("rb") as file:
            file.seek(place[1])
            return file.readline().decode()


def _to_record(prompt: Prompt, answer: Generation, tokenizer: Any) -> dict[str, Any]:
    conversation = prompt.conversation
    text = tokenizer.decode(answer.output_ids, skip_special_tokens=True)
    return {
        "id": conversation.id,
        "slice": conversation.slice,
        "messages": [*conversation.prompt(), {"role": "assistant", "content": text}],
        "prompt_ids": list(prompt.ids),
        "output_ids": answer.output_ids,
        "finish_reason": answer.finish_reason,
    }


def _keep_whole_chunks(partial: Path, chunk_size: int, total: int) -> int:
    """Cut an interrupted file after its last whole chunk; return how many answers it keeps. Raises UserError for a link."""
    if partial.is_symlink():
        raise UserError(f"{partial} is a link, which this run did not make: remove it, or choose another folder.")
    if not partial.exists():
        return 0
    kept, end, count = 0, 0, 0
    with partial.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count += 1
            end += len(line)
            if count % chunk_size == 0 or count == total:
                kept, whole = count, end
        file.truncate(whole if kept else 0)
    return kept


def read_answers(path: Path, *, max_length: int | None = None, on_too_long: OnTooLong = "drop") -> TokenizedSet:
    """Read an answers file as token ids and masks; no template is applied again.

    Raises UserError with file and line for a line that is not an answer.
    """
    return tokenize_answers(_rows(path), max_length=max_length, on_too_long=on_too_long)


def server_of(path: Path) -> dict[str, str]:
    """Return by their ids which servers made the answers in a file, those that the target made here left out."""
    return {row["id"]: server for row in _rows(path) if isinstance(server := row.get("server"), str)}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    remedy = "make the file again with `draftsmith regenerate --redo answers`"
    for number, row in read_json_lines(path, remedy):
        names = isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("id", "slice"))
        if not names or not all(_are_ids(row.get(key)) for key in ("prompt_ids", "output_ids")):
            raise UserError(
                f"{path}, line {number} is not an answer: a line needs id and slice, which are texts, and prompt_ids and "
                f"output_ids, which are lists of token ids; {remedy}."
            )
        yield row


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


def split_heldout(conversations: list[str], count: int) -> tuple[list[int], list[int]]:
    """Split samples into (train, held out), about `count` of them, the same for every run over the same data.

    conversations: the id of each sample's. Turns of one stay together: a later turn's prompt holds the earlier answers. One of more samples
    than `count` is held out where there are no others.
    """
    if count >= len(conversations):
        raise UserError(
            f"data.heldout is {count} but there are only {len(conversations)} answers: lower it or add data."
        )
    groups: dict[str, list[int]] = {}
    for sample, name in enumerate(conversations):
        groups.setdefault(name, []).append(sample)
    heldout: list[int] = []
    for name in sorted(groups, key=lambda name: (len(groups[name]) > count, fingerprint(name))):
        if len(heldout) >= count:
            break
        heldout += groups[name]
    if len(heldout) == len(conversations):
        raise UserError("data.heldout takes every conversation: lower it or add data.")
    return sorted(set(range(len(conversations))) - set(heldout)), sorted(heldout)
