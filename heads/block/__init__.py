"""What block drafters (DFlash, DSpark) share; here their switches, since nothing here may import model code."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.fields import LAYER_IDS, LAYERS, TOKEN_ID, VOCABULARY, within
from draftsmith.heads.layers import LayerOptions


@dataclass(frozen=True)
class BlockOptions(LayerOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's."""

    TRAINING: ClassVar = frozenset({"anchors"})

    layer_ids: list[int] | None = field(default=None, metadata=LAYER_IDS)
    """Aux layers to read: id k is the residual stream entering decoder layer k; null: (2, n//2, n-3)."""
    draft_vocab_size: int | None = field(default=None, metadata=VOCABULARY)
    """W, how many of the target's tokens the head can draft; null: all of them."""
    block_size: int = field(default=16, metadata=within(2, 1024, "a token and masks"))
    """Slots of a block: the last token of the text and, behind it, a mask for every further slot."""
    mask_token_id: int | None = field(default=None, metadata=TOKEN_ID)
    """The token that stands for what is not drafted yet, one that no text has; null: the tokenizer's mask token, a reserved
    one, or one that only pads."""
    num_layers: int = field(default=5, metadata=LAYERS)
    """Decoder layers."""
    anchors: int = field(default=512, metadata=within(1, 2**20))
    """Of each document so many of its tokens begin a block in a training pass, drawn anew in every epoch; all of them if it
    has fewer."""
