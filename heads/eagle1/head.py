"""EAGLE-1: one Llama layer that continues the target's last hidden states, its logits the target's own projection.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), section 3; EAGLE-2 (2024)
drafts trees with the same weights. Zhang et al., "Learning Harmonized Representations for Speculative Sampling" (HASS,
2024) train it on its own outputs too, in aligned passes.

Shapes: B batch rows, L tokens, n tokens, H hidden (draft and target alike), A aux layers, V target vocab.

Rows and steps are those of heads/eagle/base.py. Row t reads fc([embedding of x_{t+1}, y_t]), y_t being the target's
post-final-norm state; its output f_t stands for y_{t+1}: it is the next step's hidden state, and the target's
projection makes logits of it, with no norm between. The layer itself has no norm in front of its attention.
In training y_t gets noise, so that the head lives with the errors of its own outputs; pass j of HASS is step j - 1.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.sampling import NOISE, uniforms
from draftsmith.heads.base import Reads, Trains
from draftsmith.heads.eagle.base import EagleHead
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.layers.decoder_layer import EagleAttention, EagleLayer, Rotary
from draftsmith.heads.layers.from_target import derive_layer_config, embedding_scale
from draftsmith.heads.scaled import ScaledHead
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.target import Target, steady_positions


class Eagle1Layer(EagleLayer):
    """A Llama layer without input_layernorm."""

    def __init__(self, config: LlamaConfig, *, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config, config.hidden_size, qkv_bias=qkv_bias)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle1Head(ScaledHead, EagleHead):
    """The EAGLE-1 drafter. Parameters carry the names of EAGLE's published files (see formats.py).

    The target's raw input embedding [V, H] is shared and frozen. Weights start in fp32 at torch's defaults.
    """

    method: ClassVar[str] = "eagle1"
    options_class = Eagle1Options

    def __init__(self, options: Eagle1Options, config: LlamaConfig, target: Target, *_: object) -> None:
        super().__init__(target_head=target.head)
        H, embedding = config.hidden_size, target.embedding
        assert embedding.shape[1] == target.head.weight.shape[1] == H
        self.options, self.config = options, config
        self.reads = Reads(context_length=steady_positions(config))
        self.trains = Trains(options.aligned_passes, frozenset({"feature"}), measured_on_target=("embedding_scale",))
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach(), freeze=True)
        self.fc = nn.Linear(2 * H, H, bias=options.fc_bias)
        self.layers = nn.ModuleList([Eagle1Layer(config, qkv_bias=options.qkv_bias)])
        self.rotary_emb = Rotary(config)

    def initial_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's last states; aux streams are not read."""
        return last.to(self.fc.weight.dtype)

    def layer_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the layer's input [..., H], twice: the attention reads the residual as it is."""
        x = self.fc(torch.cat([embedded * self.embedding_scale, hidden], -1))
        return x, x

    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> fp32 draft logits [..., V], by the target's own projection."""
        return self.target_head.logits(out)

    def feedback(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] is the hidden state of the next step."""
        return out.detach() if self.options.detach_passes else out

    def feature(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] stands for the target's next state."""
        return out

    def perturb(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Add the noise of the options to the target's states [B, L, H], drawn from the documents' seeds."""
        width, length = self.options.noise, self.options.noise_length
        if not width:
            return hidden
        seeds, position = (x.flatten().to(hidden.device) for x in (batch.seeds, batch.position))
        uniform = uniforms(seeds, position, NOISE, hidden.shape[-1])
        noise = (2 * uniform.view(hidden.shape).to(hidden.dtype) - 1) * width
        if length is not None:
            # How many tokens the document of each position has: documents are numbered within their row.
            number_BL = batch.document + 1
            # A row has no more documents than tokens.
            counts = torch.zeros(len(number_BL), number_BL.shape[1] + 1, device=number_BL.device)
            counts.scatter_add_(1, number_BL, torch.ones_like(number_BL, dtype=counts.dtype))
            noise = noise * (length / counts.gather(1, number_BL))[..., None]
        return hidden + noise


def build(options: Eagle1Options, target: Target, draft_vocab: Tensor | None) -> Eagle1Head:
    """Return an untrained fp32 head for `target`. Raises UserError for dimensions that do not fit together."""
    assert draft_vocab is None, "EAGLE-1 predicts the whole vocabulary"
    config, scale = derive_layer_config(options, target), embedding_scale(target)
    with torch.device(target.device):
        head = Eagle1Head(options, config, target)
    head.embedding_scale = scale
    return head


load = Eagle1Head.load
