"""The cost of training a DSpark head; symbols as in heads/block/cost.py."""

from collections.abc import Sequence

from draftsmith.heads.block.cost import BlockCost
from draftsmith.heads.dspark.options import DSparkOptions


class DSparkCost(BlockCost):
    """DSpark: every slot drafts, with a bias of low rank and perhaps a confidence."""

    options: DSparkOptions

    @property
    def steps(self) -> int:
        return self.options.block_size

    @property
    def others(self) -> int:
        """As DFlash's; also the embedding [V, r] of the token before, the bias' projection [W, r], and the confidence's
        [1, H + r] with its offset."""
        r, confidence = self.options.markov_rank, self.options.confidence_head
        return super().others + (self.target.vocab + self.draft_vocab) * r + confidence * (self.target.hidden + r + 1)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """As DFlash's; also 2*r*W of the bias and 2*(H + r) of the confidence, on R_k rows of step k."""
        r, confidence = self.options.markov_rank, self.options.confidence_head
        each = 6 * (r * self.draft_vocab + confidence * (self.target.hidden + r))
        return super().product_flops(positions, rows) + each * sum(rows)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """As DFlash's; also the inputs of bias and confidence."""
        r, confidence = self.options.markov_rank, self.options.confidence_head
        return super().saved_bytes(positions, rows) + sum(rows) * (2 * r + confidence * 2 * (self.target.hidden + r))
