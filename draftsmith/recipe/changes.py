"""What changed between two recipes that made a stage, in the keys that a user sets.

run.json identifies what a stage was made from, and for much of it that is a hash: of conversations, models, earlier stages. The
recipe that stands beside tells which keys such a hash came from.
"""

from collections.abc import Mapping
from typing import Any

from draftsmith.fields import shown

_TEMPLATE = ("data.template", "data.chat_template")
_PROMPTS = ("evaluate.prompts", "evaluate.per_slice", "evaluate.max_new_tokens", "evaluate.max_k", *_TEMPLATE)
_DATA = ("data.sources", "data.split", "data.slice", "data.limit")
_ANSWERS = (*_DATA, "data.max_length", *_TEMPLATE, "answers", "target", "seed")
_HASHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "conversations": ("the conversations of data.sources", _DATA),
    "target": ("the model in target.path", ("target.path",)),
    "eos": ("the end tokens of the model in target.path", ("target.path",)),
    "tokenizer": ("the tokenizer or the chat template", ("target.path", "data.chat_template")),
    "identity": ("the tokenizer, chat template or end tokens of target.path", ("target.path",)),
    "original": ("the model that the target was tuned from", ("target.path",)),
    "answers": ("the answers", _ANSWERS),
    "features": ("the hidden states", (*_ANSWERS, "features", "head.layer_ids", "data.on_too_long")),
    "head": ("the head", ("method", "head", "train", "features", *_ANSWERS)),
    "beside": ("a head of evaluate.beside", ("evaluate.beside",)),
    "baselines": ("a draft model of evaluate.baselines", ("evaluate.baselines",)),
    "trees": ("a tree of evaluate.drafts", ("evaluate.drafts",)),
    "prompts": ("the prompts of evaluate.prompts", _PROMPTS),
    "references": ("the references of evaluate.prompts", _PROMPTS),
    "train.warm_start": ("the head in train.warm_start", ("train.warm_start",)),
    "head.init_from": ("the model in head.init_from", ("head.init_from",)),
}
"""What a record identifies by a hash: in words, and the keys of the recipe that decide it, or the sections of such keys."""
_GROUPS = ("identity", "beside", "baselines", "trees")
"""Those that hold a hash by name."""
MOST_CHANGES = 3


def tell_changes(
    was: Mapping[str, Any], now: Mapping[str, Any], recipe_was: Mapping[str, Any], recipe_now: Mapping[str, Any]
) -> str:
    """Return in words what differs between a stage's inputs, at most MOST_CHANGES of it; the method first, as options come with it.

    Inputs and recipes are flat, by dotted keys. A recipe that is not known, as in older records, is empty; what is identified by a
    hash is then called by name.
    """
    changed = sorted(differing(was, now) or was.keys() | now.keys(), key=lambda key: (key != "method", key))
    changes: dict[str, None] = {}
    for key in changed:
        name = next((group for group in _GROUPS if key.startswith(f"{group}.")), key)
        if name not in _HASHES:
            changes[_change(key, was, now)] = None
            continue
        what, decides = _HASHES[name]
        keys = differing(recipe_was, recipe_now) if recipe_was and recipe_now else []
        known = [one for one in keys if any(one == key or one.startswith(f"{key}.") for key in decides)]
        changes |= dict.fromkeys([_change(one, recipe_was, recipe_now) for one in known] or [f"{what} changed"])
    return "; ".join([*changes][:MOST_CHANGES])


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, sorted; one that is left out and an empty one are the same."""
    values = (
        {key: None if one.get(key) in ([], {}, "") else one.get(key) for key in was.keys() | now} for one in (was, now)
    )
    then, here = values
    return sorted(key for key in then if then[key] != here[key])


def _change(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{key} was {shown(was.get(key))}, is {shown(now.get(key))}"
