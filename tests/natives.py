"""Tiny targets whose own files hold an MTP layer, in the names of two families."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

LAYERS = 2
NAMES = {
    "qwen3": {
        "fc": "mtp.fc",
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
        "layers.0": "mtp.layers.0",
    },
    "glm4_moe": {
        "fc": f"model.layers.{LAYERS}.eh_proj",
        "enorm": f"model.layers.{LAYERS}.enorm",
        "hnorm": f"model.layers.{LAYERS}.hnorm",
        "norm": f"model.layers.{LAYERS}.shared_head.norm",
        "layers.0": f"model.layers.{LAYERS}",
    },
}
"""By kind of the target: parts of our head -> what the family calls them."""
COUNT = {"qwen3": "mtp_num_hidden_layers", "glm4_moe": "num_nextn_predict_layers"}


def theirs(kind: str, name: str) -> str:
    """Return the family's name of one of our tensors."""
    part = next(part for part in NAMES[kind] if name.startswith(f"{part}."))
    return NAMES[kind][part] + name.removeprefix(part)


def native_model(kind: str, **overrides: Any) -> PreTrainedModel:
    """A model whose final norm changes directions, so that states behind it and before it are no substitutes."""
    model = tiny_model(kind, **{"vocab_size": len(tiny_tokenizer()), "num_hidden_layers": LAYERS, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model.model.norm.weight.data.normal_().exp_()
    return model


EXPERTS = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
OWN_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek", EXPERTS),
    "glm4_moe": ("glm4_moe", {**EXPERTS, **HALF}),
    "glm4_dense": ("glm4_moe", HALF),
    # Whose state does not split into heads, as GLM-4.5's.
    "glm4_wide": ("glm4_moe", {**EXPERTS, **HALF, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}),
}
"""Targets whose MTP layers are no Llama layers: (kind, keys of their config)."""


@torch.no_grad()
def save_own_layer(folder: Path, case: str, ids: Tensor, target_state: str = "after_norm", **overrides: Any) -> Path:
    """Save a target with an MTP layer that transformers wrote as a layer of a model. Without what its attention and experts add, its
    first drafts on `ids` would be those of `knowing_layer`."""
    kind, keys = OWN_LAYERS[case]
    model = native_model(kind, num_hidden_layers=LAYERS + 1, eos_token_id=None, **keys, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(std=0.2)
    for name, value in model.model.layers[LAYERS].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            value *= 0.3
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS
    ends = knowing_ends(model, ids, target_state)
    add_tensors(folder, {theirs("glm4_moe", name): value for name, value in ends.items()})
    set_keys(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return folder


@torch.no_grad()
def knowing_layer(model: PreTrainedModel, ids: Tensor, target_state: str) -> dict[str, Tensor]:
    """Return an MTP layer, by our names, whose first drafts on the text `ids` [n <= 64] are all the target's choice if it reads such
    states: behind attention and feed-forward that add nothing it makes the target's next state before its norm of each state."""
    config = model.config
    H, D = config.hidden_size, config.head_dim
    sizes = {
        "q_proj": (config.num_attention_heads * D, H),
        "k_proj": (config.num_key_value_heads * D, H),
        "v_proj": (config.num_key_value_heads * D, H),
    }
    generator = torch.Generator().manual_seed(1)
    layer = {f"self_attn.{n}": torch.randn(size, generator=generator) for n, size in sizes.items()}
    layer |= {"self_attn.o_proj": torch.zeros(H, sizes["q_proj"][0]), "mlp.down_proj": torch.zeros(H, 96)}
    layer |= {f"mlp.{n}_proj": torch.randn(96, H, generator=generator) for n in ("gate", "up")}
    layer |= {n: torch.rand(H, generator=generator) + 0.5 for n in ("input_layernorm", "post_attention_layernorm")}
    layer |= {f"self_attn.{n}_norm": torch.rand(D, generator=generator) + 0.5 for n in "qk"}
    ends = knowing_ends(model, ids, target_state, generator)
    return {**ends, **{f"layers.0.{name}.weight": value for name, value in layer.items()}}


@torch.no_grad()
def knowing_ends(
    model: PreTrainedModel, ids: Tensor, target_state: str, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Return what is around the decoder layer of `knowing_layer`."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    last = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
    hook.remove()
    before, H = seen[0], model.config.hidden_size
    read = before if target_state == "before_norm" else last
    unit = read * read.square().mean(-1, keepdim=True).rsqrt()
    wanted = torch.linalg.lstsq(unit[:-1].double(), before[1:].double()).solution.T.float()
    generator = generator or torch.Generator().manual_seed(1)
    return {
        "fc.weight": torch.cat([torch.zeros(H, H), wanted], -1),
        "enorm.weight": torch.rand(H, generator=generator) + 0.5,
        "hnorm.weight": torch.ones(H),
        "norm.weight": model.model.norm.weight.clone(),
    }


def save_native(folder: Path, kind: str, tensors: dict[str, Tensor], model: PreTrainedModel, **keys: Any) -> Path:
    """Save a target with the tensors of its MTP layer, by our names, and a tokenizer. keys: of config.json, in place of what it says."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    add_tensors(folder, {theirs(kind, name): value for name, value in tensors.items()})
    set_keys(folder, **{COUNT[kind]: 1, **keys})
    return folder


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put tensors into the file of a saved model."""
    file = folder / "model.safetensors"
    held = {**load_file(file), **tensors}
    save_file({name: value.contiguous() for name, value in held.items()}, file, {"format": "pt"})


def set_keys(folder: Path, **keys: Any) -> None:
    """Change keys of a saved config.json; None takes one out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
