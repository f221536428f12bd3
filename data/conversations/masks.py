"""Samples for training: token ids of conversations or answers with the mask of tokens to learn, within a length."""

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.left_out import OnRefused, Refusals, left_out, some_of, warn_left_out
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.spans import Rendering, render_conversation
from draftsmith.data.conversations.templates import render_text, template_name
from draftsmith.errors import UserError
from draftsmith.progress import Bar

OnTooLong = Literal["drop", "truncate", "error"]


@dataclass
class TokenizeStats:
    """Counts of the samples that were kept, too long, or without a token to learn.

    kept: samples returned, of which `truncated` lost their tail; supervised_tokens: tokens to learn in them.
    dropped_too_long: samples left out because they (or all their tokens to learn) lie beyond max_length.
    cut_supervised_tokens: tokens to learn that max_length cost, by truncation and by dropping.
    without_supervised: samples left out because no token of theirs is to be learnt. cut: names of samples that are so far beyond
    max_length that only their first tokens were read, and counted. left_out: what the chat template leaves out of prompts, with the
    names of the conversations.
    """

    kept: int = 0
    truncated: int = 0
    dropped_too_long: int = 0
    without_supervised: int = 0
    supervised_tokens: int = 0
    cut_supervised_tokens: int = 0
    cut: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for the log; losses are named only where there are some."""
        cut = f"of {len(self.cut)} far longer than max_length only the first tokens were read ({some_of(self.cut)})"
        losses = (
            (self.truncated, f"{self.truncated} truncated"),
            (self.dropped_too_long, f"{self.dropped_too_long} dropped as too long"),
            (self.cut_supervised_tokens, f"{self.cut_supervised_tokens} tokens to learn lost to max_length"),
            (self.cut, cut),
            (self.without_supervised, f"{self.without_supervised} without a token to learn left out"),
        )
        kept = f"{self.kept} samples with {self.supervised_tokens} tokens to learn"
        return "; ".join([kept, *(said for count, said in losses if count)])


@dataclass(frozen=True)
class TokenizedSet:
    """The samples of a data set in order, and counts of those that were left out or cut."""

    samples: list[Tokenized]
    stats: TokenizeStats = field(default_factory=TokenizeStats)


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    max_length: int | None = None,
    on_too_long: OnTooLong = "drop",
    template_kwargs: dict[str, Any] | None = None,
    eos_ids: Collection[int] = (),
    stats: TokenizeStats | None = None,
    refusals: Refusals | None = None,
) -> list[Tokenized]:
    """Tokenize one conversation: one sample, or one per assistant turn (`<id>#<n>`) where the template rewrites turns.

    Samples longer than `max_length` tokens are dropped, truncated (the head stays) or an error; samples
    without a token to learn are left out; `stats`, if given, counts all of it. eos_ids: the tokens that end the target's answers,
    the tokenizer's own where there are none. refusals: what becomes of a conversation that cannot be rendered, an error by default.
    Raises UserError where the template refuses the conversation or leaves out a call, a tool's result or a thought of it, and where
    it is unclear where an answer begins.
    """
    stats, arguments = TokenizeStats() if stats is None else stats, template_kwargs or {}
    render = partial(render_text, tokenizer, name=conversation.id, **arguments)
    samples, renderings = list[Tokenized](), list[Rendering]()
    with (refusals or Refusals()).of(conversation.id):
        lost = left_out(conversation, render, template_name(tokenizer))
        renderings = render_conversation(tokenizer, conversation, eos_ids=eos_ids, most=max_length, **arguments)
        for what in lost:
            stats.left_out.setdefault(what, []).append(conversation.id)
    for number, rendering in enumerate(renderings, start=1):
        several = len(renderings) > 1
        name = f"{conversation.id}#{number}" if several else conversation.id
        sample = _fit(rendering, name, conversation.slice, max_length, on_too_long, stats)
        if sample is not None:
            samples.append(replace(sample, conversation=conversation.id) if several else sample)
    return samples


def tokenize_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    max_length: int | None = None,
    on_too_long: OnTooLong = "drop",
    on_refused: OnRefused | None = None,
    template_kwargs: dict[str, Any] | None = None,
    eos_ids: Collection[int] = (),
    warn: Callable[[str], None] = warnings.warn,
    progress: bool = False,
) -> TokenizedSet:
    """Tokenize a data set; UserError where not one sample has a token to learn. warn: called with each warning about the data set."""
    stats, refusals = TokenizeStats(), Refusals(on_refused)
    samples = [
        sample
        for conversation in Bar(conversations, desc="tokenize", unit="conv", disable=not progress)
        for sample in tokenize_conversation(
            tokenizer,
            conversation,
            max_length=max_length,
            on_too_long=on_too_long,
            template_kwargs=template_kwargs,
            eos_ids=eos_ids,
            stats=stats,
            refusals=refusals,
        )
    ]
    refusals.warn(warn, len(conversations))
    warn_left_out(warn, template_name(tokenizer), stats.left_out)
    return _not_empty(samples, stats, max_length)


def tokenize_answers(
    answers: Iterable[dict[str, Any]], *, max_length: int | None = None, on_too_long: OnTooLong = "drop"
) -> TokenizedSet:
    """Make samples of the rows of an answers file (`id`, `slice`, `prompt_ids`, `output_ids`); errors as in tokenize_all.

    The target's own ids are kept: no template is applied again.
    """
    stats = TokenizeStats()
    samples = []
    for row in answers:
        prompt, output = row["prompt_ids"], row["output_ids"]
        rendering = Rendering([*prompt, *output], [False] * len(prompt) + [True] * len(output))
        sample = _fit(rendering, row["id"], row["slice"], max_length, on_too_long, stats)
        if sample is not None:
            samples.append(sample)
    return _not_empty(samples, stats, max_length)


def _fit(
    rendering: Rendering, name: str, slice: str, max_length: int | None, on_too_long: OnTooLong, stats: TokenizeStats
) -> Tokenized | None:
    """Apply the length limit, count what it costs, and make the sample; None where it is left out."""
    ids, mask = rendering.ids, rendering.mask
    supervised = sum(mask)
    if rendering.cut:
        stats.cut.append(name)
    elif not supervised:
        stats.without_supervised += 1
        return None
    if max_length is not None and len(ids) > max_length:
        if on_too_long == "error":
            raise UserError(
                f"Sample {name} has {'over ' if rendering.cut else ''}{len(ids)} tokens, more than the {max_length} that data.max_length and the target allow: "
                "raise data.max_length, or set data.on_too_long to drop or truncate."
            )
        kept = sum(mask[:max_length]) if on_too_long == "truncate" else 0
        stats.cut_supervised_tokens += supervised - kept
        if not kept:
            stats.dropped_too_long += 1
            return None
        stats.truncated += 1
        ids, mask, supervised = ids[:max_length], mask[:max_length], kept
    stats.kept += 1
    stats.supervised_tokens += supervised
    return Tokenized(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), name, slice)


def _not_empty(samples: list[Tokenized], stats: TokenizeStats, max_length: int | None) -> TokenizedSet:
    if samples:
        return TokenizedSet(samples, stats)
    if stats.dropped_too_long:
        raise UserError(
            f"No sample is left: all {stats.dropped_too_long} samples with tokens to learn are longer than the "
            f"{max_length} tokens that data.max_length and the target allow: raise data.max_length, or set data.on_too_long to truncate."
        )
    raise UserError(
        f"No sample has a token to learn: none of the {stats.without_supervised} samples holds an assistant turn after "
        "a prompt; check the roles, or have the target answer the prompts first (draftsmith regenerate)."
    )
