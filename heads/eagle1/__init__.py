"""EAGLE-1 (Li et al. 2024) and HASS."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import STEPS, TOKENS, within
from draftsmith.heads.layers import LayerOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class Eagle1Options(LayerOptions):
    """What an EAGLE-1 head is made of. It reads the target's last hidden state, so it takes no aux layers."""

    TRAINING: ClassVar = frozenset({"noise", "noise_length", "aligned_passes", "detach_passes"})

    noise: float = field(default=0.1, metadata=within(0, 1000))
    """In training the target's states get noise between -noise and noise, equally likely; 0: none."""
    noise_length: int | None = field(default=None, metadata=TOKENS)
    """The noise is noise_length / tokens of the text as large (EAGLE's code: 512); null: the same for any length."""
    aligned_passes: int = field(default=1, metadata=STEPS)
    """How many steps of its own output the head is trained on: 1 is EAGLE-1, HASS takes 3."""
    detach_passes: bool = True
    """A step's output is a given for the next one (HASS); false: gradients flow through it."""
    fc_bias: bool = False
    """The projection of [embedding, hidden] has a bias, as in the first published heads; vLLM drops it in silence."""
    qkv_bias: bool = False
    """Query, key and value projections have biases, as in published heads for Qwen2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_length is not None and not self.noise:
            raise UserError(f"head.noise_length is {self.noise_length}, but head.noise is 0: leave it out.")
        if not self.detach_passes and self.aligned_passes == 1:
            raise UserError(
                "head.detach_passes is false, but head.aligned_passes is 1, with nothing to detach: leave it out."
            )


METHOD = own_method(
    __name__,
    ":Eagle1Options",
    "draftsmith.heads.eagle.base:EagleDrafter",
    trees=frozenset({"static", "drawn", "dynamic"}),
    launcher="eagle.py",
)
