"""The cost of training a P-EAGLE head; symbols and rules as in heads/cost.py."""

from collections.abc import Sequence

from draftsmith.heads.eagle.cost import FusedCost
from draftsmith.heads.peagle.options import PEagleOptions


class PEagleCost(FusedCost):
    """P-EAGLE: the layers run once over all depths, and deeper ones learn from fewer rows."""

    options: PEagleOptions

    @property
    def others(self) -> int:
        """As in EAGLE-3, and `mask_hidden` [A*Ht]."""
        return super().others + self.aux_layers * self.target.hidden

    def learned_rows(self, rows: Sequence[float]) -> list[float]:
        """The rows of each depth that are kept, at most those kept at the depth before."""
        kept, found = 1.0, []
        for depth, count in enumerate(rows):
            kept = min(kept, max(self.options.keep**depth, self.options.keep_min)) if depth else 1.0
            found.append(count * kept)
        return found

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """Depth 0 as EAGLE-3's step 0. On the rows of deeper ones all layers, but the first one's projections, whose input
        is the same in every row."""
        first = self.first_width - 2 * self.hidden * self.widths[0]
        layers = first + self.above * (self.plain_width + self.key_width)
        later = sum(rows[1:]) * 6 * layers
        return self.context_flops(positions, rows[0]) + later + self.logit_flops(rows)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Depth 0 as EAGLE-3's step 0; then per row and depth all layers, the first one without norms and inputs (28H less)."""
        later = 0.0
        for depth, count in enumerate(rows[1:], 1):
            layers = self.layer_bytes(depth + 1) - 28 * self.hidden + self.above * self.plain_bytes(depth + 1)
            later += count * layers
        return self.context_bytes(positions, rows[0]) + later
