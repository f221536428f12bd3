"""Medusa-2: Medusa heads with a target that is tuned with them."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import WIDTH, within
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.registry import Method


@dataclass(frozen=True)
class Medusa2Options(MedusaOptions):
    """The `head:` section of a recipe: Medusa's heads, and the adapter (LoRA) that tunes the target with them."""

    WARM_FROM: ClassVar[tuple[str, ...]] = ("medusa",)
    """Other methods whose heads `train.warm_start` may name: the adapter then starts from nothing."""
    TRAINING: ClassVar = frozenset({"lora_dropout", "adapter_lr"})
    """Fields that a head which training starts from need not share."""

    lora_r: int = field(default=32, metadata=WIDTH)
    """Rank of the adapter."""
    lora_alpha: float = field(default=16.0, metadata=within(0, 10**6, above=True))
    """The adapter's change of a matrix is scaled by lora_alpha / lora_r."""
    lora_dropout: float = field(default=0.05, metadata=within(0, 1, below=True))
    """Dropout of the adapter's input, but for the output projection's."""
    target_modules: list[str] | None = None
    """Names of the target's linear layers that the adapter changes, such as q_proj; null takes all of them but the output
    projection. Experts that are fused into one weight are none."""
    tune_lm_head: bool = False
    """The adapter changes the output projection (lm_head), too; not where that is tied to the embeddings."""
    adapter_lr: float = field(default=0.25, metadata=within(0, 10**6, above=True))
    """Learning rate of the adapter as a multiple of train.lr (the paper: 5e-4 beside 2e-3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_modules == []:
            raise UserError("head.target_modules is []: name linear layers of the target, or null for all of them.")


METHOD = Method(
    __name__,
    options=":Medusa2Options",
    drafter="draftsmith.heads.medusa.head:MedusaDrafter",
    trees=frozenset({"static", "drawn", "best_first"}),
    served_as="medusa",
    launcher="medusa.py",
)
