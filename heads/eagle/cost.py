"""Costs that EAGLE's drafters share in training.

Symbols and rules as in heads/cost.py; Ht target hidden, H draft hidden, M decoder layers of the draft. With several layers,
step 0 runs all but the last over all tokens that a row may see (P of them, except the last two of a text), for the keys of
the layers above.
"""

from collections.abc import Sequence

from draftsmith.heads.cost import HeadCost, flash_flops
from draftsmith.heads.eagle.options import DraftShape


class FusedCost(HeadCost):
    """Costs that EAGLE-3 and P-EAGLE share: one fused projection, and layers of which the first reads tokens too."""

    options: DraftShape

    @property
    def steps(self) -> int:
        return self.options.steps

    @property
    def hidden(self) -> int:
        """H."""
        return self.options.hidden_size or self.target.hidden

    @property
    def above(self) -> int:
        """M - 1: plain layers."""
        return self.options.num_hidden_layers - 1

    @property
    def first_width(self) -> int:
        """Weights of q and o and of the feed-forward layer in the first layer: q [N*D, 2H], o [H, N*D], 3 of [I, H]."""
        return self.plain_width + self.hidden * self.widths[0]

    @property
    def plain_width(self) -> int:
        """The same in a plain layer, whose q is [N*D, H]."""
        H, (ND, _, FF) = self.hidden, self.widths
        return 2 * H * ND + 3 * FF * H

    @property
    def key_width(self) -> int:
        """Weights of k and v in a plain layer, two of [G*D, H]; in the first one twice as many."""
        return 2 * self.hidden * self.widths[1]

    @property
    def matrices(self) -> int:
        """fc [H, A*Ht], and the layers."""
        layers = self.first_width + 2 * self.key_width + self.above * (self.plain_width + self.key_width)
        return self.aux_layers * self.target.hidden * self.hidden + layers

    @property
    def others(self) -> int:
        """Norms of width H: three in the first layer, two in the others, the final one; before fc one of A*Ht or A of Ht;
        lm_head; where they are trained, the embeddings [V, H]."""
        o, H, A = self.options, self.hidden, self.aux_layers
        norms = (4 + 2 * self.above) * H + A * self.target.hidden * (o.norm_before_fc + o.fc_norm)
        return norms + o.train_lm_head * self.projection + o.train_embeddings * self.target.vocab * H

    @property
    def projection(self) -> int:
        """The weights of lm_head, [W, H] or of low rank [r, H] and [W, r]: a product with them takes twice as many FLOPs."""
        H, W, rank = self.hidden, self.draft_vocab, self.options.lm_head_rank
        return W * H if rank is None else rank * (W + H)

    def context_flops(self, positions: float, first_rows: float) -> float:
        """Step 0. On all P positions: fc (forward and its weights' gradient, its input's where there is a norm before it),
        keys and values of every layer, and the whole of all layers but the last, which runs on R rows."""
        products = 6 if self.options.norm_before_fc or self.options.fc_norm else 4
        fused = products * self.aux_layers * self.target.hidden * self.hidden + 12 * self.key_width
        if not self.above:
            return fused * positions + 6 * self.first_width * first_rows
        lower = 6 * (self.first_width + (self.above - 1) * self.plain_width + self.above * self.key_width)
        return (fused + lower) * positions + 6 * self.plain_width * first_rows

    def logit_flops(self, rows: Sequence[float]) -> float:
        """Logits on R_k rows; the teacher's, once on R rows, without a backward pass."""
        trained = 6 if self.options.train_lm_head else 4
        return trained * self.projection * sum(rows) + 2 * self.target.hidden * self.draft_vocab * max(rows)

    def attention_flops(self, positions: float, length: float) -> float:
        """In every step of every layer a kernel takes the whole texts, within the sliding window if there is one. A row's own
        keys, one per step, are left out."""
        whole = self.steps * flash_flops(self.widths[0], positions, length) * (1 + self.above)
        window = self.options.sliding_window
        if window is None or window >= length:
            return whole
        return whole * (window - window**2 / (2 * length)) / (length / 2)

    def layer_bytes(self, steps: int) -> int:
        """Per row of the first layer: gate, up, their activation and product (8I), norms, inputs and residuals (40H), the
        attention's query and output (4*N*D) and log-sum-exp (4N), and the row's own keys and values of so many steps."""
        ND, GD, FF = self.widths
        return 8 * FF + 40 * self.hidden + 4 * ND + 4 * self.query_heads + 4 * GD * steps

    def plain_bytes(self, steps: int) -> int:
        """The same of a plain layer, which has one norm less and half the input (19H less)."""
        return self.layer_bytes(steps) - 19 * self.hidden

    def context_bytes(self, positions: float, first_rows: float) -> float:
        """Step 0. Per position: the fused streams (2A*Ht), norms and inputs (18H), keys and values (8*G*D) of every layer,
        and the whole of all layers but the last, which runs on R rows."""
        H, (_, GD, _) = self.hidden, self.widths
        once = positions * (18 * H + 2 * self.aux_layers * self.target.hidden + 8 * GD)
        if not self.above:
            return once + first_rows * self.layer_bytes(1)
        lower = self.layer_bytes(0) - 8 * H + (self.above - 1) * self.plain_bytes(0) + self.above * 8 * GD
        return once + positions * lower + first_rows * self.plain_bytes(1)
