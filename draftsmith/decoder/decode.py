"""Answer prompts with a target and a drafter: the entry points of decoding.

Every answer is the target's own, whatever the draft, the batch and the order of prompts.
"""

from collections.abc import Iterator, Sequence

import torch

from draftsmith.decoder.answers import Decoded, Generation, Request
from draftsmith.decoder.draft import Drafter
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.target.target import Target, describe_context


@torch.no_grad()
def decode_batch(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    typical: Typical | None = None,
    rows: int | None = None,
) -> Decoded:
    """Answer `requests` as one batch; every row gets the text it would get alone (up to rounding in low precision).

    Args:
        typical: accept drafts by this lossy rule instead of the exact one.
        rows: decode at most so many at once, the others wait for a free row; None decodes all at once.

    Raises:
        UserError: for what `check_requests` refuses.
    """
    assert rows is None or rows >= 1
    check_requests(target, requests, drafter)
    if not requests:
        return Decoded([], {})
    loop = Loop(target, drafter, requests, sampling, typical, min(rows or len(requests), len(requests)))
    for decoded in loop.run():  # noqa: B007 - the last one is wanted
        pass
    return decoded


def decode(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, batch: int
) -> Iterator[Generation]:
    """Answer `requests`, at most `batch` at a time, and yield each answer when it is finished.

    Raises UserError for what `check_requests` refuses, before the first answer.
    """
    assert batch >= 1
    check_requests(target, requests, drafter)

    @torch.no_grad()
    def stream() -> Iterator[Generation]:
        loop = Loop(target, drafter, requests, sampling, None, min(batch, len(requests)), timed=False)
        for _ in loop.run():
            yield from loop.take_finished()
        yield from loop.take_finished()

    return stream() if requests else iter(())


@torch.no_grad()
def decode_live(
    target: Target, drafter: Drafter, request: Request, sampling: Sampling, typical: Typical | None = None
) -> Iterator[Decoded]:
    """Answer one request, and yield its answer so far as `Loop.run` does. typical: as in `decode_batch`.

    Raises UserError for what `check_requests` refuses.
    """
    check_requests(target, [request], drafter)
    return Loop(target, drafter, [request], sampling, typical, 1).run()


def check_requests(target: Target, requests: Sequence[Request], drafter: Drafter | None = None) -> None:
    """Raise UserError, before any work, for prompts that the target cannot serve and drafts larger than its context."""
    drafted = 0 if drafter is None else drafter.num_speculative_tokens
    if drafter is not None and drafter.max_nodes > target.context_length:
        raise UserError(
            f"A draft of {drafter.max_nodes} tokens is larger than the target's context of {target.context_length}: take a "
            "smaller tree."
        )
    for request in requests:
        ids, most = request.prompt_ids, request.max_new_tokens
        if not isinstance(ids, tuple | list) or (kinds := {type(token) for token in ids} - {int}):
            what = (
                f"is a {type(ids).__name__}" if not isinstance(ids, tuple | list) else f"holds a {kinds.pop().__name__}"
            )
            raise UserError(
                f"Prompt {request.sample_id} {what}: give a tuple of token ids, as apply_chat_template(..., return_dict=False) returns them."
            )
        if type(most) is not int:
            raise UserError(
                f"max_new_tokens is {most!r} for {request.sample_id}: it must be a whole number of at least 1."
            )
        if type(request.key) is not int or not -(2**63) <= request.key < 2**63:
            raise UserError(
                f"The key of {request.sample_id} is {request.key!r}: it must be a whole number of 64 bits with a sign, the seed of its draws."
            )
        if not request.prompt_ids:
            raise UserError(f"Prompt {request.sample_id} is empty: give it at least one token.")
        if request.max_new_tokens < 1:
            raise UserError(
                f"max_new_tokens is {request.max_new_tokens} for {request.sample_id}: it must be at least 1."
            )
        if max(request.prompt_ids) >= target.vocab_size or min(request.prompt_ids) < 0:
            raise UserError(
                f"Prompt {request.sample_id} holds a token id outside the target's vocabulary of {target.vocab_size}: "
                "it was made with another tokenizer; use the target's own."
            )
        need = len(request.prompt_ids) + request.max_new_tokens + drafted
        if need > target.context_length:
            raise UserError(
                f"Prompt {request.sample_id} needs {need} positions ({len(request.prompt_ids)} prompt + "
                f"{request.max_new_tokens} new + {drafted} drafted) but the target's context has {describe_context(target.config)}: "
                "shorten the prompt or lower max_new_tokens."
            )
