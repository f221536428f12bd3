"""Whether two models read and write the same token ids."""

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError


def check_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_path: str) -> None:
    """Raise UserError, naming the first id that differs, unless both tokenizers have the same tokens under the same ids
    and begin and end texts with the same ones.

    Embeddings may be padded beyond the tokenizer, so their sizes say nothing about this.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    if differing := [
        token_id for token_id in ours.keys() | theirs.keys() if ours.get(token_id) != theirs.get(token_id)
    ]:
        first = min(differing)
        raise _refusal(draft_path, f"id {first} is {_named(theirs.get(first))} there and {_named(ours.get(first))}")
    for name in ("bos_token_id", "eos_token_id"):
        mine, other = getattr(target, name), getattr(draft, name)
        if mine != other:
            raise _refusal(
                draft_path, f"its {name} is {_named(theirs.get(other))} ({other}) and {_named(ours.get(mine))} ({mine})"
            )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _refusal(path: str, difference: str) -> UserError:
    return UserError(
        f"The draft model {path} has another tokenizer than the target: {difference} in the target; take a draft model of "
        "the target's own family, or train a head."
    )
