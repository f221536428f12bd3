"""Domino: a block in one pass, then a correction of each token's logits by all that the block has drafted before it."""

from dataclasses import dataclass, field

from draftsmith.errors import UserError
from draftsmith.fields import WIDTH, within
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class DominoOptions(BlockOptions):
    """The `head:` section of a recipe. Dimensions left out are the target's. A block of B slots drafts B tokens, or B - 1 without
    head.shift_label."""

    gru_hidden_dim: int = field(default=1024, metadata=WIDTH)
    """Width of the GRU that reads the drafted tokens."""
    emb_dim: int = field(default=256, metadata=WIDTH)
    """Rank of the correction of the logits."""
    pure_draft_prefix_len: int = field(default=1, metadata=within(0, 1023))
    """How many of a draft's first tokens are not corrected. SGLang takes 1 alone."""
    shift_label: bool = True
    """Each slot predicts the token behind its place, so that the first drafts too; false: the token at its place, as in DFlash."""

    @property
    def drafted(self) -> int:
        """How many tokens a block drafts."""
        return self.block_size - (not self.shift_label)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pure_draft_prefix_len >= self.drafted:
            raise UserError(
                f"head.pure_draft_prefix_len is {self.pure_draft_prefix_len}, but a block of {self.block_size} slots drafts "
                f"{self.drafted} tokens, none of which would be corrected: make it smaller, or train dflash."
            )


METHOD = own_method(__name__, ":DominoOptions", "head:DominoDrafter")
