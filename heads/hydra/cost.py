"""The cost of training Hydra heads; symbols and rules as in heads/cost.py, i being a head's number."""

from collections.abc import Sequence

from draftsmith.heads.cost import HeadCost, flash_flops
from draftsmith.heads.hydra.options import HydraOptions


class HydraCost(HeadCost):
    """Hydra: residual blocks on the last hidden state and the tokens before, projections onto the whole vocabulary, and
    perhaps one decoder layer over the states."""

    options: HydraOptions

    @property
    def steps(self) -> int:
        return self.options.num_heads

    @property
    def _later(self) -> int:
        """Blocks of a head after its first that have weights of their own."""
        return min(self.options.num_layers - 1, 1) if self.options.tie_blocks else self.options.num_layers - 1

    @property
    def matrices(self) -> int:
        """Two of [H, (i + 2) * H] in a head's first block, [H, H] in the others; q [N*D, H], k and v [G*D, H], o [H, N*D],
        gate and up [I, H], down [H, I] of the prefix layer."""
        H, (ND, GD, FF) = self.target.hidden, self.widths
        blocks = sum(2 * (i + 2) + self._later for i in range(self.steps)) * H * H
        return blocks + self.options.prefix_attention * H * (2 * ND + 2 * GD + 3 * FF)

    @property
    def others(self) -> int:
        """Biases [H], two of a first block and one of the others; with projections of their own [V, H] per head, and a
        bias [V]; the prefix layer's three norms [H]."""
        H, V, o = self.target.hidden, self.target.vocab, self.options
        per_head = (2 + self._later) * H + V * ((not o.original_lm_head) * H + o.lm_head_bias)
        return self.steps * per_head + o.prefix_attention * 3 * H

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On R_i rows of head i: the first block's two products of 2*(i + 2)*H*H, whose input needs a gradient only where
        the prefix layer makes it, the others' of 2*H*H, and logits of 2*H*V, whose backward pass leaves the weights out
        where they are the target's; the teacher's logits once on R rows. In the prefix layer keys and values on all P
        positions, the rest on R rows."""
        H, V, o, R = self.target.hidden, self.target.vocab, self.options, max(rows)
        first, logits = (6 if o.prefix_attention else 4), (4 if o.original_lm_head else 6)
        blocks = sum(r * (2 * first * (i + 2) + 6 * (o.num_layers - 1)) for i, r in enumerate(rows)) * H * H
        heads = blocks + logits * H * V * sum(rows) + 2 * H * V * R
        if not o.prefix_attention:
            return heads
        ND, GD, FF = self.widths
        return heads + 12 * H * GD * positions + 6 * (2 * ND * H + 3 * FF * H) * R

    def attention_flops(self, positions: float, length: float) -> float:
        """The prefix layer's."""
        return self.options.prefix_attention * flash_flops(self.widths[0], positions, length)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per row and head i, in bf16: what the first block reads, once for each of its products, (i + 2)*H wide; what the
        other blocks and an own projection read; what SiLU takes. Where there is dropout, a byte for each number that it
        may drop on a way back to a parameter. Of the prefix layer per row gate, up, their activation and product (8I),
        norms, inputs and residuals (20H), the attention's query and output (4*N*D) and log-sum-exp (4N); per position once
        norm and inputs (8H), keys and values (8*G*D)."""
        H, o = self.target.hidden, self.options
        own = 0 if o.original_lm_head else 2
        saved = 0.0
        for i, r in enumerate(rows):
            reads = 4 * (i + 2) + 2 * (o.num_layers - 1) + 2 * o.num_layers + own
            drops = (i + 2) * o.prefix_attention + o.num_layers
            saved += r * H * (reads + (o.dropout > 0) * drops)
        if not o.prefix_attention:
            return saved
        ND, GD, FF = self.widths
        return saved + max(rows) * (8 * FF + 20 * H + 4 * ND + 4 * self.query_heads) + positions * (8 * H + 8 * GD)
