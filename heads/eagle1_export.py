"""EAGLE-1 heads into the layouts that engines read; back again it is `eagle1_layouts.load_eagle1_directory`.

Engines compute the drafts' logits with the target's projection. Its scale and softcap change no rank; a bias does, and
neither adds it (engines.py has the rule). Shapes: H hidden.
"""

import torch
from torch import Tensor

from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.eagle1 import Eagle1Head
from draftsmith.heads.eagle1_contract import FC_BIAS, OUTPUT_BIAS
from draftsmith.heads.eagle3_export import layer_keys
from draftsmith.heads.target import Target
from draftsmith.heads.token_scale import fold


def to_eagle1(head: Eagle1Head, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout that vLLM reads, the embeddings included."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        **layer_keys(head.config, request.dtype),
        "qkv_bias": head.options.qkv_bias,
        "logit_scale": float(target.head.scale),
    }
    return ModelFiles(config, _tensors(head, request), request.dtype)


def to_eagle1_sglang(head: Eagle1Head, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout that SGLang reads; biases that it has and the head has not are zeros."""
    tensors, biased = _tensors(head, request), head.options.qkv_bias
    nothing = torch.zeros(head.config.hidden_size, dtype=request.dtype, device=tensors["fc.weight"].device)
    tensors.setdefault(FC_BIAS, nothing)
    if biased:
        tensors[OUTPUT_BIAS] = nothing.clone()
    config = {"architectures": ["LlamaForCausalLMEagle"], **layer_keys(head.config, request.dtype)}
    return ModelFiles({**config, "attention_bias": biased}, tensors, request.dtype)


def _tensors(head: Eagle1Head, request: ExportRequest) -> dict[str, Tensor]:
    own, H = head.state_dict(), head.config.hidden_size
    own["fc.weight"] = fold(own["fc.weight"].detach(), slice(H), head.token_scale)
    return {name: value.detach().to(request.dtype) for name, value in own.items()}
