"""MTP: the layer for multi-token prediction that targets such as DeepSeek-V3, GLM-4.5 and Qwen3-Next come with."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from draftsmith.fields import LATER, STEPS, require
from draftsmith.heads.layers import LayerOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class MtpOptions(LayerOptions):
    """What an MTP head is made of. It reads the target's last hidden state, so it takes no aux layers."""

    TRAINING: ClassVar = frozenset({"mtp_steps", "step_keys"})
    ALIKE: ClassVar = {"target_state": (None, "after_norm", "vllm")}

    mtp_steps: int = field(default=3, metadata=STEPS)
    """How many steps of its own output the head is trained on: 1 trains what targets come with, FastMTP takes 3."""
    step_keys: bool = False
    """In training, the rows of a step see the keys that earlier rows have in that step, as in FastMTP's published code; false: those
    of the target's states and their own later ones, as in decoding."""
    qk_norm: bool = False
    """Queries and keys are normalised per head, as in Qwen3's layers."""
    layer: Literal["target"] | None = field(default=None, metadata=LATER)
    """The block: target is the decoder layer that transformers builds of the target's configuration, experts, compressed keys and
    values (MLA) and partial rotation included; null: a Llama layer, or that of the head which training starts from."""
    target_state: Literal["after_norm", "before_norm", "vllm"] | None = field(default=None, metadata=LATER)
    """The states that the head reads: those of the target behind its final norm and its own normed outputs, or those before both;
    vllm: as after_norm, but what vLLM makes of the first token and, in GLM-4 MoE, of its own outputs, so that drafts are those it
    serves; null: after_norm, or what `draftsmith import` measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.qk_norm or self.layer is None,
            "head.qk_norm",
            self.qk_norm,
            "the layer of head.layer target has what norms the target's have: leave it out",
        )
        require(
            not self.step_keys or self.mtp_steps > 1,
            "head.step_keys",
            self.step_keys,
            "head.mtp_steps is 1, whose keys are those of the target's states: leave it out",
        )


METHOD = own_method(
    __name__,
    ":MtpOptions",
    "draftsmith.heads.eagle.base:EagleDrafter",
    trees=frozenset({"static", "drawn", "dynamic"}),
    launcher="eagle.py",
)
