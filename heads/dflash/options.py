"""The switches of a DFlash head, apart from the head so that reading a recipe imports no model code."""

from dataclasses import dataclass

from draftsmith.heads.block.options import BlockOptions


@dataclass(frozen=True)
class DFlashOptions(BlockOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's. A block of B slots drafts B - 1 tokens."""
