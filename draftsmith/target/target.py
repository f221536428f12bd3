"""The frozen target: hidden states by hooks, logits by its own output projection, and loading it.

Shapes: B batch, n tokens of one call, Ht target hidden size, A aux layers, V target vocab, W draft vocab.
Aux layer id k is the residual stream that enters decoder layer k = Hugging Face `hidden_states[k]` (0 = embeddings).
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.progress import say
from draftsmith.target.folder import eos_ids_of, fingerprint_directory
from draftsmith.target.identity import TargetIdentity, identify_directory
from draftsmith.target.kernels import fuse_norms, linear, pack_linears, without_autocast
from draftsmith.target.layers import find_decoder, find_layers, gathered, sharers_of
from draftsmith.target.plain_pass import Attend, PlainPass, join_projections
from draftsmith.target.pretrained import check_target, open_model

AttentionMask = Tensor | dict[str, Tensor]


Weights = tuple[Tensor, Tensor | None]
"""A matrix and its bias."""


class Derived:
    """Weights that are computed from other tensors, and again when one of these has changed."""

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()

    def get(self, made_of: tuple[Tensor, ...], make: Callable[[], Weights]) -> Weights:
        """Return what `make` computes from the tensors `made_of`."""
        state = tuple((id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in made_of)
        if self._state != state:
            # The tensors are kept, so that no other gets their address.
            self._state, self._made_of, self._weights = state, made_of, make()
        return self._weights


class TargetHead(nn.Module):
    """The target's frozen output projection: hidden -> fp32 logits, with the target's own scale and softcap.

    weight [V, Ht] and bias [V] or None share storage with the target's lm_head but are buffers of this module,
    so moving or casting it never changes the target, and no optimizer or checkpoint picks them up.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.scale = scale
        self.softcap = softcap
        self._selected, self._places = Derived(), Derived()

    @property
    def vocab_size(self) -> int:
        """V: the number of rows of the output projection, padding rows included."""
        return self.weight.shape[0]

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return float32 logits [..., V] of post-final-norm states [..., Ht], or [..., W] for the token ids `columns`.

        The product runs in the dtype of the weights, as in the target itself, also under autocast;
        scale and softcap run in float32. Gradients flow to `hidden`, never to the weights.
        """
        return self.narrow_logits(hidden, columns).float()

    def narrow_logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return `logits` in the dtype of the weights, where neither scale nor softcap made them float32."""
        weight, bias = (self.weight, self.bias) if columns is None else self._select(columns)
        with without_autocast(hidden):
            logits = linear(hidden.to(weight.dtype), weight, bias)
            if self.scale != 1.0:
                logits = logits.float() * self.scale
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        return logits

    def _select(self, columns: Tensor) -> Weights:
        """Return the projection's rows for some tokens, kept for the next call: a drafter needs the same ones every round."""

        @torch.inference_mode(False)  # a later call may be one of training
        def select() -> Weights:
            bias = None if self.bias is None else self.bias.index_select(0, columns)
            return self.weight.index_select(0, columns), bias

        return self._selected.get(tuple(x for x in (self.weight, columns, self.bias) if x is not None), select)

    def places(self, columns: Tensor) -> Tensor:
        """Return [V], where each token id stands among the token ids `columns`, -1 where it does not, kept for the next call."""

        @torch.inference_mode(False)
        def find() -> Weights:
            number_W = torch.arange(len(columns), device=columns.device)
            return number_W.new_full((self.vocab_size,), -1).index_copy_(0, columns, number_W), None

        return self._places.get((columns,), find)[0]


@dataclass(frozen=True)
class TargetOutput:
    """Hidden states of one call. aux [B, n, A*Ht]: residual streams in the order of the requested layer ids (A = 0 gives
    width 0). last [B, n, Ht]: post-final-norm states."""

    aux: Tensor
    last: Tensor


class Target:
    """A frozen causal language model whose residual streams are read by hooks.

    `load_target` opens one from disk and checks it; the constructor takes a ready model and checks nothing.

    Args:
        model: of transformers; it is set to evaluation and its parameters are frozen.
        path: what messages and records call it.
        fingerprint: of its configuration and weights, see `fingerprint_directory`.
        directory: the folder with its files, None for a model that came from none.

    Attributes:
        embedding: [V, Ht] the raw input embedding weight (architectures that scale embeddings do so after the lookup).

    Raises:
        UserError: where the decoder layers or the output projection cannot be found.
    """

    def __init__(self, model: Any, *, path: str, fingerprint: str, directory: Path | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.path = path
        self.fingerprint = fingerprint
        self.directory = directory
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = find_decoder(model)
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        projection = model.get_output_embeddings()
        if not hasattr(projection, "weight"):
            raise UserError(
                f"The model of type {model.config.model_type!r} has no output projection (lm_head), so it cannot be a "
                "target: choose a causal language model."
            )
        embedding, bias = model.get_input_embeddings().weight, getattr(projection, "bias", None)
        # Of a model that several processes share, each has these two whole.
        self.embedding: Tensor = gathered(embedding)
        tied = projection.weight is embedding
        weight = self.embedding if tied else gathered(projection.weight)
        self.head = TargetHead(weight, None if bias is None else gathered(bias))
        self.vocab_size: int = self.head.vocab_size
        self._layers = find_layers(self.decoder, self.num_layers, self.model_type)
        self.kept_passes: Any = None  # what decoding leaves for its next batch
        if self.device.type == "cuda":
            # For the whole process: cuDNN's attention is planned anew for every length of the keys, which takes several times
            # as long as a pass, and its bits in bf16 differ from call to call (docs/results/gpu).
            torch.backends.cuda.enable_cudnn_sdp(False)
            if PlainPass.of(self.decoder, self._layers):
                join_projections(self._layers)

    @property
    def model_type(self) -> str:
        """The architecture's name, such as "llama"."""
        return self.config.model_type

    @property
    def shares(self) -> int:
        """How many processes hold the layers together."""
        sharers = sharers_of(self.model)
        return 1 if sharers is None else int(sharers.size())

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of all hidden states."""
        return self.embedding.dtype

    @property
    def dtype_name(self) -> str:
        """The name of `dtype` in recipes and results, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, those that two layers share counted once."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def context_length(self) -> int:
        """The most tokens that the target reads at once; sys.maxsize where its config names no limit."""
        return context_of(self.config) or sys.maxsize

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: those of the generation config, else of the config, sorted; maybe none."""
        return eos_ids_of(getattr(self.model, "generation_config", None), self.config, self.model.config) or ()

    @cached_property
    def identity(self) -> TargetIdentity:
        """What distinguishes this target from others, recorded with every head; read from its files on first use.

        Of a target without a folder, what the model itself says.
        """
        known = TargetIdentity(
            path=self.path,
            architectures=tuple(getattr(self.model.config, "architectures", None) or [type(self.model).__name__]),
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=getattr(self.config, "num_attention_heads", None),
            fingerprint=self.fingerprint,
        )
        if self.directory is None:
            return replace(known, eos_ids=self.eos_ids or None)
        return known.completed(identify_directory(self.directory))

    @cached_property
    def plain_pass(self) -> PlainPass | None:
        """The decoder's pass without transformers' work around every layer; None where its layers are others."""
        return PlainPass.of(self.decoder, self._layers)

    def agreed(self, make: Callable[[], Any]) -> Any:
        """Return the JSON value that `make` does: what clocks, free memory or the disk decide, on which the processes that share a
        target must agree."""
        return make()

    def default_layer_ids(self) -> tuple[int, ...]:
        """(2, n//2, n-3), the ids every serving engine assumes. Raises UserError for n < 8, where they collapse."""
        n = self.num_layers
        if n < 8:
            raise UserError(
                f"The target {self.path} has only {n} layers, too few for the default head.layer_ids (2, n//2, n-3): "
                f"set head.layer_ids to ascending numbers from 0 to {n - 1}."
            )
        return (2, n // 2, n - 3)

    def check_layer_ids(self, layer_ids: tuple[int, ...], key: str = "head.layer_ids") -> None:
        """Raise UserError unless `layer_ids`, the value of `key`, is a non-empty, strictly ascending choice of 0..n-1."""
        check_layer_ids(layer_ids, self.num_layers, str(self.path), key)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        layer_ids: tuple[int, ...] = (),
        attention_mask: AttentionMask | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> TargetOutput:
        """Run the base model, without its lm_head.

        Args:
            input_ids: [B, n].
            layer_ids: the A layers whose incoming residual streams are returned.
            attention_mask: as the model takes it, a tensor or a dict by layer type.
            position_ids: [B, n].
            past_key_values: a cache, which is extended in place.

        Returns:
            aux [B, n, A*Ht] and last [B, n, Ht].
        """
        if attention_mask is not None and past_key_values is not None and position_ids is not None and self.plain_pass:
            attend = self.plain_pass.masked(attention_mask, past_key_values)
            return self.attend_by(attend, input_ids, layer_ids, position_ids)
        streams: dict[int, Tensor] = {}
        # Only the layers that are read have a hook, and only now: each costs as much as a small product.
        with ExitStack() as hooks:
            for k in set(layer_ids):
                hooks.enter_context(_tapped(self._layers[k], k, streams))
            output = self.decoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        return _output(streams, output.last_hidden_state, layer_ids)

    @torch.no_grad()
    def attend_by(self, attend: Attend, ids: Tensor, layer_ids: tuple[int, ...], positions: Tensor) -> TargetOutput:
        """Return what `forward` does, of a pass whose attention is `attend`; for a target that has a `plain_pass`."""
        assert self.plain_pass is not None
        return _output(*self.plain_pass(ids, layer_ids, positions, attend), layer_ids)


def _output(streams: dict[int, Tensor], last: Tensor, layer_ids: tuple[int, ...]) -> TargetOutput:
    if not layer_ids:
        return TargetOutput(aux=last.new_empty((*last.shape[:-1], 0)), last=last)
    # From the GPU of each layer.
    return TargetOutput(aux=torch.cat([streams[k].to(last.device) for k in layer_ids], dim=-1), last=last)


def _tapped(layer: nn.Module, index: int, streams: dict[int, Tensor]) -> Any:
    """Return the handle of a hook, which its `with` removes, that keeps what enters a layer in streams[index]."""

    def tap(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams[index] = args[0] if args else kwargs["hidden_states"]

    return layer.register_forward_pre_hook(tap, with_kwargs=True)


def context_of(config: Any) -> int | None:
    """Return the most tokens that a model of this configuration reads at once, None where it names no limit: where the rotary
    frequencies of all tokens change with the length of a text, those up to which they stay."""
    return min((n for n in (_named_context(config), steady_positions(config)) if n is not None), default=None)


def describe_context(config: Any) -> str:
    """Return `context_of` in words, with the reason where that is not the length which the configuration names."""
    if not (length := shortened(config)):
        return str(context_of(config))
    return f"{length} (past that all its rotary frequencies change, those of cached keys too, so nothing can be verified exactly)"


def _named_context(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"):
        if isinstance(length := getattr(config, name, None), int):
            return length
    return None


def shortened(config: Any) -> int:
    """Return `context_of` where that is not the length which the configuration names, else 0."""
    length = context_of(config)
    return 0 if length is None or length == _named_context(config) else length


def steady_positions(config: Any) -> int | None:
    """Return the length up to which rotary frequencies do not depend on the length of a pass (LongRoPE, dynamic scaling), None where
    they never do. Beyond it cached keys would be those of a shorter text, and a text's states depend on what else is in its batch."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    limits = []
    for one in (rope, *rope.values()):
        kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
        if kind in ("longrope", "su") and one.get("short_factor") != one.get("long_factor"):
            original = one.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
        elif kind == "dynamic":
            limits.append(_named_context(config))
    return min((n for n in limits if n is not None), default=None)


def load_target(
    path: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    gpus: int = 1,
    tensor_parallel: int = 1,
) -> Target:
    """Open a causal language model and check that it can be a target.

    The check (draftsmith.target.pretrained) compares taps, final states and logits of a few random tokens with those of
    the model itself.

    Args:
        path: a local folder or a Hub name with safetensors, or a GGUF file.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's.
        device: where it runs.
        attn_implementation: of transformers; a class that has no "sdpa" gets "eager".
        trust_remote_code: run code that comes with the model.
        gpus: GPUs from `device` on that its layers are spread over; its states meet on the first.
        tensor_parallel: processes that share every layer, of more each group of so many; all of a group call everything alike.

    Raises:
        UserError: for a path, file or architecture that cannot be used.
    """
    model, directory, beside = open_model(
        path,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        gpus=gpus,
        tensor_parallel=tensor_parallel,
    )
    if beside:
        say(f"warning: {beside}.")
    target = Target(model, path=path, fingerprint=fingerprint_directory(directory), directory=directory)
    if odd := [one for one in target.eos_ids if not 0 <= one < target.vocab_size]:
        raise UserError(
            f"The target {path} ends its answers with the token {odd[0]}, but it has tokens 0 to {target.vocab_size - 1}: mend "
            "eos_token_id in its generation_config.json or config.json."
        )
    check_target(target)
    pack_linears(target.model)
    fuse_norms(target.model)
    return target


def check_layer_ids(layer_ids: Sequence[int], n: int, name: str, key: str = "head.layer_ids") -> None:
    """Raise UserError unless `layer_ids`, the value of `key`, is a non-empty, strictly ascending choice of 0..n-1, the layers of the
    target `name`."""
    named = f"{key} {list(layer_ids)} for the target {name}"
    if not layer_ids:
        raise UserError(f"{named}: give at least one layer, from 0 to {n - 1}.")
    if odd := [k for k in layer_ids if type(k) is not int]:
        raise UserError(f"{named}: {odd[0]!r} is no number of a layer; choose from 0 to {n - 1}.")
    if n in layer_ids:
        raise UserError(
            f"{named}: {n} is the number of layers, a state that serving engines read differently (before or after "
            f"the final norm, or as zeros); choose from 0 to {n - 1}."
        )
    if bad := [k for k in layer_ids if not 0 <= k < n]:
        raise UserError(f"{named}: {bad[0]} is out of range, the target has {n} layers; choose from 0 to {n - 1}.")
    if any(a >= b for a, b in itertools.pairwise(layer_ids)):
        raise UserError(f"{named}: every layer may be named once, in ascending order.")
