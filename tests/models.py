"""Tiny random models of the architectures that targets come in, and options of small heads for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.target.target import Target

KINDS = ("llama", "qwen3", "gemma3", "mistral", "mixtral")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough that attention and logits are far from uniform.
    "initializer_range": 0.15,
}
_SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 16, "sliding_window_pattern": 4}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # Caches compressed keys and values (MLA), which differ in size.
    "deepseek": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        },
    ),
    # Dense, and all of each head turned by position.
    "glm4_moe": (
        "glm4_moe",
        {
            "first_k_dense_replace": 99,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    ),
    # Its last layers use the keys and values of earlier ones.
    "gemma3n": (
        "gemma3n_text",
        {
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 160,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "granite": ("granite", {"logits_scaling": 4.0}),
}

_BLOCK = {"layer_ids": [2, 4, 6], "block_size": 4, "mask_token_id": 0, "num_layers": 2, "anchors": 4}
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "dflash": _BLOCK,
    "dflash2": {**_BLOCK, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6},
    "domino": {**_BLOCK, "gru_hidden_dim": 6, "emb_dim": 4},
    "draft_model": {"num_hidden_layers": 1},
    "dspark": {**_BLOCK, "markov_rank": 4},
    "eagle1": {"aligned_passes": 3},
    "eagle3": {"layer_ids": [2, 4, 6], "ttt_steps": 3},
    "hydra": {"num_heads": 3, "prefix_attention": True},
    "jetspec": _BLOCK,
    "medusa": {"num_heads": 3},
    "medusa2": {"num_heads": 3, "lora_r": 4, "lora_dropout": 0.0},
    "mtp": {"qk_norm": True},
    "peagle": {"layer_ids": [2, 4, 6], "depths": 3, "num_hidden_layers": 2, "mask_token_id": 0},
    "xpress": {**_BLOCK, "xpress_rank": 6, "xpress_mlp_hidden": 10},
}
"""Options of a small head of three steps or more, by method; one that is not here has its own defaults."""


def tiny_model(kind: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal language model in fp32 and eval mode; `overrides` are keys of its config."""
    model_type, special = _SPECIAL[kind]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **special, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"  # transformers refuses sdpa for these
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is applied once too often
                torch.nn.init.normal_(parameter, mean=1.0 if parameter.mean() > 0.5 else 0.0, std=0.1)
    return model.eval()


def make_target(kind: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Target:
    """A tiny model as a target."""
    model = tiny_model(kind, **overrides)
    return Target(model if dtype == model.dtype else model.to(dtype), path="tiny", fingerprint="0")


def save_tiny_target(path: Path, kind: str, **kwargs: Any) -> str:
    """Save a tiny model (without a tokenizer) under `path` and return the path as a string."""
    tiny_model(kind, **kwargs).save_pretrained(path)
    return str(path)
