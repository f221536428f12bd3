"""The cost of training an EAGLE-3 head; symbols as in heads/cost.py, layers as in heads/eagle/cost.py."""

from collections.abc import Sequence

from draftsmith.heads.eagle.cost import FusedCost
from draftsmith.heads.eagle3.options import Eagle3Options


class Eagle3Cost(FusedCost):
    """EAGLE-3: the layers run K times (training-time test)."""

    options: Eagle3Options

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """Step 0; then on R rows, K - 1 times, all layers with the row's own keys and values; logits."""
        layers = self.first_width + 2 * self.key_width + self.above * (self.plain_width + self.key_width)
        later = (self.steps - 1) * max(rows) * 6 * layers
        return self.context_flops(positions, max(rows)) + later + self.logit_flops(rows)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Step 0; then per row and step all layers."""
        later = sum(self.layer_bytes(k + 1) + self.above * self.plain_bytes(k + 1) for k in range(1, self.steps))
        return self.context_bytes(positions, max(rows)) + max(rows) * later
