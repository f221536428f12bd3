"""The switches that block drafters (DFlash, DSpark) have in common, apart from the heads so that reading a recipe imports no
model code."""

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import require, require_positive

SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class BlockOptions:
    """The `head:` section of a recipe. Dimensions left out are the target's."""

    TRAINING: ClassVar = frozenset({"anchors"})

    layer_ids: list[int] | None = None
    """Aux layers to read: id k is the residual stream entering decoder layer k; null: (2, n//2, n-3)."""
    draft_vocab_size: int | None = None
    """W, how many of the target's tokens the head can draft; null: all of them."""
    block_size: int = 16
    """Slots of a block: the last token of the text and, behind it, a mask for every further slot."""
    mask_token_id: int | None = None
    """The token that stands for what is not drafted yet, one that no text has; null: the tokenizer's mask token, a reserved
    one, or one that only pads."""
    num_layers: int = 5
    """Decoder layers."""
    anchors: int = 512
    """Of each document so many of its tokens begin a block in a training pass, drawn anew in every epoch; all of them if it
    has fewer."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; null: the target's."""
    num_attention_heads: int | None = None
    """Query heads; null: the target's."""
    num_key_value_heads: int | None = None
    """Key/value heads; null: the target's."""
    head_dim: int | None = None
    """Size of a head; null: the target's."""

    def __post_init__(self) -> None:
        require(self.block_size >= 2, "head.block_size", self.block_size, "it must be at least 2, a token and a mask")
        require_positive(self, "num_layers", "anchors")
        require_positive(self, *SIZES, or_null=", or null for the target's")
        token = self.mask_token_id
        require(token is None or token >= 0, "head.mask_token_id", token, "give the id of a token, from 0")


def check_block(size: int, context: int, target: str | None) -> None:
    """Raise UserError for a block longer than the context of a target."""
    if size > context:
        raise UserError(
            f"head.block_size is {size}, but the target {target} reads no more than {context} tokens: make the block shorter."
        )
