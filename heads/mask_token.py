"""Which token stands for those that a block drafter has yet to draft."""

from collections.abc import Iterator
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.heads.target import Target
from draftsmith.heads.target_files import read_object

_SPARE = ("mask", "reserved", "unused")
"""What names a special token that no text has."""


def choose_mask_token(given: int | None, target: Target) -> int:
    """Return the id of the mask token: `given`, or one of the target's tokenizer that texts do not have.

    Raises UserError for one outside the vocabulary, and where the tokenizer has none to spare.
    """
    if given is not None:
        check_mask_token(given, target.vocab_size, target.path)
        return given
    found = None if target.directory is None else next(spare_tokens(target.directory, target.eos_ids), None)
    if found is None or found >= target.vocab_size:
        raise UserError(
            f"The tokenizer of the target {target.path} has no mask token and none that is reserved or only pads: set "
            f"head.mask_token_id to a token, from 0 to {target.vocab_size - 1}, that no text has."
        )
    return found


def check_mask_token(given: int, vocab_size: int, target: str | None) -> None:
    """Raise UserError for a token outside the vocabulary of a target."""
    if given >= vocab_size:
        raise UserError(
            f"head.mask_token_id is {given}, but the target {target} has {vocab_size} tokens, numbered from 0: name one that "
            "no text has."
        )


def spare_tokens(folder: Path, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """Yield the ids of special tokens that texts do not have, by the tokenizer's files in `folder`, the best first."""
    special = _special_tokens(folder)
    config = read_object(folder / "tokenizer_config.json")
    if (name := _named(config, "mask_token")) in special:
        yield special[name]
    for word in _SPARE:
        yield from (
            token for content, token in sorted(special.items(), key=lambda item: item[1]) if word in content.lower()
        )
    pad = special.get(_named(config, "pad_token"), -1)
    if pad >= 0 and pad not in eos_ids:
        yield pad


def _special_tokens(folder: Path) -> dict[str, int]:
    """Return the special tokens that the tokenizer's files name, with their ids."""
    listed = read_object(folder / "tokenizer.json").get("added_tokens") or []
    later = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {token["content"]: token["id"] for token in listed if token.get("special")}
    return found | {token["content"]: int(key) for key, token in later.items() if token.get("special")}


def _named(config: dict[str, object], key: str) -> str:
    value = config.get(key)
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)
