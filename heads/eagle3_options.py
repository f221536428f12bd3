"""The switches of an EAGLE-3 head, apart from the head so that reading a recipe imports no model code."""

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.errors import UserError


@dataclass(frozen=True)
class Eagle3Options:
    """The `head:` section of a recipe. Dimensions left out are the target's."""

    TRAINING: ClassVar = frozenset({"ttt_steps", "train_lm_head", "train_embeddings"})
    NEUTRAL: ClassVar = {"train_embeddings": False, "lm_head_rank": None}
    """Fields that came later, at the values that change nothing: heads trained without them are not out of date."""

    layer_ids: list[int] | None = None
    """Aux layers to read: id k is the residual stream entering decoder layer k; null: (2, n//2, n-3)."""
    draft_vocab_size: int | None = None
    """W, how many of the target's tokens the head can draft; null: all of them."""
    ttt_steps: int = 7
    """How many steps of its own output the head is trained on (the paper's code uses 7)."""
    norm_before_residual: bool = False
    """The residual is the normalised hidden state instead of the raw one."""
    norm_before_fc: bool = False
    """One RMSNorm over all aux streams together before they are fused."""
    fc_norm: bool = False
    """One RMSNorm per aux stream before they are fused (EAGLE-3.1); llama.cpp cannot serve it."""
    norm_output: bool = False
    """The state fed to the next step is the one after the final norm (EAGLE-3.1); llama.cpp cannot serve it."""
    train_lm_head: bool = True
    """Train the output projection; false keeps it at the target's rows."""
    train_embeddings: bool = False
    """Train input embeddings of the head's own, which start as the target's; false shares the target's. They are stored
    and exported; SGLang and TensorRT-LLM take the target's all the same."""
    lm_head_rank: int | None = None
    """Rank of the output projection, which is then two thin matrices, multiplied out for engines; null: one full matrix."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer; null: the target's."""
    num_attention_heads: int | None = None
    """Query heads; null: the target's."""
    num_key_value_heads: int | None = None
    """Key/value heads; null: the target's."""
    head_dim: int | None = None
    """Size of a head; null: the target's."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise UserError("head.norm_before_fc and head.fc_norm are both true: choose one way to normalise.")
        if self.ttt_steps < 1:
            raise UserError(f"head.ttt_steps is {self.ttt_steps}: it must be at least 1.")
        if self.lm_head_rank is not None and self.lm_head_rank < 1:
            raise UserError(
                f"head.lm_head_rank is {self.lm_head_rank}: it must be at least 1, or null for a full matrix."
            )
        for name in ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"head.{name} is {value}: it must be at least 1, or null for the target's.")
