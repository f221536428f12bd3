"""EAGLE-3 (Li et al. 2025)."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.fields import STEPS
from draftsmith.heads.eagle import DraftShape
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class Eagle3Options(DraftShape):
    """The `head:` section of a recipe. Dimensions left out are the target's."""

    TRAINING: ClassVar[frozenset[str]] = DraftShape.TRAINING | {"ttt_steps"}

    ttt_steps: int = field(default=7, metadata=STEPS)
    """How many steps of its own output the head is trained on (the paper's code uses 7)."""
    norm_output: bool = field(default=False, kw_only=True)
    """The state fed to the next step is the one after the final norm (EAGLE-3.1); llama.cpp cannot serve it."""

    @property
    def steps(self) -> int:
        """The steps that the head is trained on."""
        return self.ttt_steps


METHOD = own_method(
    __name__,
    ":Eagle3Options",
    "draftsmith.heads.eagle.base:EagleDrafter",
    trees=frozenset({"static", "drawn", "dynamic"}),
    launcher="eagle.py",
)
