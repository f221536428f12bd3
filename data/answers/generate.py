"""Answers by the target: the prompts of a data set, answered by the model that will be drafted for.

A head must learn to predict what the target writes, not what somebody else once answered. The output is
JSONL, a line per answer in the order of the prompts, with `prompt_ids` and `output_ids` as the model saw
them; the text is for people.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import OnTooLong, TokenizedSet, tokenize_answers
from draftsmith.data.conversations.templates import render_prompt
from draftsmith.errors import UserError
from draftsmith.eval.decode.decode import Generation, Request, check_requests, decode
from draftsmith.eval.decode.draft import TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.files import explain_os_error
from draftsmith.heads.target.target import Target

_BATCHES_PER_CHUNK = 4


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the target answers, with the request that asks for it."""

    conversation: Conversation
    request: Request


def prepare_prompts(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: Callable[[str], int],
    max_length: int,
    seed: int,
    template: dict[str, Any] | None = None,
    limit: str = "data.max_length and the target allow: raise data.max_length or give shorter prompts",
) -> list[Prompt]:
    """Render prompts (the history up to the last turn that is not the assistant's) and give each its own seed.

    Prompts that leave no room for an answer within `max_length` are left out. max_new_tokens: by slice. limit: what limits
    them and how to raise it, for the message where none is left.
    """
    prompts = []
    for conversation in conversations:
        ids = render_prompt(tokenizer, conversation.prompt(), conversation.tools, **(template or {}))
        room = min(max_new_tokens(conversation.slice), max_length - len(ids))
        if room > 0:
            request = Request.seeded(conversation.id, conversation.slice, ids, room, seed)
            prompts.append(Prompt(conversation, request))
    if conversations and not prompts:
        raise UserError(f"No prompt leaves room for an answer within the {max_length} tokens that {limit}.")
    return prompts


def regenerate(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    sampling: Sampling,
    batch: int = 64,
    progress: bool = True,
) -> Path:
    """Answer every prompt and stream the answers to `path`; resumes from what an interrupted run left.

    Works in chunks of a few batches, sorted by length inside a chunk. A chunk that was cut off is done
    again, so that the final file does not depend on interruptions.
    """
    if path.exists():
        return path
    partial = path.with_suffix(path.suffix + ".partial")
    check_requests(target, [p.request for p in prompts])
    chunk_size = batch * _BATCHES_PER_CHUNK
    with explain_os_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        done = _keep_whole_chunks(partial, chunk_size, len(prompts))
        bar = tqdm(total=len(prompts), initial=done, desc="answers", unit="answer", disable=not progress)
        tokens = 0
        with partial.open("ab") as file, bar:
            for start in range(done, len(prompts), chunk_size):
                chunk = prompts[start : start + chunk_size]
                answers = []
                for answer in _answer_chunk(target, chunk, sampling, batch):
                    answers.append(answer)
                    tokens += len(answer.output_ids)
                    bar.update()
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
                by_id = {id(a.request): a for a in answers}
                lines = [_to_line(p, by_id[id(p.request)], tokenizer) for p in chunk]
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    return path


def _answer_chunk(target: Target, chunk: Sequence[Prompt], sampling: Sampling, batch: int) -> Iterator[Generation]:
    """Yield answers as they are done, prompts of similar length together so that little is padding."""
    requests = sorted((p.request for p in chunk), key=lambda r: (len(r.prompt_ids), r.sample_id))
    return decode(target, TargetAlone(), requests, sampling, batch)


def _to_line(prompt: Prompt, answer: Generation, tokenizer: Any) -> str:
    conversation = prompt.conversation
    text = tokenizer.decode(answer.output_ids, skip_special_tokens=True)
    record = {
        "id": conversation.id,
        "slice": conversation.slice,
        "messages": [*conversation.prompt(), {"role": "assistant", "content": text}],
        "prompt_ids": list(prompt.request.prompt_ids),
        "output_ids": answer.output_ids,
        "finish_reason": answer.finish_reason,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def _keep_whole_chunks(partial: Path, chunk_size: int, total: int) -> int:
    """Cut an interrupted file after its last whole chunk; return how many answers it keeps."""
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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield {key: row[key] for key in ("id", "slice", "prompt_ids", "output_ids")}
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number} is not an answer ({error!r}): a line needs id, slice, prompt_ids and "
                    "output_ids; make the file again with `draftsmith regenerate --redo answers`."
                ) from error
