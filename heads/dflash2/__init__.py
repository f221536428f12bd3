"""DFlash2: DFlash with convolutions along the block and a choice among each slot's likeliest tokens by the one before."""

from dataclasses import dataclass, field

from draftsmith.errors import UserError
from draftsmith.fields import VOCABULARY, WIDTH, within
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class DFlash2Options(BlockOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's. A block of B slots drafts B - 1 tokens."""

    block_size: int = field(default=8, metadata=within(2, 1024, "a token and masks"))
    """Slots of a block in training; in drafting it is as long as the draft, the last token of the text before it."""
    conv_kernel_size: int = field(default=2, metadata=within(1, 64))
    """Slots that a convolution reads: the slot itself and those before it."""
    conv_group_size: int = field(default=16, metadata=WIDTH)
    """Channels that share a kernel; it divides the width of the target."""
    selector_rank: int = field(default=256, metadata=WIDTH)
    """Width of the two codebooks of the selector, each with a row for every token: often most of the head."""
    selector_top_k: int = field(default=16, metadata=VOCABULARY)
    """How many of a slot's likeliest tokens the selector chooses among."""
    sliding_window: int | None = field(default=None, metadata=within(2, 2**24))
    """How many positions a slot sees, its own the last of them, as engines count; null: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_window <= self.block_size:
            raise UserError(
                f"head.sliding_window is {self.sliding_window}, which a block of {self.block_size} slots fills: make it longer "
                "than head.block_size, or leave it out."
            )


METHOD = own_method(__name__, ":DFlash2Options", "head:DFlash2Drafter", trees=frozenset({"best_first"}))
