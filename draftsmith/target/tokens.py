"""Comparing the token ids of two models, and choosing the mask token of block drafters."""

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError
from draftsmith.target.folder import read_object
from draftsmith.target.target import Target


def check_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_path: str) -> None:
    """Raise UserError, naming the first id that differs, unless both tokenizers have the same tokens under the same ids
    and begin and end texts with the same ones.

    Embeddings may be padded beyond the tokenizer, so their sizes say nothing about this.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    if differing := [one for one in ours.keys() | theirs.keys() if ours.get(one) != theirs.get(one)]:
        first = min(differing)
        raise _refusal(draft_path, f"id {first} is {_named(theirs.get(first))} there and {_named(ours.get(first))}")
    for name in ("bos_token_id", "eos_token_id"):
        mine, other = getattr(target, name), getattr(draft, name)
        if mine != other:
            there = f"{_named(theirs.get(other))} ({other})"
            raise _refusal(draft_path, f"its {name} is {there} and {_named(ours.get(mine))} ({mine})")


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _refusal(path: str, difference: str) -> UserError:
    return UserError(
        f"The draft model {path} has another tokenizer than the target: {difference} in the target; take a draft model of "
        "the target's own family, or train a head."
    )


_SPARE = ("mask", "reserved", "unused")
"""Parts of the names of special tokens that no text has."""


def choose_mask_token(given: int | None, target: Target) -> int:
    """Return the id of the mask token: `given`, or one of the target's tokenizer that texts do not have.

    Raises UserError for one outside the vocabulary, and where the tokenizer has none to spare.
    """
    if given is not None:
        check_mask_token(given, target.vocab_size, target.path)
        return given
    chosen = None if target.directory is None else next(spare_tokens(target.directory, target.eos_ids), None)
    if chosen is None or chosen >= target.vocab_size:
        raise UserError(
            f"The tokenizer of the target {target.path} has no mask token and none that is reserved or only pads: set "
            f"head.mask_token_id to a token, from 0 to {target.vocab_size - 1}, that no text has."
        )
    return chosen


def check_mask_token(given: int, vocab_size: int, target: str | None) -> None:
    """Raise UserError for a token outside the vocabulary of a target."""
    if given >= vocab_size:
        raise UserError(
            f"head.mask_token_id is {given}, but the target {target} has {vocab_size} tokens, numbered from 0: name one that "
            "no text has."
        )


def spare_tokens(folder: Path, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """Yield the ids of special tokens that texts do not have, by the tokenizer's files in `folder`, the best first."""
    listed = read_object(folder / "tokenizer.json").get("added_tokens") or []
    config = read_object(folder / "tokenizer_config.json")
    later = config.get("added_tokens_decoder") or {}
    special = {token["content"]: token["id"] for token in listed if token.get("special")}
    special |= {token["content"]: int(key) for key, token in later.items() if token.get("special")}
    if (name := _token_of(config, "mask_token")) in special:
        yield special[name]
    for word in _SPARE:
        yield from (
            token for content, token in sorted(special.items(), key=lambda item: item[1]) if word in content.lower()
        )
    pad = special.get(_token_of(config, "pad_token"), -1)
    if pad >= 0 and pad not in eos_ids:
        yield pad


def _token_of(config: dict[str, object], key: str) -> str:
    value = config.get(key)
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)
