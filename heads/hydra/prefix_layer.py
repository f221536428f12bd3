"""Hydra++'s prefix layer: one decoder layer over the target's last states, with a final norm.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 4. The state of position
t sees those of its own document up to t, which the target has all computed: nothing that is drafted passes through
here.

Shapes: B rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H hidden, N query heads,
G key/value heads, D head size, S slots.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.cache import KVCache, build_mask, llama_layer_shapes
from draftsmith.eval.decode.draft import NewTokens, chain_above, numbers
from draftsmith.heads.layers.decoder_layer import PlainLayer, RMSNorm, Rotary, attend, rotate
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.ttt_attention import ttt_attention

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PrefixLayer(nn.Module):
    """A Llama model of one layer without embeddings. Parameters: `layers.0.*` and `norm.weight`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([PlainLayer(config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Rotary(config)

    @torch.no_grad()
    def start(self, size: float) -> None:
        """Let a new layer give its states back, but for their norm: the layer adds nothing at first, and its outputs
        have the root mean square `size`, that of the target's states."""
        for last in (self._layer.self_attn.o_proj, self._layer.mlp.down_proj):
            nn.init.zeros_(last.weight)
        nn.init.constant_(self.norm.weight, size)

    def rows(self, batch: TrainBatch, needed_BL: Tensor) -> Tensor:
        """Return the outputs [R, H] of the rows marked in `needed_BL`, each having seen its document up to itself."""
        plan, layer = plan_rows(batch.document, needed_BL), self._layer
        last_BLH = batch.last.to(layer.self_attn.q_proj.weight.dtype)
        x_BLH = layer.input_layernorm(last_BLH)
        k_BLGD, v_BLGD = layer.self_attn.key_value(x_BLH)
        k_BLGD = rotate(k_BLGD, *self.rotary_emb(k_BLGD, batch.position))
        q_RND = layer.self_attn.query(x_BLH.flatten(0, 1)[plan.rows])
        cos, sin = (y[0] for y in self.rotary_emb(q_RND, batch.position.flatten()[plan.rows][None]))
        none = k_BLGD.new_empty(0, len(plan.rows), *k_BLGD.shape[2:])
        scale = layer.self_attn.head_dim**-0.5
        attended = ttt_attention(rotate(q_RND, cos, sin), k_BLGD, v_BLGD, none, none, plan, scale)
        return self.norm(layer.leave(attended, last_BLH.flatten(0, 1)[plan.rows]))

    def step(self, last_BnH: Tensor, position_Bn: Tensor, update: CacheUpdate, mask: Tensor | None) -> Tensor:
        """Return the outputs [B, n, H] of new states. update(k [B, G, n, D], v) stores keys and values and returns all
        of them; mask: bool [B, 1, n, S], True where a row may look, None for everywhere."""
        layer, N = self._layer, self.config.num_attention_heads
        last_BnH = last_BnH.to(layer.self_attn.q_proj.weight.dtype)
        turning, v = layer.self_attn.together(layer.input_layernorm(last_BnH))
        turned = rotate(turning, *self.rotary_emb(turning, position_Bn)).transpose(1, 2)
        q, k = turned.split((N, turned.shape[1] - N), 1)
        all_k, all_v = update(k, v.transpose(1, 2))
        attended = attend(q, all_k, all_v, mask)
        return self.norm(layer.leave(attended.transpose(1, 2), last_BnH))

    @property
    def _layer(self) -> PlainLayer:
        layer = self.layers[0]
        assert isinstance(layer, PlainLayer)
        return layer


class PrefixCache(KVCache):
    """The keys and values of a prefix layer for the sequences of a batch.

    Its entries are made of states that the target has computed, so no draft ever enters it.
    """

    def __init__(self, layer: PrefixLayer, rows: int, capacity: int, new_tokens: int) -> None:
        """capacity: most tokens of a sequence. new_tokens: most tokens that a round of several rows commits per row."""
        weight = layer.norm.weight
        # Behind the new tokens of the longest row there is padding, where another row has more of them.
        super().__init__(llama_layer_shapes(layer.config, 1, weight.dtype), rows, capacity + new_tokens, weight.device)
        self.prefix = layer

    def read(self, new_tokens: NewTokens, length_B: Tensor, longest: int, rows_b: Tensor | None = None) -> Tensor:
        """Run and append the states of new tokens, the last of which make a row `length_B` long; return the outputs [B,
        H] there. longest: an upper bound of where a row's new tokens begin, exact for a single row. rows_b: the rows
        that are read, None for all."""
        rows, count = new_tokens.tokens_Bn.shape
        self.rollback(length_B - new_tokens.count_B, rows_b)
        at = self.stage(count, rows_b, longest)
        mask = None
        if count > 1 or not at.single:
            above_BnT = chain_above(count, length_B.device).expand(rows, -1, -1)
            mask = build_mask(at.lengths_B, above_BnT, at.visible)
        position_Bn = at.lengths_B[:, None] + numbers(0, count, length_B.device)
        out_BnH = self.prefix.step(new_tokens.last_BnD, position_Bn, partial(self.write, 0), mask)
        self.append(new_tokens.count_B, rows_b)
        return out_BnH[numbers(0, rows, length_B.device), (new_tokens.count_B - 1).clamp(min=0)]
