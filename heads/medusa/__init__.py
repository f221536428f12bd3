"""Medusa (Cai et al. 2024)."""

from dataclasses import dataclass, field

from draftsmith.fields import LAYERS, STEPS, check_fields
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class MedusaOptions:
    """The `head:` section of a recipe. Medusa reads the target's last hidden state, so it takes no aux layers."""

    num_heads: int = field(default=5, metadata=STEPS)
    """Heads; head i predicts the token i + 2 places after the last one that the target has read."""
    num_layers: int = field(default=1, metadata=LAYERS)
    """Residual blocks per head. More than one is served by vLLM, and by TGI where heads have projections of their own; the
    layout `medusa` of the original code holds one."""
    original_lm_head: bool = False
    """All heads use the target's own output projection and train their blocks alone (the published v2 files); false
    gives each head a projection of its own, which starts as the target's."""

    def __post_init__(self) -> None:
        check_fields(self, "head.")


METHOD = own_method(
    __name__,
    ":MedusaOptions",
    "head:MedusaDrafter",
    trees=frozenset({"static", "drawn", "best_first"}),
    launcher="medusa.py",
)
