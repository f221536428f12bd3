"""Tiny targets in GGUF files, written with the gguf package as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers import CHATML, tiny_tokenizer
from tests.models import tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
MIXED = {"token_embd": Kind.Q8_0, "attn_q": Kind.F16, "ffn_down": Kind.BF16, "": Kind.Q4_1}
"""Types of tensors by a part of their names; matrices alone are quantized."""


def tiny_llama(layers: int = 3, **config: Any) -> PreTrainedModel:
    """A random Llama with a row for each token of `tiny_tokenizer`."""
    return tiny_model("llama", num_hidden_layers=layers, vocab_size=len(tiny_tokenizer()), **config)


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a Llama's tensor."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rotate(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key projection in llama.cpp's order, which pairs neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def stored(model: PreTrainedModel, kinds: Mapping[str, Kind]) -> dict[str, tuple[np.ndarray, Kind]]:
    """Return name -> the numbers of a tensor as stored, and their type."""
    config, found = model.config, {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("q_proj.weight"):
            value = rotate(value, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            value = rotate(value, config.num_key_value_heads)
        kind = next((kind for part, kind in kinds.items() if part in gguf_name(name)), Kind.F32)
        kind = kind if value.ndim > 1 else Kind.F32
        found[gguf_name(name)] = gguf.quants.quantize(value.float().numpy(), kind), kind
    return found


def dequantized(model: PreTrainedModel, kinds: Mapping[str, Kind]) -> dict[str, Tensor]:
    """Return a model's tensors as `write_gguf` stores them, in float32: a slow oracle of what is read."""
    found = {name: torch.tensor(gguf.quants.dequantize(*pair)) for name, pair in stored(model, kinds).items()}
    config, tensors = model.config, {}
    for name in model.state_dict():
        value = found[gguf_name(name if gguf_name(name) in found else "model.embed_tokens.weight")]
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        tensors[name] = value
    return tensors


def write_gguf(
    file: Path,
    model: PreTrainedModel | None = None,
    kinds: Mapping[str, Kind] = MIXED,
    *,
    template: str | None = CHATML,
    change: Callable[[dict[str, Any], dict[str, tuple[np.ndarray, Kind]]], object] | None = None,
) -> PreTrainedModel:
    """Write a Llama with `tiny_tokenizer` and return it; change: of the metadata and the tensors before they are written."""
    model = model or tiny_llama()
    config, metadata, tensors = model.config, {"general.name": "tiny"}, stored(model, kinds)
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }.items():
        metadata[f"llama.{key}"] = value
    metadata |= tokenizer_keys(template)
    architecture = {"general.architecture": "llama"}
    if change is not None:
        change(metadata, tensors)
    architecture["general.architecture"] = metadata.pop("general.architecture", "llama")
    writer = gguf.GGUFWriter(file, architecture["general.architecture"])
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, (numbers, kind) in tensors.items():
        writer.add_tensor(name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def tokenizer_keys(template: str | None) -> dict[str, Any]:
    """Return the metadata of `tiny_tokenizer`."""
    tokenizer = tiny_tokenizer(template)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(range(len(tokenizer))),
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in range(len(tokenizer))],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
    }
    return found if template is None else found | {"tokenizer.chat_template": template}
