"""Layers and attention that several draft heads are built of; here the options of their sizes, since nothing here may import model code."""

from dataclasses import dataclass, field

from draftsmith.fields import ATTENTION_HEADS, WIDTH, check_fields


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The sizes of decoder layers, for the `head:` section of a recipe."""

    intermediate_size: int | None = field(default=None, metadata=WIDTH)
    """Width of the feed-forward layer; null: the target's."""
    num_attention_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Query heads; null: the target's."""
    num_key_value_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Key/value heads; null: the target's."""
    head_dim: int | None = field(default=None, metadata=WIDTH)
    """Size of a head; null: the target's."""

    def __post_init__(self) -> None:
        check_fields(self, "head.")
