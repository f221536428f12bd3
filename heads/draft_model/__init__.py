"""A draft model: a small Llama, distilled from the target."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import ATTENTION_HEADS, LAYER_IDS, LAYERS, WIDTH, check_fields
from draftsmith.heads.registry import own_method

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""What a draft model that starts from another one has from there."""


@dataclass(frozen=True)
class DraftLmOptions:
    """What a draft model is made of: a small Llama with the target's tokens and RoPE, which reads the text alone."""

    MODELS: ClassVar[tuple[str, ...]] = ("init_from",)
    """Options that name a model, of which the weights count and not the place."""

    init_from: str | None = None
    """Folder or Hub name of a small Llama with the target's tokenizer to start from; its sizes and RoPE are its own."""
    layers_from_target: list[int] | None = field(default=None, metadata=LAYER_IDS)
    """Start from these layers of a Llama target (0 is the first), its embeddings, final norm and output projection."""
    num_hidden_layers: int | None = field(default=None, metadata=LAYERS)
    """Layers; null: 2, or those of what it starts from."""
    hidden_size: int | None = field(default=None, metadata=WIDTH)
    """Width of the states; null: the target's."""
    intermediate_size: int | None = field(default=None, metadata=WIDTH)
    """Width of the feed-forward layers; null: as many times hidden_size as in the target."""
    num_attention_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Query heads; null: hidden_size / head_dim."""
    num_key_value_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Key/value heads; null: the greatest common divisor of the query heads and the target's own."""
    head_dim: int | None = field(default=None, metadata=WIDTH)
    """Size of a head; null: the target's."""
    tie_word_embeddings: bool | None = None
    """Embeddings and output projection are one matrix; null: as in the target."""

    def __post_init__(self) -> None:
        check_fields(self, "head.")
        if self.init_from is not None and self.layers_from_target is not None:
            raise UserError("head.init_from and head.layers_from_target both say what to start from: name one of them.")


METHOD = own_method(__name__, ":DraftLmOptions", "head:DraftLmDrafter", layers="layers_from_target")
