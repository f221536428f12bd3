"""Start training from an existing head: check that the recipe's options fit it, and make the head that is trained.

`DraftHead.describe` says what the head is made of. A dataclass of options says in `TRAINING` which of its fields may
differ, in `ALIKE` which values of others the same tensors serve, in `WARM_FROM` which other methods have heads with tensors of the same names, and checks the completed options
in `check_adopted`.
"""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target

RESIZED = ("draft_vocab_size", "block_size", "num_heads")
"""Options that `train.resize` may change: the vocabulary that is drafted, and how long drafts are."""


def adopt_options(options: Any, head: DraftHead, target: Target, name: str, resize: bool = False) -> Any:
    """Return the recipe's `options`, with fields that are null filled in from `head`. name: of the head, for messages.

    Fields that say how to train stay those of the recipe; so do `RESIZED`, to `resize`. Raises UserError, naming all of them, for
    other fields whose values differ from the head's.
    """
    # The fields of the options with the head's real sizes, where null stands for those of its target.
    spec = head.describe()
    if not isinstance(spec.get("options"), dict):
        raise UserError(
            f"train.warm_start: heads of {head.method} do not tell their options, so no training can start from one: let "
            'their `describe` return them under "options", or remove train.warm_start.'
        )
    described = {**spec["options"]}
    described |= {key: value for key, value in spec.get("layer_config", {}).items() if key in described}
    vocab_size = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    ours = {"layer_ids": list(head.reads.layer_ids), "draft_vocab_size": vocab_size}
    made_of, adopted, apart = (described | {key: value for key, value in ours.items() if key in described}), {}, []
    if resize and made_of.get("lm_head_rank") is not None and getattr(options, "draft_vocab_size", None) is not None:
        raise UserError(
            f"head.draft_vocab_size is {options.draft_vocab_size}, but the head that train.warm_start names ({name}) has a projection of "
            "low rank, whose rows of new tokens nothing gives: leave it null, or start from a head with a whole one."
        )
    for key in (field.name for field in fields(options)):
        asked = getattr(options, key)
        if key in getattr(options, "TRAINING", ()) or key not in made_of or asked == made_of[key]:
            continue
        alike = getattr(options, "ALIKE", {}).get(key, ())
        if asked is not None and asked in alike and made_of[key] in alike:
            continue
        if key == "draft_vocab_size" and asked is not None and asked >= target.vocab_size == made_of[key]:
            continue
        if asked is None:
            adopted[key] = made_of[key]
        elif not (resize and key in RESIZED):
            apart.append(key)
    if apart:
        asked_for = ", ".join(f"head.{key} is {_shown(getattr(options, key))}" for key in apart)
        has, names = ", ".join(_shown(made_of[key]) for key in apart), ", ".join(f"head.{key}" for key in apart)
        raise UserError(
            f"{asked_for}, but the head that train.warm_start names ({name}) has {has}: set {names} to that, or start from "
            "another head."
        )
    options = replace(options, **adopted)
    if (check := getattr(options, "check_adopted", None)) is not None:
        check()
    return options


def restart(
    head: DraftHead,
    options: Any,
    target: Target,
    method: str | None = None,
    *,
    resize: bool = False,
    draft_vocab: Tensor | None = None,
) -> DraftHead:
    """Return a head with the weights of `head`, to be trained with `options` (those of `adopt_options`). method: of the
    new head, None for that of `head`; tensors that a head of another method lacks start as in a new head.

    resize: sizes of `RESIZED` may be others, and the new head has this draft vocabulary [W], None for all tokens: rows of tokens that
    both have stay, and what the old one has not starts as in a new head.
    """
    method = method or head.method
    spec = {**head.describe(), "options": asdict(options), "layer_ids": list(head.reads.layer_ids)}
    vocab = draft_vocab if resize else head.draft_vocab
    make = partial(find_method(method).load, spec, target)
    new, tensors = make(vocab), head.state_dict()
    if resize:
        tensors = _resized(
            head, find_method(method).build(options, target, vocab).state_dict(), vocab, make, target.vocab_size
        )
    for name, parameter in new.named_parameters():
        if name == EMBEDDING and parameter.requires_grad:
            # A shared one would be trained in the target, too.
            tensors[name] = tensors[name].to(parameter.dtype, copy=True)
    new.load_state_dict(tensors, assign=True, strict=head.method == method)
    return new


def _resized(
    head: DraftHead,
    fresh: dict[str, Tensor],
    vocab: Tensor | None,
    make: Callable[[Tensor], DraftHead],
    vocab_size: int,
) -> dict[str, Tensor]:
    """Return the state dict `fresh` of a new head with all that `head` knows of it. make: a head of a draft vocabulary."""
    ours, of_tokens = head.state_dict(), frozenset[str]()
    device = next(iter(fresh.values())).device
    every = torch.arange(vocab_size, device=device)
    old, ids = (every if one is None else one.to(device) for one in (head.draft_vocab, vocab))
    at = torch.searchsorted(old, ids).clamp(max=len(old) - 1)
    known = old[at] == ids  # [W]
    if head.draft_vocab is not None or vocab is not None:
        # What has a row for each of its tokens is shorter in a head of one token less, whatever else is as long.
        less = make(ids[:-1]).state_dict()
        of_tokens = frozenset(name for name, value in fresh.items() if less[name].shape != value.shape)
    tensors = dict(fresh)
    for name, value in fresh.items():
        mine = ours.get(name)
        if name in of_tokens and mine is not None and name != "draft_vocab":
            tensors[name] = value.detach().clone()
            tensors[name][known] = mine[at[known]].to(value)
        elif mine is not None and mine.shape == value.shape and name not in of_tokens:
            tensors[name] = mine
        elif mine is not None and mine.ndim == value.ndim and name not in of_tokens:  # of the slots of a block
            both = tuple(slice(min(sizes)) for sizes in zip(mine.shape, value.shape, strict=True))
            tensors[name] = value.detach().clone()
            tensors[name][both] = mine[both]
    return tensors


def _shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
