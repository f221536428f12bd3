"""DFlash: a block of tokens in one pass."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import LATER, within
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class DFlashOptions(BlockOptions):
    """The `head:` section of a recipe. A block of B slots drafts B - 1 tokens."""

    TRAINING: ClassVar = BlockOptions.TRAINING | {"variable_prefix", "prefix_base"}

    variable_prefix: int | None = field(default=None, metadata=LATER | within(1, 1022))
    """How many tokens the block drafts before it is filled in once more with these in place of masks, for the rest of the draft; null:
    it is filled in once. Training shows blocks with so many of the text's tokens as is drawn, too."""
    prefix_base: float = field(default=0.9, metadata=LATER | within(0, 1, above=True))
    """A block with l of the text's tokens, the first included, is drawn with a probability in proportion to this to the power of l."""

    @property
    def chains_alone(self) -> str:
        """What a head drafts no trees for, if anything: behind a prefix each path has tokens of its own."""
        return "" if self.variable_prefix is None else "head.variable_prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variable_prefix is None and self.prefix_base != 0.9:
            raise UserError(
                f"head.prefix_base is {self.prefix_base}, but head.variable_prefix is null, so that no prefix is drawn: set that, or leave "
                "it out."
            )
        if self.variable_prefix is not None and self.variable_prefix >= self.block_size - 1:
            raise UserError(
                f"head.variable_prefix is {self.variable_prefix}, but a block of {self.block_size} slots drafts {self.block_size - 1} tokens, "
                "none of them behind such a prefix: make it smaller, or leave it out."
            )


METHOD = own_method(
    __name__, ":DFlashOptions", "head:DFlashDrafter", trees=frozenset({"static", "drawn", "best_first"})
)
