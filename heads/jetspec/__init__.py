"""JetSpec: DFlash with slots that see no slot behind them."""

from dataclasses import dataclass

from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class JetSpecOptions(BlockOptions):
    """The `head:` section of a recipe. A block of B slots drafts B - 1 tokens."""


METHOD = own_method(
    __name__,
    ":JetSpecOptions",
    "draftsmith.heads.dflash.head:DFlashDrafter",
    trees=frozenset({"static", "drawn", "best_first"}),
)
