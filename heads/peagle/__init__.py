"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass."""

from dataclasses import dataclass, field
from typing import ClassVar

from draftsmith.errors import UserError
from draftsmith.fields import LAYERS, TOKEN_ID, within
from draftsmith.heads.eagle import DraftShape
from draftsmith.heads.registry import own_method


@dataclass(frozen=True)
class PEagleOptions(DraftShape):
    """The `head:` section of a recipe. Dimensions left out are the target's."""

    TRAINING: ClassVar[frozenset[str]] = DraftShape.TRAINING | {"depths", "keep", "keep_min"}
    ALWAYS_IN_FINGERPRINT: ClassVar = frozenset({"train_embeddings", "lm_head_rank", "hidden_size", "sliding_window"})
    """P-EAGLE came after these fields of `DraftShape`, so its first runs held them already."""

    depths: int = field(default=8, metadata=within(2, 8))
    """How many tokens the head is trained to draft at once, from 2 to 8; it drafts more where more are asked for, untrained."""
    num_hidden_layers: int = field(default=4, kw_only=True, metadata=LAYERS)
    """Decoder layers: the first reads tokens and states, those above it are plain Llama layers."""
    mask_token_id: int | None = field(default=None, kw_only=True, metadata=TOKEN_ID)
    """The token whose embedding stands for one that is not drafted yet; null: the target's padding token
    where that ends no text, one that its tokenizer reserves, or its first end token, the first of these that there is."""
    keep: float = field(default=0.7, kw_only=True, metadata=within(0, 1, "a share of rows", above=True))
    """Depth d is trained on a random keep**d of an answer's rows; 1 takes all of them."""
    keep_min: float = field(default=0.2, kw_only=True, metadata=within(0, 1, "a share of rows", above=True))
    """The smallest share of rows that a depth is trained on."""

    @property
    def steps(self) -> int:
        """The depths that the head is trained on."""
        return self.depths

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == 1.0 and self.keep_min != type(self).keep_min:
            raise UserError(
                f"head.keep_min is {self.keep_min}, but head.keep is 1, which takes all rows: leave it out."
            )


METHOD = own_method(
    __name__, ":PEagleOptions", "head:PEagleDrafter", trees=frozenset({"static", "drawn", "best_first"})
)
