"""DSpark: a block in one pass, with a Markov bias and a confidence."""

from dataclasses import dataclass, field

from draftsmith.fields import WIDTH, within
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class DSparkOptions(BlockOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's. A block of B slots drafts B tokens."""

    block_size: int = field(default=7, metadata=within(2, 1024, "a token and masks"))
    """Slots of a block, each of which drafts a token: the last token of the text and, behind it, masks."""
    markov_rank: int = field(default=256, metadata=WIDTH)
    """Rank of the bias that the token before a slot adds to its logits."""
    confidence_head: bool = True
    """A further output per slot says how likely its token is to be accepted, those before it being so; drafts can then end
    early, see evaluate.drafts."""


METHOD = own_method(__name__, ":DSparkOptions", "head:DSparkDrafter")
