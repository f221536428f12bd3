"""The cost of training a draft model.

Symbols and rules as in heads/cost.py, but H, I, N, G, D are the draft model's, M its layers, Ht the target's hidden size. All
its weights are trained, embeddings included, and it reads all P positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from draftsmith.errors import UserError
from draftsmith.heads.draft_model.options import DraftLmOptions
from draftsmith.heads.draft_model.start import read_llama
from draftsmith.heads.target.pretrained import load_config
from draftsmith.heads.target.shape import TargetShape

USUAL_LAYERS = 2


@dataclass(frozen=True)
class DraftLmCost:
    """A Llama that reads tokens, with the sizes of the model that it starts from."""

    options: DraftLmOptions
    target: TargetShape

    aux_layers = 0
    steps = 1
    logit_bytes = 2
    """Autocast gives bf16 logits."""

    @property
    def draft_vocab(self) -> int:
        return self.target.vocab

    @property
    def _sizes(self) -> "_Sizes":
        o, t = self.options, self.target
        if o.init_from is not None:
            return _sizes_of(o.init_from)
        if o.layers_from_target is not None:
            sizes = (t.hidden, t.heads, t.groups, t.head_dim, t.feed_forward)
            return _Sizes(len(o.layers_from_target), *sizes, t.tied)
        H, D = o.hidden_size or t.hidden, o.head_dim or t.head_dim
        N = o.num_attention_heads or max(1, H // D)
        G = o.num_key_value_heads or gcd(N, t.groups)
        FF = o.intermediate_size or max(1, t.feed_forward * H // t.hidden)
        tied = t.tied if o.tie_word_embeddings is None else o.tie_word_embeddings
        return _Sizes(o.num_hidden_layers or USUAL_LAYERS, H, N, G, D, FF, tied)

    @property
    def matrices(self) -> int:
        """Per layer q [N*D, H], k and v [G*D, H], o [H, N*D], gate and up [I, H], down [H, I]."""
        s = self._sizes
        return s.layers * s.layer

    @property
    def others(self) -> int:
        """Two norms [H] per layer and the final one; embeddings [V, H], and an output projection where it is not tied."""
        s = self._sizes
        return (2 * s.layers + 1) * s.hidden + (1 if s.tied else 2) * self.target.vocab * s.hidden

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """All layers on P positions, with both gradients; logits on R rows; the teacher's, once, without a backward
        pass."""
        s, V, R = self._sizes, self.target.vocab, max(rows)
        return 6 * s.layers * s.layer * positions + 6 * V * s.hidden * R + 2 * self.target.hidden * V * R

    def attention_flops(self, positions: float, length: float) -> float:
        """A flash kernel in every layer: per position and key before it, L/2 on average, two products of 2*N*D forward and
        five backward."""
        s = self._sizes
        return s.layers * 7 * 2 * s.heads * s.head_dim * positions * length / 2

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per position and layer: gate, up, their activation and product (8I); two norms' inputs in fp32, as they are and
        normalised (16H), and what five projections take, each a copy in bf16 (10H); queries, the attention's output, keys
        and values (4*N*D + 4*G*D), its log-sum-exp (4N), and the turns of queries and keys (8D). The final norm's inputs
        per position (8H), the states with logits per row (2H)."""
        s = self._sizes
        ND, GD = s.heads * s.head_dim, s.groups * s.head_dim
        layer = 8 * s.intermediate + 26 * s.hidden + 4 * ND + 4 * GD + 4 * s.heads + 8 * s.head_dim
        return positions * (s.layers * layer + 8 * s.hidden) + max(rows) * 2 * s.hidden


@dataclass(frozen=True)
class _Sizes:
    """M, H, N, G, D, I, and whether embeddings and output projection are one."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    tied: bool

    @property
    def layer(self) -> int:
        """Weights of a layer's matrices."""
        ND, GD = self.heads * self.head_dim, self.groups * self.head_dim
        return self.hidden * (2 * ND + 2 * GD) + 3 * self.intermediate * self.hidden


def _sizes_of(path: str) -> _Sizes:
    """Return the sizes of a model in a folder or on the Hub from its config. Raises UserError where there is none, and for a
    model that training would refuse."""
    try:
        config = read_llama(
            load_config(path, what="the model"), f"The model {path}", "take another one, or start from scratch"
        )
    except UserError as error:
        raise UserError(f"head.init_from names a model whose sizes are not known: {error}") from error
    heads = config.num_attention_heads
    return _Sizes(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        config.num_key_value_heads or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.intermediate_size,
        bool(config.tie_word_embeddings),
    )
