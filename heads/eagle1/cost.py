"""The cost of training an EAGLE-1 or HASS head; symbols and rules as in heads/cost.py."""

from collections.abc import Sequence

from draftsmith.heads.cost import HeadCost, flash_flops
from draftsmith.heads.eagle1.options import Eagle1Options


class Eagle1Cost(HeadCost):
    """EAGLE-1: the projection of [embedding, state], one layer run K times (aligned passes), the target's projection."""

    options: Eagle1Options
    logit_bytes = 4

    @property
    def steps(self) -> int:
        return self.options.aligned_passes

    @property
    def matrices(self) -> int:
        """fc [H, 2H]; q [N*D, H], k and v [G*D, H], o [H, N*D]; gate and up [I, H], down [H, I]."""
        H, (ND, GD, FF) = self.target.hidden, self.widths
        return 2 * H * H + H * (ND + 2 * GD) + ND * H + 3 * FF * H

    @property
    def others(self) -> int:
        """The layer's one norm [H]; biases of fc [H] and of q, k and v."""
        H, (ND, GD, _) = self.target.hidden, self.widths
        return H + self.options.fc_bias * H + self.options.qkv_bias * (ND + 2 * GD)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On all P positions: fc (forward and its weights' gradient), keys and values of step 0. On R rows, K times: fc,
        q, o and the feed-forward layer; the row's own keys and values from step 1 on. An output that is no given of the
        next step takes fc's other gradient, too. Logits on R_k rows, without gradients of weights; the teacher's, once
        on R rows, without a backward pass."""
        H, (ND, GD, FF), V, K = self.target.hidden, self.widths, self.target.vocab, self.steps
        R, flowing = max(rows), 0 if self.options.detach_passes else 4 * H * H
        fused = (8 * H * H + 12 * H * GD) * positions
        layer = K * R * (8 * H * H + 6 * (2 * ND * H + 3 * FF * H)) + (K - 1) * R * (12 * H * GD + flowing)
        return fused + layer + 4 * H * V * sum(rows) + 2 * H * V * R

    def attention_flops(self, positions: float, length: float) -> float:
        """In every step a kernel takes the whole texts. A row's own keys, one per step, are left out."""
        return self.steps * flash_flops(self.widths[0], positions, length)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per row and step: gate, up, their activation and product (8I), the inputs of fc, the layer, the norm and the
        projections (16H), feature and state of the feature loss in fp32 (8H), the attention's query and output (4*N*D) and
        log-sum-exp (4N), and the row's own keys and values, gathered anew at each step. Per position once: the inputs of
        fc and of the layer (6H), keys and values (8*G*D)."""
        H, (ND, GD, FF), K = self.target.hidden, self.widths, self.steps
        per_row = sum(8 * FF + 24 * H + 4 * ND + 4 * self.query_heads + 4 * GD * (k + 1) for k in range(K))
        return max(rows) * per_row + positions * (6 * H + 8 * GD)
