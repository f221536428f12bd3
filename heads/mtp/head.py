"""MTP: one decoder layer that reads the target's last hidden states, its logits the target's own projection of its normed output.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; Cai et al., "FastMTP: Accelerating LLM Inference with Enhanced
Multi-Token Prediction" (2025) train it on its own outputs too, in steps.

Shapes: B batch rows, L tokens, n tokens of a call, R query rows, H hidden (draft and target alike), V target vocab, N query heads, G
key/value heads, D head size, S slots; MLA caches other shapes than it attends to.

Rows and steps are those of heads/eagle/base.py. Row t reads fc([enorm(embedding of x_{t+1}), hnorm(y_t)]), y_t being the target's
post-final-norm state; the final norm of its output is what the target's projection makes logits of, and the next step's hidden state.

With `target_state` before_norm, both are states before these norms. Such a state h is not asked of the target: its final norm gives
y = w h / rms(h), and hnorm, which hides scales, makes the same of y / w.

With `target_state` vllm, row 0 reads zeros in place of an embedding, as vLLM 0.32 has it for the names of DeepSeek and GLM
(`deepseek_mtp.py`, `glm4_moe_mtp.py`), and for GLM-4 MoE the next step's hidden state is the output before its norm.

With `layer` target, the block is the decoder layer that transformers builds of the target's configuration: with compressed keys and
values (MLA), experts, or a part of each head turned by position. transformers keeps the layer; its interfaces for caches and attention
are handed the keys of decoding, and those of a training pass.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.cache import LayerShape, TensorShape
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, Reads, StepOutput, Trains, shift_left
from draftsmith.heads.eagle.base import EagleHead, Reader
from draftsmith.heads.layers import LayerOptions
from draftsmith.heads.layers.decoder_layer import CacheUpdate, NormedAttention, PlainLayer, Rotary, attend
from draftsmith.heads.layers.from_target import OwnLayerConfig, derive_layer_config, final_norm_weight, start_norm
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.training_pass import Keys, LayerInput, TrainingPass
from draftsmith.heads.layers.ttt_attention import ttt_attention
from draftsmith.heads.mtp import MtpOptions
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.target import Target, steady_positions

ROUTING_BIAS = "e_score_correction_bias"
"""What routers add to their scores to choose experts; in fp32 whatever the weights are."""
_NAME = "draftsmith_mtp"
_OTHER = ("sliding_window", "softcap", "s_aux")
"""What attention of some architectures is told besides, and ours does not compute."""
Rotation = tuple[Tensor, Tensor]
Attending = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(rotated queries [B, N, n, D], keys and values [B, G, n or S, D], scale of the scores) -> [B, n, N, D of the values]."""


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
            self.rotary_emb = Rotary(OwnLayerConfig(**{**config.to_dict(), "head_dim": turned}))
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

        def attending(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attend(q, k, v, mask, scale).transpose(1, 2)

        told = {"position_embeddings": rotation, "past_key_values": _Writer(update), "attending": attending}
        out: Tensor = layer(x, attention_mask=None, **told)
        return out

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
        own = derive_layer_config(MtpOptions(layer="target"), target)
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


def target_layer(target: Target) -> nn.Module:
    """Return a layer like the target's last one, its weights not set. Raises UserError where transformers has none that can be handed
    keys."""
    config = deepcopy(target.config)
    model = MODEL_MAPPING.get(type(config), None)
    layer = (getattr(model, "_can_record_outputs", None) or {}).get("hidden_states")
    if not isinstance(layer, type) or not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"head.layer is 'target', but the decoder layers of {target.path} ({target.model_type}) take no attention from outside: "
            "leave it out, or train the method eagle3."
        )
    config._attn_implementation = _NAME
    # The others take weights of one dtype alone, or compute differently by how many tokens there are.
    config._experts_implementation = "eager"
    built: nn.Module = layer(config, target.num_layers - 1)
    return built


def _interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    if (other := next((name for name in _OTHER if told.get(name) is not None), None)) is not None:
        raise UserError(
            f"The attention of {type(module).__name__} has {other}, which is not computed here: leave head.layer out."
        )
    attending: Attending = told["attending"]
    # Under autocast norms and rotations leave fp32.
    return attending(query.to(value.dtype), key.to(value.dtype), value, told["scaling"]), None


AttentionInterface.register(_NAME, _interface)


class _Writer:
    """What a layer takes for a cache."""

    def __init__(self, update: CacheUpdate) -> None:
        self._update = update

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return self._update(0, keys, values)


def _like(layer: nn.Module) -> Tensor:
    """Return a tensor [H] of the layer's dtype and device; in a view of a head it is no parameter."""
    return cast(Tensor, layer.get_submodule("input_layernorm").weight)


@torch.no_grad()
def cached_shapes(layer: nn.Module, rotary: Rotary) -> tuple[LayerShape, ...]:
    """Return what the layer hands a cache, which its attention to one token shows. Raises UserError for attention that is not computed
    here."""
    found: list[LayerShape] = []

    def update(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found.append(LayerShape(*(TensorShape(x.shape[1], x.shape[3], x.dtype) for x in (keys, values))))
        return keys, values

    def attending(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
        return q.new_zeros(1, 1, q.shape[1], v.shape[-1])

    like = _like(layer)
    rotation = rotary(like, torch.zeros(1, 1, dtype=torch.long, device=like.device))
    _attention(layer, like[None, None], rotation, attending, _Writer(update))
    return tuple(found)


def _attention(
    layer: nn.Module, x_BnH: Tensor, rotation: Rotation, attending: Attending, writer: _Writer | None = None
) -> None:
    """Run the layer's attention alone, for what it hands over."""
    layer.get_submodule("self_attn")(
        x_BnH,
        position_embeddings=rotation,
        past_key_values=writer,
        attention_mask=None,
        attending=attending,
    )


class TargetLayerPass(TrainingPass):
    """As `TrainingPass`, of a single layer that reads its input alone."""

    def __init__(self, layer: nn.Module, rotary: Rotary, position_BL: Tensor, plan: RowPlan) -> None:
        self.layer, self.rotary, self.position_BL, self.plan, self.window = layer, rotary, position_BL, plan, None
        self._like = _like(layer)

    def context_keys(self, given: LayerInput) -> None:
        """Compute the keys of step 0 from the layer's input of all tokens, [B*L, H]."""

        def keep(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
            keys, values = (x[0].transpose(0, 1).unflatten(0, self.position_BL.shape) for x in _as_wide(q, k, v)[1:])
            self._keys = [Keys(keys, values)]
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])

        cos, sin = (x.flatten(0, 1)[None] for x in self.rotary(self._like, self.position_BL))
        _attention(self.layer, self.layer.get_submodule("input_layernorm")(given.x[None]), (cos, sin), keep)

    def first(self, given: LayerInput) -> Tensor:
        """Return the output [R, H] of step 0 for the rows of the plan."""
        return self.step(0, given)

    def step(self, step: int, given: LayerInput) -> Tensor:
        """Return the output [R, H] of step 0, 1, 2, ..."""
        if not len(self.plan.rows):
            return self._of_no_row(given)

        def attending(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            q_RND, k_RGD, v_RGD = (x[0].transpose(0, 1) for x in _as_wide(q, k, v))
            if step:
                self._keys = [self._keys[0].add(k_RGD, v_RGD)]
            (keys,) = self._keys
            out = ttt_attention(q_RND, keys.context_k, keys.context_v, keys.own_k, keys.own_v, self.plan, scale)
            return out[None, ..., : v.shape[-1]]

        rotation = self.rotary(self._like, self.position_BL.flatten()[self.plan.rows][None] + step)
        out: Tensor = self.layer(given.x[None], position_embeddings=rotation, attention_mask=None, attending=attending)
        return out[0]

    def _of_no_row(self, given: LayerInput) -> Tensor:
        """Return [0, H], of which all weights have gradients of zeros: transformers' layers take no batch without rows."""

        def attending(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
            nothing: Tensor = 0 * (q.sum() + k.sum())
            return (v + nothing).repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

        rotation = self.rotary(self._like, self.position_BL.new_zeros(1, 1))
        row = given.x.new_zeros(1, 1, given.x.shape[-1])
        out: Tensor = self.layer(row, position_embeddings=rotation, attention_mask=None, attending=attending)
        return out[0][:0]


def _as_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as wide as the widest, with zeros, which change no score: kernels take one width."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


load = MtpHead.load
