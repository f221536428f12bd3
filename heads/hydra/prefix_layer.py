"""Hydra++'s prefix layer: one decoder layer over the target's last states, with a final norm.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 4. The state of position
t sees those of its own document up to t, which the target has all computed: nothing that is drafted passes through
here.

Shapes: B rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H hidden.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.cache import KVCache, build_mask, llama_layer_shapes
from draftsmith.eval.decode.draft import NewTokens, chain_above, numbers
from draftsmith.heads.layers.decoder_layer import CacheUpdate, PlainLayer, RMSNorm, Rotary
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.training_pass import TrainingPass


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
        plan = plan_rows(batch.document, needed_BL)
        given = self._layer.layer_input(batch.last.to(self._layer.self_attn.q_proj.weight.dtype))
        passing = TrainingPass(self._layer, (), self.rotary_emb, batch.position, plan, steps=1)
        passing.context_keys(*given)
        return self.norm(passing.first(*(x.flatten(0, 1)[plan.rows] for x in given)))

    def step(self, last_BnH: Tensor, position_Bn: Tensor, update: CacheUpdate, mask: Tensor | None) -> Tensor:
        """Return the outputs [B, n, H] of new states; see `EagleLayer.decode`."""
        last_BnH = last_BnH.to(self._layer.self_attn.q_proj.weight.dtype)
        rotation = self.rotary_emb(last_BnH, position_Bn)
        return self.norm(self._layer.decode(*self._layer.layer_input(last_BnH), rotation, update, mask))

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
        """capacity: most tokens of a sequence. new_tokens: most tokens that join a row's text in a round of several rows."""
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
        return new_tokens.at_last(out_BnH)
