"""The switches of Hydra heads, apart from the heads so that reading a recipe imports no model code."""

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import require, require_positive

SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class HydraOptions:
    """The `head:` section of a recipe. Hydra reads the target's last hidden state and the tokens drafted so far, so it takes
    no aux layers. As they are it is the paper's Hydra; Hydra++ has four blocks, prefix_attention and dropout 0.2."""

    TRAINING: ClassVar = frozenset({"dropout"})

    num_heads: int = 4
    """Heads; head i predicts the token i + 2 places after the last one that the target has read, given those between."""
    num_layers: int = 1
    """Residual blocks per head; the first takes the state and the tokens, the others what the one before gives."""
    tie_blocks: bool = False
    """The blocks of a head after its first are one and the same, applied several times, as in the published code."""
    prefix_attention: bool = False
    """One decoder layer runs over the target's states first, so that the heads see more of the text than one state."""
    dropout: float = 0.0
    """In training this share of every block's and projection's input is set to zero (Hydra++: 0.2)."""
    original_lm_head: bool = False
    """All heads use the target's own output projection; false gives each head one of its own, which starts as that."""
    lm_head_bias: bool = True
    """Every head adds a bias of its own to its logits."""
    intermediate_size: int | None = None
    """Width of the prefix layer's feed-forward part; null: the target's."""
    num_attention_heads: int | None = None
    """Query heads of the prefix layer; null: the target's."""
    num_key_value_heads: int | None = None
    """Key/value heads of the prefix layer; null: the target's."""
    head_dim: int | None = None
    """Size of a head of the prefix layer; null: the target's."""

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "num_layers")
        if self.tie_blocks and self.num_layers < 3:
            raise UserError(
                f"head.tie_blocks is true, but with head.num_layers {self.num_layers} a head has no two blocks to tie: leave "
                "it out."
            )
        require(0 <= self.dropout < 1, "head.dropout", self.dropout, "it must be at least 0 and below 1")
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and not self.prefix_attention:
                raise UserError(
                    f"head.{name} is {value}, which is about the prefix layer, but head.prefix_attention is false: leave it "
                    "out."
                )
        require_positive(self, *SIZES, or_null=", or null for the target's")
