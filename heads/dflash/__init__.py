"""DFlash: a block of tokens in one pass."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:DFlashOptions",
    drafter="draftsmith.heads.block.drafter:DFlashDrafter",
    cost="cost:DFlashCost",
    formats="formats",
    trees=frozenset({"static", "drawn"}),
)
