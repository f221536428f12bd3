"""XPress: a block in one pass, then a small network along its slots that adds to each token's logits what those before it say."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.fields import WIDTH, within
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class XPressOptions(BlockOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's. A block of B slots drafts B - 1 tokens."""

    TRAINING: ClassVar = BlockOptions.TRAINING | {"free_rounds"}

    xpress_rank: int = field(default=256, metadata=WIDTH)
    """Width of the network; its two tables have a row of it for every token, often most of the head."""
    xpress_mlp_hidden: int = field(default=512, metadata=WIDTH)
    """Width of its feed-forward part."""
    free_rounds: int = field(default=3, metadata=within(1, 16))
    """Rounds of a training pass in which the network reads its own guesses in place of the text, first those of the logits that it adds
    to, then those of the round before."""


METHOD = own_method(__name__, ":XPressOptions", "head:XPressDrafter")
