"""The values in a model's config.json, checked before transformers builds anything of them.

transformers takes what stands there: a text as a size ends in a TypeError somewhere, zero heads in a division, a vocabulary of
10^12 in an allocation. What it cannot mean is refused here, by name, and the sizes are compared with the weights on disk.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.fields import shown
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.json import read_object
from draftsmith.foreign.tensors import BITS, TensorSpan
from draftsmith.target.taken import check_dtypes

MOST_CONFIG_BYTES = 16 * 2**20
MOST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000

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
    if config.get("head_dim") is None and heads and (hidden := config.get("hidden_size")) and hidden % heads:
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


def check_sizes(
    described: Mapping[str, tuple[int, ...]],
    parameters: int,
    spans: Sequence[TensorSpan],
    file: Path,
    *,
    quantized: bool,
) -> None:
    """Raise UserError where a configuration describes another model than the weights on disk, before it is allocated.

    described: name -> shape of the tensors of that model, which has so many `parameters`. quantized: weights may be packed, so
    that shapes say nothing. A tensor that only one side has is not told here: transformers renames some while it loads.
    """
    for span in spans:
        if not quantized and described.get(span.name, span.shape) != span.shape:
            raise UserError(
                f"{span.file}: the tensor {span.name} has the shape {list(span.shape)}, but {file.name} describes "
                f"{list(described[span.name])}: they are of different models; fetch the target again."
            )
    # Down to 4 bits a weight, and a projection that is tied may be left out.
    most = sum(
        s.size * 2 if s.dtype.startswith(("I", "U")) or BITS[s.dtype] <= 8 else math.prod(s.shape) for s in spans
    )
    if parameters > 1.5 * most + 1_000_000:
        raise UserError(
            f"{file} describes a model of {parameters:.3g} parameters, but the weights beside it hold at most {most:.3g}: "
            "they are of different models, or some weights are missing; fetch the target again."
        )


def check_weights(config: Any, spans: Sequence[TensorSpan], file: Path) -> None:
    """Raise UserError where a configuration, named by its file, and the headers of the weights are of different models.

    Nothing is allocated for it: a model that is too large for this machine, or for any, is told by its numbers.
    """
    text, quantized = config.get_text_config(decoder=True), getattr(config, "quantization_config", None) is not None
    if isinstance(layers := getattr(text, "num_hidden_layers", None), int) and layers > len(spans):
        raise UserError(
            f"{file}: num_hidden_layers is {layers}, but the weights beside it are {len(spans)} tensors: they are of "
            "different models; fetch the target again."
        )
    with foreign_code(f"{file} describes no model", "fetch the target again"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        described = model.state_dict()
        parameters = sum(value.numel() for value in model.parameters())
    if not quantized:
        check_dtypes(str(file.parent), [span for span in spans if span.name in described], described)
    check_sizes({name: tuple(x.shape) for name, x in described.items()}, parameters, spans, file, quantized=quantized)


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
