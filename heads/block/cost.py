"""The cost of training a block drafter.

Symbols and rules as in heads/cost.py; S slots of a block, M layers, r the rank of DSpark's bias.
"""

from collections.abc import Sequence

from draftsmith.heads.block.options import BlockOptions
from draftsmith.heads.cost import HeadCost, flash_flops


class BlockCost(HeadCost):
    """Costs that DFlash and DSpark share: fused streams as the context of a few layers, and blocks of S slots."""

    options: BlockOptions
    logit_bytes = 4

    def learned_rows(self, rows: Sequence[float]) -> list[float]:
        """The rows of a text's anchors, drawn from those of step 0."""
        share = min(1.0, self.options.anchors / rows[0]) if rows[0] else 1.0
        return [share * count for count in rows]

    @property
    def matrices(self) -> int:
        """fc [H, A*H]; per layer q [N*D, H], k and v [G*D, H], o [H, N*D], gate and up [I, H], down [H, I]."""
        H, (ND, GD, FF) = self.target.hidden, self.widths
        return self.aux_layers * H * H + self.options.num_layers * H * (2 * ND + 2 * GD + 3 * FF)

    @property
    def others(self) -> int:
        """Two norms [H], and per layer two of [H] and two of [D]."""
        H = self.target.hidden
        return 2 * H + self.options.num_layers * 2 * (H + self.head_size)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On all P positions: fc (forward and its weights' gradient), and each layer's keys and values. On S slots of each
        of the R blocks: the layers' products. Logits of 2*H*W on R_k rows of step k, forward and for their input; the
        teacher's once on R rows (where anchors are few, on more of them than that, up to one per slot)."""
        H, W, (ND, GD, FF) = self.target.hidden, self.draft_vocab, self.widths
        M, S, R = self.options.num_layers, self.options.block_size, max(rows)
        context = (4 * self.aux_layers * H * H + 12 * M * GD * H) * positions
        blocks = 6 * M * H * (2 * ND + 2 * GD + 3 * FF) * S * R
        return context + blocks + 4 * H * W * sum(rows) + 2 * H * W * R

    def attention_flops(self, positions: float, length: float) -> float:
        """In every layer each slot is a query head of its own to a flash kernel. A block's own keys are left out."""
        return self.options.num_layers * self.options.block_size * flash_flops(self.widths[0], positions, length)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """In bf16, and fp32 inside norms. Per position the streams (2*A*H) and the fused state with its norm (10*H); per
        layer what keys and values read (4*H), the keys' norm and rotation, and values (10*G*D). Per slot of a block and
        layer two norms and what they read (20*H), what q, k, v, o, gate, up and down read; gate, up, their activation and
        product (8*I); queries with norm and rotation and the attention's output (12*N*D), keys and values (10*G*D), the
        attention's log-sum-exp (4*N). Per row and step the state that makes logits (16*H)."""
        H, (ND, GD, FF) = self.target.hidden, self.widths
        M, S, R = self.options.num_layers, self.options.block_size, max(rows)
        context = positions * (2 * self.aux_layers * H + 10 * H + M * (4 * H + 10 * GD))
        blocks = R * S * M * (26 * H + 8 * FF + 12 * ND + 10 * GD + 4 * self.query_heads)
        return context + blocks + 16 * H * sum(rows)
