"""Hydra and Hydra++ (Ankner et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import ATTENTION_HEADS, LAYERS, STEPS, WIDTH, check_fields, within
from draftsmith.heads.registry import own_method

SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class HydraOptions:
    """The `head:` section of a recipe. Hydra reads the target's last hidden state and the tokens drafted so far, so it takes
    no aux layers. As they are it is the paper's Hydra; Hydra++ has four blocks, prefix_attention and dropout 0.2."""

    TRAINING: ClassVar = frozenset({"dropout"})

    num_heads: int = field(default=4, metadata=STEPS)
    """Heads; head i predicts the token i + 2 places after the last one that the target has read, given those between."""
    num_layers: int = field(default=1, metadata=LAYERS)
    """Residual blocks per head; the first takes the state and the tokens, the others what the one before gives."""
    tie_blocks: bool = False
    """The blocks of a head after its first are one and the same, applied several times, as in the published code."""
    prefix_attention: bool = False
    """One decoder layer runs over the target's states first, so that the heads see more of the text than one state."""
    dropout: float = field(default=0.0, metadata=within(0, 1, below=True))
    """In training this share of every block's and projection's input is set to zero (Hydra++: 0.2)."""
    original_lm_head: bool = False
    """All heads use the target's own output projection; false gives each head one of its own, which starts as that."""
    lm_head_bias: bool = True
    """Every head adds a bias of its own to its logits."""
    intermediate_size: int | None = field(default=None, metadata=WIDTH)
    """Width of the prefix layer's feed-forward part; null: the target's."""
    num_attention_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Query heads of the prefix layer; null: the target's."""
    num_key_value_heads: int | None = field(default=None, metadata=ATTENTION_HEADS)
    """Key/value heads of the prefix layer; null: the target's."""
    head_dim: int | None = field(default=None, metadata=WIDTH)
    """Size of a head of the prefix layer; null: the target's."""

    def __post_init__(self) -> None:
        check_fields(self, "head.")
        if self.tie_blocks and self.num_layers < 3:
            raise UserError(
                f"head.tie_blocks is true, but with head.num_layers {self.num_layers} a head has no two blocks to tie: leave "
                "it out."
            )
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and not self.prefix_attention:
                raise UserError(
                    f"head.{name} is {value}, which is about the prefix layer, but head.prefix_attention is false: leave it "
                    "out."
                )


METHOD = own_method(__name__, ":HydraOptions", "head:HydraDrafter", trees=frozenset({"static", "drawn"}))
