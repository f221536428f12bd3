"""What a checkpoint's configuration says, judged before its weights are read: its values, its architecture, its quantization, and
whether the weights beside it are of the model that it describes.

transformers takes what stands there: a text as a size ends in a TypeError somewhere, zero heads in a division, a vocabulary of
10^12 in an allocation. What it cannot mean is refused here, by name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from draftsmith.errors import UserError
from draftsmith.fields import shown
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import read_object
from draftsmith.foreign.weights import BITS, TensorSpan

MOST_CONFIG_BYTES = 16 * 2**20
MOST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
UNQUANTIZED = "give the model that it was made from, in bfloat16, float16 or float32"
_MASKED = frozenset({"full_attention", "sliding_attention"})
"""Layers whose past a mask alone describes, so that a tree of drafts can be given one."""

_SIZES = (
    *("hidden_size", "n_embd", "d_model", "vocab_size", "ffn_dim", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "max_position_embeddings", "n_positions"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_NEEDED = ("hidden_size", "vocab_size", "num_attention_heads", *_LAYERS)
"""Sizes that may be left out, for the architecture's default, but not be null."""
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "initializer_range"),
    *("attention_dropout", "logit_scale", "logits_scaling", "final_logit_softcapping", "attn_logit_softcapping"),
)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = ("auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "is_encoder_decoder")


def read_model_config(folder: Path, what: str) -> dict[str, Any]:
    """Return config.json of a model's folder, its values checked.

    what: calls the model in the sentence, such as "the target". Raises UserError naming the key and its value.
    """
    file = folder / "config.json"
    config = read_object(file, f"fetch {what} again", most=MOST_CONFIG_BYTES, infinite=True)
    check_config_values(config, file, f"fetch {what} again or mend that value")
    return config


def check_config_values(config: Mapping[str, Any], file: Path, remedy: str, prefix: str = "") -> None:
    """Raise UserError, naming the key, for a value in a model's configuration that no model can have; also in text_config."""
    for names, fits, expected in _RULES:
        for name in names:
            value = config.get(name)
            if name in config and not (fits(value) or (value is None and name not in _NEEDED)):
                raise UserError(f"{file}: {prefix}{name} is {shown(value)}, but it must be {expected}: {remedy}.")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise UserError(
            f"{file}: {prefix}num_attention_heads {heads} is no multiple of num_key_value_heads {groups}: {remedy}."
        )
    # Else heads have sizes of their own.
    divided = config.get("head_dim") is None and config.get("kv_lora_rank") is None
    if divided and heads and (hidden := config.get("hidden_size")) and hidden % heads:
        raise UserError(
            f"{file}: {prefix}hidden_size {hidden} is no multiple of num_attention_heads {heads}: {remedy}."
        )
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if layers and kinds is not None and len(kinds) != layers:
        raise UserError(f"{file}: {prefix}layer_types names {len(kinds)} layers, num_hidden_layers {layers}: {remedy}.")
    for name in ("rope_scaling", "rope_parameters"):
        check_rope(config.get(name) or {}, file, remedy, f"{prefix}{name}.")
    if isinstance(inner := config.get("text_config"), Mapping):
        check_config_values(inner, file, remedy, f"{prefix}text_config.")


def check_rope(rope: Mapping[str, Any], file: Path, remedy: str, prefix: str) -> None:
    """Raise UserError, naming the key, for parameters of rotary embeddings that are no positive numbers; also per layer type."""
    for name, value in rope.items():
        if isinstance(value, Mapping):
            check_rope(value, file, remedy, f"{prefix}{name}.")
        elif name in ("rope_theta", "factor") and not (_is_number(value) and value > 0):
            raise UserError(f"{file}: {prefix}{name} is {shown(value)}, but it must be a number above 0: {remedy}.")
        elif name in ("rope_type", "type") and not isinstance(value, str):
            raise UserError(f"{file}: {prefix}{name} is {shown(value)}, but it must be a name: {remedy}.")


def check_causal(path: str, config: Any, trust_remote_code: bool) -> None:
    """Raise UserError unless the configuration is one of a causal, decoder-only language model whose past can be rolled back."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"The target {path} is an encoder-decoder model ({config.model_type}): "
            "choose a decoder-only causal language model."
        )
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    if config.model_type not in known and not trust_remote_code:
        raise UserError(
            f"The target {path} is of type {config.model_type!r}, not a causal language model: "
            "choose a decoder-only model that can generate text."
        )
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UserError(
            f"The target {path} of type {config.model_type!r} cannot be used: its attention weighs tokens by their distance in the cache "
            "(ALiBi), which is another one in a tree of drafts; choose a target with rotary or learned positions."
        )
    if getattr(config.get_text_config(decoder=True), "cross_attention_layers", None):
        raise UserError(
            f"The target {path} of type {config.model_type!r} cannot be used: some of its layers attend to an image alone, which a text "
            "does not have; choose a target whose layers read the text."
        )
    check_layer_types(path, config, _class_of(config))


def check_layer_types(path: str, config: Any, model_class: type | None) -> None:
    """Raise UserError, naming the types, where layers keep a state that no draft can be taken back from, or a past that is neither
    full nor a sliding window.

    model_class: of transformers or of the model's own code, None where it is not known yet.
    """
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    odd = sorted(set(types) - _MASKED)
    caches = {one: DYNAMIC_LAYER_TYPE_MAPPING.get(one, object) for one in odd}
    recurrent = [one for one, cache in caches.items() if issubclass(cache, LinearAttentionCacheLayerMixin)]
    # A class of hybrids may be configured without any layer that has a state.
    if recurrent or (getattr(model_class, "_is_stateful", False) and (odd or not types)):
        layers = f"layers of type {', '.join(recurrent or odd)}" if odd else "layers"
        raise UserError(
            f"The target {path} of type {config.model_type!r} cannot be used: its {layers} keep a running state that cannot be "
            "rolled back when drafts are rejected; choose a target whose layers are all attention."
        )
    if odd:
        raise UserError(
            f"The target {path} of type {config.model_type!r} has layers of type {', '.join(odd)}, whose past a draft tree cannot "
            "be given yet: choose another target."
        )


def attention_of(config: Any, asked: str) -> str:
    """Return the attention implementation to load a model with: eager for a class that transformers has no other for (Gemma 2's
    soft-capping, gpt-oss's sinks), else the one `asked`."""
    model_class: Any = _class_of(config)
    return "eager" if asked == "sdpa" and model_class is not None and not model_class._supports_sdpa else asked


def opener_of(config: Any) -> Any:
    """Return the class of transformers that opens such a model: one that reads images is read by its text alone."""
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return AutoModelForImageTextToText if config.model_type in images else AutoModelForCausalLM


def _class_of(config: Any) -> type | None:
    with foreign_code(f"transformers cannot open models of type {config.model_type!r}", "choose another target"):
        model_class = opener_of(config)._model_mapping.get(type(config), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


def check_quantization(path: str, config: Any) -> str | None:
    """Return the name of the format that a configuration says its weights are quantized in, None where they are not.

    Raises UserError for one that transformers does not read: it would take the packed numbers for weights.
    """
    spec = getattr(config, "quantization_config", None)
    if spec is None:
        return None
    spec = spec if isinstance(spec, Mapping) else spec.to_dict()
    bits = next((bits for bits in ("4bit", "8bit") if spec.get(f"load_in_{bits}")), None)
    name = spec.get("quant_method") if bits is None else f"bitsandbytes_{bits}"
    if isinstance(name, str) and name in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return name
    what = "a format without a name (no quant_method)" if name is None else f"the format {shown(name)}"
    raise UserError(
        f"The target {path} is quantized in {what}, which transformers does not read: {UNQUANTIZED}, or remove "
        "quantization_config from its config.json if its weights are not quantized."
    )


def how_to_read(quantized: str | None) -> str:
    """Return what to do where a target of such a format cannot be loaded, in words that follow the reason."""
    if quantized is None:
        return "fetch it again, or choose another"
    return f"it is quantized ({quantized}), so install what that format needs, or {UNQUANTIZED}"


def check_weights(config: Any, spans: Sequence[TensorSpan], file: Path) -> None:
    """Raise UserError where a configuration, named by its file, describes another model than the headers of the weights.

    Nothing is allocated for it. Weights in a quantized format may be packed, so that their shapes say nothing. A tensor that only
    one side has is not told here: transformers renames some while it loads.
    """
    text, quantized = config.get_text_config(decoder=True), getattr(config, "quantization_config", None) is not None
    if isinstance(layers := getattr(text, "num_hidden_layers", None), int) and layers > len(spans):
        raise UserError(
            f"{file}: num_hidden_layers is {layers}, but the weights beside it are {len(spans)} tensors: they are of "
            "different models; fetch the target again."
        )
    with foreign_code(f"{file} describes no model", "fetch the target again"), torch.device("meta"):
        model = opener_of(config).from_config(config, dtype=torch.float32)
        described = model.state_dict()
        parameters = sum(value.numel() for value in model.parameters())
    if not quantized:
        check_dtypes(str(file.parent), [span for span in spans if span.name in described], described)
        for span in spans:
            if span.name in described and (shape := tuple(described[span.name].shape)) != span.shape:
                raise UserError(
                    f"{span.file}: the tensor {span.name} has the shape {list(span.shape)}, but {file.name} describes "
                    f"{list(shape)}: they are of different models; fetch the target again."
                )
    # Down to 2 bits a weight (BitNet, GPTQ), and a projection that is tied may be left out.
    most = sum(s.size * 4 if _is_packed(s) else math.prod(s.shape) for s in spans)
    if parameters > 1.5 * most + 1_000_000:
        raise UserError(
            f"{file} describes a model of {parameters:.3g} parameters, but the weights beside it hold at most {most:.3g}: "
            "they are of different models, or some weights are missing; fetch the target again."
        )


def _is_packed(span: TensorSpan) -> bool:
    """Return whether a tensor on disk has the dtype of quantized weights."""
    return BITS[span.dtype] <= 8 or span.dtype.startswith(("I", "U"))


def check_dtypes(path: str, spans: Iterable[TensorSpan], held: Mapping[str, Tensor]) -> None:
    """Raise UserError for tensors on disk that are numbers of a quantized weight, where the model of state `held` takes floats and
    nothing says how to read them."""
    for span in spans:
        taken = held.get(span.name)
        if _is_packed(span) and (span.name.endswith("weight") if taken is None else taken.is_floating_point()):
            raise UserError(
                f"The target {path} holds {span.name} as {span.dtype}, numbers of a quantized weight, but config.json names no "
                f"quantization_config to read them with: {UNQUANTIZED}."
            )


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_SIZE


def _are_sizes(value: Any) -> bool:
    return all(map(_is_size, value)) and bool(value) if isinstance(value, list) else _is_size(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_id(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(type(one) is int and -1 <= one <= MOST_SIZE for one in ids)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SIZES, _is_size, f"a whole number from 1 to {MOST_SIZE}"),
    (("intermediate_size",), _are_sizes, f"a whole number from 1 to {MOST_SIZE}, or one for each layer"),
    (_LAYERS, lambda value: _is_size(value) and value <= MOST_LAYERS, f"a whole number from 1 to {MOST_LAYERS}"),
    (_NUMBERS, _is_number, "a finite number, not below 0"),
    (_IDS, _is_id, "a token id or a list of them"),
    (("model_type", "hidden_act", "hidden_activation", "activation_function"), _is_text, "a name"),
    (
        ("dtype", "torch_dtype"),
        lambda value: _is_text(value) and value.removeprefix("torch.") in _DTYPES,
        f"one of {', '.join(_DTYPES[1:])}",
    ),
    (
        ("architectures", "layer_types"),
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of names",
    ),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (
        ("rope_scaling", "rope_parameters", "text_config", "quantization_config"),
        lambda value: isinstance(value, dict),
        "an object",
    ),
)
"""Keys, what their values must be, and that in words."""
