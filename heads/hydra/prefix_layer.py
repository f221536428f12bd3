"""One decoder layer over the target's last states, with a final norm: what Hydra++ reads in place of a single state.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 4. The state of position t
sees those of its own document up to t, which the target has all computed: nothing that is drafted passes through here.

Shapes: B rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H hidden, N query heads,
G key/value heads, D head size, S slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.cache import WriteRange, build_mask
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
        """Let a new layer give its states back, but for their norm: the layer adds nothing at first, and its outputs have the
        root mean square `size`, that of the target's states."""
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


class PrefixCache:
    """The keys and values of a prefix layer for a batch of sequences that are decoded.

    They are all of states that the target has computed, so no draft is ever taken back.
    """

    def __init__(self, layer: PrefixLayer, rows: int, capacity: int, new_tokens: int) -> None:
        """rows, capacity: sequences and their most tokens. fresh: most tokens that a round of several rows brings."""
        weight, config = layer.norm.weight, layer.config
        # Behind the fresh tokens of the longest row there is padding, where those of another row are more.
        shape = (rows, config.num_key_value_heads, capacity + new_tokens, config.head_dim)
        self._layer = layer
        self._keys, self._values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def read(self, new_tokens: NewTokens, length_B: Tensor, first: int, rows_b: Tensor | None = None) -> Tensor:
        """Run the states of fresh tokens, the last of which belong to position length - 1; return the outputs [B, H] there.

        first: no row's fresh tokens begin behind this slot; a single row's begin there. rows_b: the rows that are read,
        None for all."""
        rows, count = new_tokens.tokens_Bn.shape
        base_B = length_B - new_tokens.count_B
        at = WriteRange(base_B, count, first, rows_b)
        mask = None
        if count > 1 or not at.single:
            above_BnT = chain_above(count, base_B.device).expand(rows, -1, -1)
            mask = build_mask(at.lengths_B, above_BnT, at.visible)
        position_Bn = base_B[:, None] + numbers(0, count, base_B.device)

        def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return at.store(self._keys, keys), at.store(self._values, values)

        out_BnH = self._layer.step(new_tokens.last_BnD, position_Bn, update, mask)
        return out_BnH[numbers(0, rows, base_B.device), (new_tokens.count_B - 1).clamp(min=0)]
