"""What the stages ask of a drafter's options, whatever its method: fields of these names mean the same in each.

layer_ids: aux layers that the head reads, None for the target's default; without the field it reads the last hidden
state alone. draft_vocab_size: size of its draft vocabulary, None (or no such field) for the target's whole vocabulary.
"""

from typing import Any

from draftsmith.heads.target import Target


def layer_ids_of(options: Any, target: Target) -> tuple[int, ...]:
    """Return the aux layers that a head with these options reads."""
    if not hasattr(options, "layer_ids"):
        return ()
    return target.default_layer_ids() if options.layer_ids is None else tuple(options.layer_ids)


def draft_vocab_size_of(options: Any) -> int | None:
    """Return the size of the draft vocabulary that these options ask for, None for the whole one."""
    return getattr(options, "draft_vocab_size", None)
