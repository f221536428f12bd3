"""The cost of training Medusa-2: Medusa's heads, and the target itself with an adapter, forward and backward.

Symbols as in heads/cost.py; r the rank of the adapter.
"""

from collections.abc import Sequence

from draftsmith.errors import UserError
from draftsmith.heads.medusa.cost import MedusaCost
from draftsmith.heads.medusa2.options import Medusa2Options


class Medusa2Cost(MedusaCost):
    """Medusa-2, on a target with Llama's layers; experts, which are no linear layers, have no adapter.

    Leaves out the padding of the rows that documents are unpacked into: it depends on their lengths.
    """

    options: Medusa2Options

    @property
    def _adapted(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every layer with an adapter."""
        t = self.target
        H, ND, GD, FF = t.hidden, t.heads * t.head_dim, t.groups * t.head_dim, t.feed_forward
        sizes = {"q_proj": (H, ND), "k_proj": (H, GD), "v_proj": (H, GD), "o_proj": (ND, H)}
        if not t.experts:
            sizes |= {"gate_proj": (H, FF), "up_proj": (H, FF), "down_proj": (FF, H)}
        names = list(sizes) if self.options.target_modules is None else self.options.target_modules
        if unknown := [name for name in names if name not in sizes]:
            raise UserError(
                f"head.target_modules names {unknown[0]!r}, which the plan knows no size of: it knows {', '.join(sizes)}."
            )
        projection = [(H, t.vocab)] if self.options.tune_lm_head else []
        return [sizes[name] for name in names] * t.layers + projection

    @property
    def _adapter(self) -> int:
        """Parameters of the adapter: A [r, inputs] and B [outputs, r]."""
        return sum(self.options.lora_r * (inputs + outputs) for inputs, outputs in self._adapted)

    @property
    def tuned_parameters(self) -> int:
        """Weights that the tuned target has copies of, with the adapter merged."""
        return sum(inputs * outputs for inputs, outputs in self._adapted)

    @property
    def others(self) -> int:
        """Those of Medusa and the adapter, which AdamW always takes."""
        return super().others + self._adapter

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """Medusa's, where the first block's input now needs its gradient. On all P positions the target without its
        projection, whose weights need no gradient, and the adapter. The distribution of the tuned target on R_0 rows and the first
        token of each answer (R_0 - R_1 of them): logits, and the gradient of their input; the teacher's there too."""
        H, V = self.target.hidden, self.target.vocab
        body = self.target.active - H * V
        answers = rows[0] - rows[1] if len(rows) > 1 else 0.0
        probs = 4 * H * V * (rows[0] + answers) + 2 * H * V * answers
        tuned = (4 * body + 6 * self._adapter) * positions
        return super().product_flops(positions, rows) + 2 * H * H * sum(rows) + probs + tuned

    def attention_flops(self, positions: float, length: float) -> float:
        """Of the target: two products forward and five backward with what each token sees, half the text on average or
        the window."""
        t = self.target
        seen = sum(length / 2 if w is None or w >= length else w - w * w / (2 * length) for w in t.windows)
        return 7 * 2 * t.heads * t.head_dim * seen * positions

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Medusa's; the tuned target's distribution, its logarithm and the original's distribution in fp32 (12V) on the rows of
        `product_flops`, and the latter once more for the first tokens. Per position and layer of the target: the inputs of
        two norms in fp32 (8H), queries and the attention's output (4*N*D), keys and values (4*G*D), its log-sum-exp (4N),
        gate, up and their activation (6I). Per adapted layer its input in bf16, the mask of its dropout, and r values. The
        states before and after the final norm (8H)."""
        t, options = self.target, self.options
        answers = rows[0] - rows[1] if len(rows) > 1 else 0.0
        probs = t.vocab * (12 * (rows[0] + answers) + 4 * answers)
        attention = 4 * t.head_dim * (t.heads + t.groups) + 4 * t.heads
        layer = 8 * t.hidden + attention + 6 * t.feed_forward
        per_input = 3 if options.lora_dropout else 2
        adapter = sum(per_input * inputs + 2 * options.lora_r for inputs, _ in self._adapted)
        return super().saved_bytes(positions, rows) + probs + positions * (t.layers * layer + adapter + 8 * t.hidden)
