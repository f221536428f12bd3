"""MTP: one decoder layer that reads the target's last hidden states, its logits the target's own projection of its normed output.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced
Multi-Token Prediction" (2025) train it on its own outputs too, in steps.

Shapes: B batch rows, L tokens, n tokens, H hidden (draft and target alike), V target vocab.

Rows and steps are those of heads/eagle/base.py. Row t reads fc([enorm(embedding of x_{t+1}), hnorm(y_t)]), y_t being the target's
post-final-norm state; the final norm of its output is what the target's projection makes logits of, and the next step's hidden state.

With `target_state` before_norm, both are states before these norms. Such a state h is not asked of the target: its final norm gives
y = w h / rms(h), and hnorm, which hides scales, makes the same of y / w.

With `target_state` vllm, row 0 reads zeros in place of an embedding, as vLLM 0.32 has it for the names of DeepSeek and GLM
(`deepseek_mtp.py`, `glm4_moe_mtp.py`), and for GLM-4 MoE the next step's hidden state is the output before its norm.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.cache import LayerShape
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, Reads, StepOutput, Trains, shift_left
from draftsmith.heads.eagle.base import EagleHead, Reader
from draftsmith.heads.layers import LayerOptions
from draftsmith.heads.layers.decoder_layer import CacheUpdate, NormedAttention, PlainLayer, Rotary
from draftsmith.heads.layers.from_target import derive_layer_config, final_norm_weight, start_norm
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.training_pass import LayerInput, TrainingPass
from draftsmith.heads.mtp import MtpOptions
from draftsmith.heads.mtp.target_layer import (
    ROUTING_BIAS,
    TargetLayerPass,
    cached_shapes,
    decode,
    target_layer,
)
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.target import Target, steady_positions


class MtpHead(EagleHead):
    """The MTP drafter. The target's raw input embedding [V, H] is shared and frozen. Weights start in fp32 at torch's defaults."""

    method: ClassVar[str] = "mtp"
    options_class = MtpOptions
    target_norm: Tensor | None

    def __init__(self, options: MtpOptions, config: LlamaConfig, target: Target, *_: object) -> None:
        super().__init__(target_head=target.head)
        H, eps, embedding = config.hidden_size, config.rms_norm_eps, target.embedding
        assert embedding.shape == (config.vocab_size, H)
        self.options, self.config = options, config
        self.reads = Reads(context_length=steady_positions(config))
        self.trains = Trains(options.mtp_steps)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach(), freeze=True)
        self.enorm, self.hnorm = RMSNorm(H, eps=eps), RMSNorm(H, eps=eps)
        self.fc = nn.Linear(2 * H, H, bias=False)
        if options.layer == "target":
            # The rotary embedding of as much of each head as the target turns.
            rope = getattr(target.config, "rope_parameters", None) or {}
            turned = int(config.head_dim * (rope.get("partial_rotary_factor") or 1.0))
            self.layers = nn.ModuleList([target_layer(target)])
            self.rotary_emb = Rotary(LlamaConfig(**{**config.to_dict(), "head_dim": turned}))
            cached_shapes(self.layers[0], self.rotary_emb)  # refuses what is not computed
        else:
            attention = NormedAttention(config) if options.qk_norm else None
            self.layers, self.rotary_emb = nn.ModuleList([PlainLayer(config, attention)]), Rotary(config)
        self.norm = RMSNorm(H, eps=eps)
        # w of the target's final norm, which `build` measures.
        self.register_buffer("target_norm", torch.ones(H) if options.target_state == "before_norm" else None)
        as_vllm = options.target_state == "vllm"
        self.hides_first = as_vllm and not target.model_type.startswith(("qwen3_next", "qwen3_5"))
        self.feeds_normed = not (as_vllm and target.model_type in ("glm4_moe", "glm4_moe_lite"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As `nn.Module._apply`; a routing bias stays fp32, as in the target."""
        biases = {name: value for name, value in self.named_buffers() if name.endswith(ROUTING_BIAS)}
        super()._apply(fn, recurse)
        for name, value in biases.items():
            setattr(self.get_submodule(name.rpartition(".")[0]), ROUTING_BIAS, value.to(self.get_buffer(name).device))
        return self

    def initial_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's last states; aux streams are not read."""
        last = last.to(self.fc.weight.dtype)
        return last if self.target_norm is None else last / self.target_norm

    def layer_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input and the residual, [..., H] each; twice the layer's for one of the target's."""
        layer, x = self.layers[0], self.fc(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return layer.layer_input(x) if isinstance(layer, PlainLayer) else (x, x)

    def layer(
        self, tokens: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], update: CacheUpdate, mask: Tensor | None
    ) -> Tensor:
        """As `EagleHead.layer`."""
        embedded, layer = self._embed(tokens), self.layers[0]
        if self.hides_first:  # at position 0, which alone turns nothing
            embedded = embedded * (rotation[1] != 0).any(-1, keepdim=True)
        x, residual = self.layer_input(embedded, hidden)
        if isinstance(layer, PlainLayer):
            return layer.decode(x, residual, rotation, update, mask)
        return decode(layer, x, rotation, update, mask)

    def reader(self, batch: TrainBatch, passing: TrainingPass, num_steps: int) -> Reader:
        """As `EagleHead.reader`."""
        if not self.hides_first:
            return super().reader(batch, passing, num_steps)

        def read(rows: Tensor, step: int, hidden: Tensor) -> LayerInput:
            tokens = shift_left(batch.ids, 1 + step, 0).flatten()[rows]
            seen = (batch.position.flatten()[rows] + step > 0)[:, None]
            return LayerInput(*self.layer_input(self._embed(tokens) * seen, hidden))

        return read

    @property
    def least_window(self) -> int | None:
        """As `EagleHead.least_window`; a layer of the target's takes none."""
        return super().least_window if self.options.layer is None else None

    @property
    def cached_shapes(self) -> tuple[LayerShape, ...] | None:
        """What a layer of the target's caches; None: what a Llama layer does."""
        return None if self.options.layer is None else cached_shapes(self.layers[0], self.rotary_emb)

    def training_pass(self, position_BL: Tensor, queries: RowPlan, num_steps: int) -> TrainingPass:
        """As `EagleHead.training_pass`."""
        if self.options.layer is None:
            return super().training_pass(position_BL, queries, num_steps)
        return TargetLayerPass(self.layers[0], self.rotary_emb, position_BL, queries)

    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> fp32 draft logits [..., V], by the target's own projection."""
        return self.target_head.logits(self.norm(out))

    def feedback(self, out: Tensor) -> Tensor:
        """The normed output [..., H] is the hidden state of the next step, or the output as it is."""
        return self.norm(out) if self.feeds_normed and self.target_norm is None else out

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """As `EagleHead.forward`; with `step_keys`, in training, all rows run every step, as in a text of its own."""
        if not (self.training and self.options.step_keys):
            return super().forward(batch, num_steps)
        plan = self.planned(batch, num_steps)
        seen = plan.queries[0].context
        passing = self.training_pass(batch.position, seen, 1)  # whose weights all steps share
        hidden_BLH, steps = self.initial_hidden(batch.aux, batch.last), []
        for step, rows in enumerate(plan.rows):
            passing.position_BL = batch.position + step
            ahead = replace(batch, ids=shift_left(batch.ids, step, 0), position=passing.position_BL)
            out_TH = self.first_step(self.reader(ahead, passing, 1), hidden_BLH, passing)
            own = torch.searchsorted(seen.rows, rows)
            steps.append(StepOutput(step, rows, out_TH[own], self.logits))
            fed_TH = self.feedback(out_TH)
            hidden_BLH = fed_TH.new_zeros(hidden_BLH.shape).flatten(0, 1).index_copy(0, seen.rows, fed_TH)
            hidden_BLH = hidden_BLH.view(*batch.ids.shape, -1)
        return HeadOutput(tuple(steps))


def build(options: MtpOptions, target: Target, draft_vocab: Tensor | None) -> MtpHead:
    """Return an untrained fp32 head for `target`, its final norm the target's. Raises UserError for dimensions that do not fit
    together."""
    assert draft_vocab is None, "MTP heads predict the whole vocabulary"
    config = derive_layer_config(options, target)
    if options.layer == "target":
        own = derive_layer_config(MtpOptions(), target)
        key = next((name for name in vars(LayerOptions()) if getattr(config, name) != getattr(own, name)), None)
        if key is not None:
            raise UserError(
                f"head.{key} is {getattr(options, key)}, but the layer of head.layer target has the target's sizes: leave it out."
            )
    with torch.device(target.device):
        head = MtpHead(options, config, target)
    for parameter in head.layers[0].parameters() if options.layer == "target" else ():
        if parameter.ndim > 1:  # transformers leaves those of experts unset
            nn.init.normal_(parameter, std=getattr(target.config, "initializer_range", 0.02))
    start_norm(head.norm, target)
    return measure_norm(head, target)


def measure_norm(head: MtpHead, target: Target) -> MtpHead:
    """Fill in what undoes the target's final norm, for a head that reads states before it. Raises UserError where that is no norm by
    the root mean square, or hides a number of the state."""
    if head.target_norm is not None:
        weight = final_norm_weight(target)
        if weight is None or not bool(weight.all()):
            raise UserError(
                f"head.target_state is 'before_norm', but the states before the final norm of {target.path} do not follow from those "
                "behind it: leave it out."
            )
        head.target_norm = weight.to(target.device)
    return head


load = MtpHead.load
