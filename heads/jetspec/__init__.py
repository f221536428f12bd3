"""JetSpec: DFlash with slots that see no slot behind them."""

from dataclasses import dataclass

from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import Method


@dataclass(frozen=True)
class JetSpecOptions(BlockOptions):
    """The `head:` section of a recipe. A block of B slots drafts B - 1 tokens."""


METHOD = Method(
    __name__,
    options=":JetSpecOptions",
    drafter="draftsmith.heads.dflash.head:DFlashDrafter",
    formats="formats",
    layers=False,
    trees=frozenset({"static", "drawn", "best_first"}),
)
