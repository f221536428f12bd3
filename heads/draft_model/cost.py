"""The cost of training a draft model.

Symbols and rules as in heads/cost.py, but H, I, N, G, D are the draft model's, M its layers, Ht the target's hidden size. All
its weights are trained, embeddings included, and it reads all P positions.
"""

from collections.abc import Sequence
from functools import cached_property
from math import gcd

from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.cost import HeadCost, flash_flops
from draftsmith.heads.draft_model.options import DraftLmOptions
from draftsmith.heads.draft_model.start import USUAL_LAYERS, read_llama
from draftsmith.heads.layers.config import check_heads
from draftsmith.target.pretrained import load_config


class DraftLmCost(HeadCost):
    """A Llama that reads tokens, with the sizes of the model that it starts from."""

    options: DraftLmOptions
    steps = 1

    @cached_property
    def config(self) -> LlamaConfig:
        """The sizes of the draft model."""
        o, t = self.options, self.target
        if o.init_from is not None:
            return _config_of(o.init_from)
        kept = o.layers_from_target
        H, D = o.hidden_size or t.hidden, o.head_dim or t.head_dim
        N = t.heads if kept else o.num_attention_heads or max(1, H // D)
        G = t.groups if kept else o.num_key_value_heads or gcd(N, t.groups)
        check_heads(N, G, D, H)
        return LlamaConfig(
            num_hidden_layers=len(kept) if kept else o.num_hidden_layers or USUAL_LAYERS,
            hidden_size=H,
            num_attention_heads=N,
            num_key_value_heads=G,
            head_dim=D,
            intermediate_size=o.intermediate_size or max(1, t.feed_forward * H // t.hidden),
            tie_word_embeddings=t.tied if o.tie_word_embeddings is None else o.tie_word_embeddings,
        )

    @property
    def query_heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        c = self.config
        return c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size

    @property
    def matrices(self) -> int:
        """Per layer q [N*D, H], k and v [G*D, H], o [H, N*D], gate and up [I, H], down [H, I]."""
        H, (ND, GD, FF) = self.config.hidden_size, self.widths
        return self.config.num_hidden_layers * H * (2 * ND + 2 * GD + 3 * FF)

    @property
    def others(self) -> int:
        """Two norms [H] per layer and the final one; embeddings [V, H], and an output projection where it is not tied."""
        c = self.config
        vocabularies = (1 if c.tie_word_embeddings else 2) * self.target.vocab
        return (2 * c.num_hidden_layers + 1 + vocabularies) * c.hidden_size

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """All layers on P positions, with both gradients; logits on R rows; the teacher's, once, without a backward
        pass."""
        V, R = self.target.vocab, max(rows)
        return 6 * self.matrices * positions + 6 * V * self.config.hidden_size * R + 2 * self.target.hidden * V * R

    def attention_flops(self, positions: float, length: float) -> float:
        """A flash kernel in every layer."""
        return self.config.num_hidden_layers * flash_flops(self.widths[0], positions, length)

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per position and layer: gate, up, their activation and product (8I); two norms' inputs in fp32, as they are and
        normalised (16H), and what five projections take, each a copy in bf16 (10H); queries, the attention's output, keys
        and values (4*N*D + 4*G*D), its log-sum-exp (4N), and the rotation of queries and keys (8D). The final norm's inputs
        per position (8H), the states with logits per row (2H)."""
        c, H, (ND, GD, FF) = self.config, self.config.hidden_size, self.widths
        layer = 8 * FF + 26 * H + 4 * ND + 4 * GD + 4 * c.num_attention_heads + 8 * c.head_dim
        return positions * (c.num_hidden_layers * layer + 8 * H) + max(rows) * 2 * H


def _config_of(path: str) -> LlamaConfig:
    """Return the configuration of a model in a folder or on the Hub. Raises UserError where there is none, and for a model that
    training would refuse."""
    try:
        config = load_config(path, what="the model")
        return read_llama(config, f"The model {path}", "take another one, or start from scratch")
    except UserError as error:
        raise UserError(f"head.init_from names a model whose sizes are not known: {error}") from error
