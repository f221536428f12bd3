"""The switches of an EAGLE-1 head, apart from the head so that reading a recipe imports no model code."""

from dataclasses import dataclass

from draftsmith.errors import UserError


@dataclass(frozen=True)
class Eagle1Options:
    """What an EAGLE-1 head is made of. It reads the target's last hidden state, so it takes no aux layers."""

    fc_bias: bool = False
    """The projection of [embedding, hidden] has a bias, as in the first published heads; vLLM drops it in silence."""
    qkv_bias: bool = False
    """Query, key and value projections have biases, as in published heads for Qwen2."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer; null: the target's."""
    num_attention_heads: int | None = None
    """Query heads; null: the target's."""
    num_key_value_heads: int | None = None
    """Key/value heads; null: the target's."""
    head_dim: int | None = None
    """Size of a head; null: the target's."""

    def __post_init__(self) -> None:
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"head.{name} is {value}: it must be at least 1, or null for the target's.")
