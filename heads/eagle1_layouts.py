"""EAGLE-1 heads as EAGLE publishes them: a Llama configuration and one file of tensors.

EAGLE's own reader is `eagle/model/{ea_model,cnets1}.py`; vLLM and SGLang serve the same files.
"""

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import (
    CONFIG,
    EMBEDDING,
    PICKLED,
    WEIGHTS,
    borrows_embedding,
    fill,
    read_config,
    read_tensors,
)
from draftsmith.heads.eagle1 import Eagle1Head
from draftsmith.heads.eagle1_options import Eagle1Options
from draftsmith.heads.target import Target

PROJECTION = "lm_head.weight"
# What torch.load raises on bytes that are cut short or changed; there is no class for it.
_DAMAGED = (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError, struct.error)


def load_eagle1_directory(path: Path | str, target: Target) -> Eagle1Head:
    """Return the head in a directory of EAGLE's layout, fp32, on the target's device.

    The layer is what config.json says, its defaults those of a Llama configuration, RoPE included: where it names no
    rope_theta, that is 10000 whatever the target's, as EAGLE's own decoder and the engines take it. Biases of `fc` (in
    the first published heads) and of the projections (for Qwen2) are read where the file has them, unless EAGLE's keys
    `bias` and `qkv_bias` contradict it. An embedding that differs from the target's is kept; without one, the head
    reads the target's.

    Nothing in the files names the target: it is known by its sizes alone. Raises UserError for another layout, other
    sizes than the target's, more layers than one, and weights that are missing, damaged, surplus, misshapen or in
    need of code.
    """
    path = Path(path)
    config = read_config(path)
    _refuse_others(path, config)
    _check_sizes(path, config, target)
    file, tensors = _read_weights(path, target.device)
    if "fc.weight" not in tensors:
        raise UserError(
            f"{file} lacks the tensor fc.weight, so it is no EAGLE-1 head: give the folder of a draft head."
        )
    if name := next((n for n, value in tensors.items() if not value.is_floating_point()), None):
        raise UserError(f"{file} holds {name} as {tensors[name].dtype}: give a head that is not quantized.")
    _drop_what_the_target_has(tensors, file, target)
    head = _make_head(path, config, tensors, target)
    fill(head, tensors, file, remedy="fetch the head again")
    return head


def _refuse_others(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no head of EAGLE's, by its name where that is known."""
    words = f"{config.get('architectures')} {config.get('model_type')} {config.get('speculators_model_type')}".lower()
    kinds = {
        "Medusa": "medusa_num_heads" in config or "medusa" in words,
        "EAGLE-3": "draft_vocab_size" in config or "eagle3" in words,
        "speculators": "speculators_model_type" in config,
    }
    if kind := next((name for name, found in kinds.items() if found), None):
        raise UserError(
            f"{path / CONFIG} is not a draftsmith checkpoint but that of a published {kind} head, and only those of "
            "EAGLE-1 can be loaded yet: give the folder that training wrote; an engine's directory is no checkpoint."
        )
    if not {"hidden_size", "vocab_size"} <= config.keys():
        raise UserError(
            f"{path / CONFIG} is neither that of a draftsmith checkpoint (it names no method) nor that of a published head "
            "(it names no hidden_size and vocab_size): give the folder that training wrote, or that of an EAGLE-1 head."
        )


def _check_sizes(path: Path, config: Mapping[str, Any], target: Target) -> None:
    for key, value in {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}.items():
        if config.get(key) != value:
            raise UserError(
                f"{path / CONFIG} says {key} {config.get(key)}, but the target {target.path} has {value}: this is a draft "
                "for another target; give the one that it was made for."
            )
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise UserError(
            f"{path / CONFIG} says num_hidden_layers {layers}, but an EAGLE-1 head has one decoder layer: give the folder "
            "of such a head."
        )


def _read_weights(path: Path, device: torch.device) -> tuple[Path, dict[str, Tensor]]:
    """Return the file and the tensors in it; of a pickle, only what torch reads without running code."""
    file = path / PICKLED
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS, read_tensors(path, device)
    if not file.is_file():
        raise UserError(f"{path} holds no weights, neither {WEIGHTS} nor {PICKLED}: fetch the whole head.")
    try:
        tensors = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is damaged or holds more than tensors, which could run code when opened: fetch it again, or save "
            f"its tensors as {WEIGHTS}."
        ) from error
    except _DAMAGED as error:
        raise UserError(f"The weights {file} are damaged or cut short: fetch the head again.") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{file} holds no names with tensors: it is no EAGLE-1 head; give the folder of one.")
    return file, dict(tensors)


def _drop_what_the_target_has(tensors: dict[str, Tensor], file: Path, target: Target) -> None:
    """Remove an embedding and a projection that are the target's; refuse another projection."""
    if EMBEDDING in tensors and borrows_embedding(tensors[EMBEDDING], target):
        del tensors[EMBEDDING]
    projection, own = tensors.pop(PROJECTION, None), target.head.weight
    if projection is not None and not torch.equal(projection.to(own), own):
        raise UserError(
            f"{file} holds an {PROJECTION} that is not the target's, but EAGLE-1 heads draft with the target's own: give "
            "the target that it was made for, or another head."
        )


def _make_head(path: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target) -> Eagle1Head:
    """Return the head that `config` describes, weights still to be filled in."""
    options = Eagle1Options(
        fc_bias=bool(config.get("bias", "fc.bias" in tensors)),
        qkv_bias=bool(config.get("qkv_bias", "layers.0.self_attn.q_proj.bias" in tensors)),
    )
    try:
        layer = LlamaConfig.from_dict(config)
        if layer.num_attention_heads % layer.num_key_value_heads:
            raise ValueError(
                f"{layer.num_key_value_heads} key/value heads do not divide {layer.num_attention_heads} heads"
            )
        with torch.device(target.device):
            return Eagle1Head(options, layer, target.embedding, target.head)
    except (StrictDataclassError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{path / CONFIG} describes no Llama layer ({why}): fetch the head again.") from error
