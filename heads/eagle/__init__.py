"""What EAGLE-1, EAGLE-3 and P-EAGLE share; here the switches of the last two, since nothing here may import model code."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import LATER, LAYER_IDS, LAYERS, TOKENS, VOCABULARY, WIDTH
from draftsmith.heads.layers import LayerOptions


@dataclass(frozen=True)
class DraftShape(LayerOptions):
    """The common part of the `head:` section. Dimensions left out are the target's."""

    TRAINING: ClassVar[frozenset[str]] = frozenset({"train_lm_head", "train_embeddings"})

    layer_ids: list[int] | None = field(default=None, metadata=LAYER_IDS)
    """Aux layers to read: id k is the residual stream entering decoder layer k; null: (2, n//2, n-3)."""
    draft_vocab_size: int | None = field(default=None, metadata=VOCABULARY)
    """W, how many of the target's tokens the head can draft; null: all of them."""
    norm_before_residual: bool = field(default=False, kw_only=True)
    """The residual of the first layer is the normalised hidden state instead of the raw one."""
    norm_before_fc: bool = field(default=False, kw_only=True)
    """One RMSNorm over all aux streams together before they are fused."""
    fc_norm: bool = field(default=False, kw_only=True)
    """One RMSNorm per aux stream before they are fused (EAGLE-3.1); llama.cpp cannot serve it."""
    train_lm_head: bool = field(default=True, kw_only=True)
    """Train the output projection; false keeps it as it is: the target's rows, or those of the head that it starts from."""
    train_embeddings: bool = field(default=False, kw_only=True, metadata=LATER)
    """Train input embeddings of the head's own, which start as the target's; false shares the target's, or keeps those that
    the head it starts from has of its own. Those are stored and exported; SGLang and TensorRT-LLM take the target's all
    the same, unless head.hidden_size is another width."""
    lm_head_rank: int | None = field(default=None, kw_only=True, metadata=LATER | WIDTH)
    """Rank of the output projection, which is then two thin matrices, multiplied out for engines; null: one full matrix."""
    num_hidden_layers: int = field(default=1, kw_only=True, metadata=LATER | LAYERS)
    """Decoder layers: the first reads tokens and states, those above it are plain Llama layers; llama.cpp, SGLang and
    TensorRT-LLM serve one."""
    hidden_size: int | None = field(default=None, kw_only=True, metadata=LATER | WIDTH)
    """Width of the draft; null: the target's. With another one nothing of the target's can be taken over: embeddings and
    output projection start from nothing and must both be trained."""
    sliding_window: int | None = field(default=None, kw_only=True, metadata=LATER | TOKENS)
    """How many tokens a row of the draft sees, itself the last of them, and drafts have at most; null: all so far. vLLM
    serves it."""

    @property
    def steps(self) -> int:
        """The steps (or depths) that the head is trained on."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise UserError("head.norm_before_fc and head.fc_norm are both true: choose one way to normalise.")

    def check_adopted(self) -> None:
        """Raise UserError where the steps do not fit into the sliding window; of a head that exists, its size counts."""
        if self.sliding_window is not None and self.sliding_window < self.steps:
            raise UserError(
                f"head.sliding_window is {self.sliding_window}, less than the {self.steps} tokens of a draft: choose a larger "
                "one, or null."
            )
