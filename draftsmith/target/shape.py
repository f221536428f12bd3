"""What a target costs, from its config alone: parameters, FLOPs, bytes. No weights are loaded.

Symbols: n layers, H hidden, N query heads, G key/value heads, D head size, V vocab, L tokens of a text.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from draftsmith.foreign.code import foreign_code
from draftsmith.target.config import attention_of, opener_of
from draftsmith.target.target import context_of


@dataclass(frozen=True)
class TargetShape:
    """The dimensions of a target that decide what it costs.

    parameters: all of them. lookup: those that are only looked up (an input embedding that is not the output
    projection too). experts: those inside experts, of which a token uses the share expert_share. windows: per layer,
    the most tokens that a token attends to, None without a limit. itemsize: bytes per weight. cached: numbers of a token in a layer's cache:
    a key and a value of G*D, or a latent of all heads. scored: dimensions of a head's key and value together. model: of shapes alone.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    vocab: int
    parameters: int
    lookup: int
    experts: int
    expert_share: float
    windows: tuple[int | None, ...]
    context: int
    itemsize: int
    cached: int
    scored: int
    model: Any = field(compare=False, repr=False)

    @property
    def tied(self) -> bool:
        """Whether input embeddings and output projection are one matrix."""
        return self.lookup == 0

    @property
    def weight_bytes(self) -> float:
        """Memory of the weights."""
        return float(self.parameters * self.itemsize)

    @property
    def end_bytes(self) -> float:
        """Memory of input embeddings and output projection."""
        return float((self.lookup + self.vocab * self.hidden) * self.itemsize)

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with: all but the lookup and the experts that it does not visit."""
        return self.parameters - self.lookup - self.experts * (1 - self.expert_share)

    @property
    def kv_bytes(self) -> int:
        """Bytes that one cached token takes in all layers."""
        return self.layers * self.cached * self.itemsize

    def touched_bytes(self, rows: float) -> float:
        """Weight bytes read by a pass over one token in each of `rows` texts.

        Everything dense once; of the experts those that any of the rows visits: a share 1 - (1 - share)^rows where
        tokens choose independently and evenly.
        """
        visited = 1 - (1 - self.expert_share) ** rows
        return (self.parameters - self.lookup - self.experts * (1 - visited)) * self.itemsize

    def forward_flops(self, length: float) -> float:
        """FLOPs of one pass over a text of `length` tokens, logits included.

        A multiplication and an addition per active parameter and token; and per layer, token and key that it sees
        2*N for each dimension of key and value. A token at place t sees min(t, window) keys, so over the text
        that is L^2/2, or w*L - w^2/2 where the window w is shorter than L.
        """
        seen = sum(length**2 / 2 if w is None or w >= length else w * length - w**2 / 2 for w in self.windows)
        return 2 * self.active * length + 2 * self.heads * self.scored * seen

    def step_flops(self, context: float) -> float:
        """FLOPs of one more token after `context` tokens."""
        seen = sum(context if w is None else min(w, context) for w in self.windows)
        return 2 * self.active + 2 * self.heads * self.scored * seen


def shape_of(config: Any, itemsize: int) -> TargetShape:
    """Read the dimensions of a transformers config; parameters are counted on a model without memory (meta device)."""
    dtype, attention = torch.float32 if itemsize == 4 else torch.bfloat16, attention_of(config, "sdpa")
    with foreign_code("No model can be built from the target's config", "check its path"), torch.device("meta"):
        # Of a copy, as the attention is noted in it.
        model = opener_of(config).from_config(deepcopy(config), dtype=dtype, attn_implementation=attention)
    text = model.config.get_text_config(decoder=True)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    types = getattr(text, "layer_types", None) or ["any"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    heads = text.num_attention_heads
    groups, head_dim = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // heads
    cached, scored = 2 * groups * head_dim, 2 * head_dim
    # Of DeepSeek's attention (MLA) transformers caches the latent, as engines do.
    if latent := getattr(text, "kv_lora_rank", None):
        cached = latent + text.qk_rope_head_dim
        scored = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return TargetShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        groups=groups,
        vocab=output.shape[0],
        parameters=sum(counts.values()),
        lookup=0 if output is embedding else embedding.numel(),
        experts=sum(size for name, size in counts.items() if ".experts." in name),
        expert_share=chosen / experts if experts and chosen else 1.0,
        windows=tuple(window if kind in ("sliding_attention", "any") else None for kind in types),
        context=context_of(text) or 1 << 20,
        itemsize=itemsize,
        cached=cached,
        scored=scored,
        model=model,
    )
