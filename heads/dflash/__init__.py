"""DFlash: a block of tokens in one pass."""

from dataclasses import dataclass

from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import Method


@dataclass(frozen=True)
class DFlashOptions(BlockOptions):
    """The `head:` section of a recipe. A block of B slots drafts B - 1 tokens."""


METHOD = Method(
    __name__,
    options=":DFlashOptions",
    drafter="head:DFlashDrafter",
    formats="formats",
    layers=False,
    trees=frozenset({"static", "drawn", "best_first"}),
)
