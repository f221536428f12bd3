"""The cost of training a DFlash head; symbols as in heads/block/cost.py."""

from draftsmith.heads.block.cost import BlockCost
from draftsmith.heads.dflash import DFlashOptions


class DFlashCost(BlockCost):
    """DFlash: every slot but the first drafts, by the target's projection."""

    options: DFlashOptions

    @property
    def steps(self) -> int:
        return self.options.block_size - 1
