"""The cost of training Medusa heads; symbols and rules as in heads/cost.py."""

from collections.abc import Sequence

from draftsmith.heads.cost import HeadCost
from draftsmith.heads.medusa.options import MedusaOptions


class MedusaCost(HeadCost):
    """Medusa: residual blocks on the last hidden state, and a projection onto the whole vocabulary."""

    options: MedusaOptions

    @property
    def steps(self) -> int:
        return self.options.num_heads

    @property
    def matrices(self) -> int:
        """A block's weight is [H, H]."""
        return self.options.num_heads * self.options.num_layers * self.target.hidden**2

    @property
    def others(self) -> int:
        """A block's bias [H], and with projections of their own [V, H] per head."""
        own = 0 if self.options.original_lm_head else self.target.vocab * self.target.hidden
        return self.options.num_heads * (self.options.num_layers * self.target.hidden + own)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On R_k rows of head k: blocks of 2*H*H (the first one's input needs no gradient) and logits of 2*H*V, whose
        backward pass leaves the weights out where they are the target's; the teacher's logits once on R rows."""
        H, V, blocks = self.target.hidden, self.target.vocab, self.options.num_layers
        per_row = (6 * blocks - 2) * H * H + (4 if self.options.original_lm_head else 6) * H * V
        return sum(rows) * per_row + 2 * H * V * max(rows)

    def attention_flops(self, positions: float, length: float) -> float:
        """Return 0: there is no attention."""
        return 0.0

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per row, head and block the input and what SiLU takes, in bf16; a projection of its own keeps its input."""
        own = 0 if self.options.original_lm_head else 2
        return sum(rows) * self.target.hidden * (4 * self.options.num_layers + own)
