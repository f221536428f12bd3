"""Medusa heads in and out of the layouts that engines read.

Engines draft the tokens that rank first, so the target's scale and softcap, which change no rank, are none of theirs
where heads share its projection; a bias is, and only the original layout, whose reader calls the target's own module,
can hold heads on such a projection. Shapes: H target hidden, V target vocab.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import CONFIG, WEIGHTS, fill, read_config, read_tensors
from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.eagle3_export import target_reference
from draftsmith.heads.medusa import MedusaHead
from draftsmith.heads.medusa_layouts import MEDUSA_WEIGHTS
from draftsmith.heads.medusa_options import MedusaOptions
from draftsmith.heads.target import Target

SHARED_PROJECTION = "lm_heads.0.weight"


def to_medusa(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the original layout."""
    files = _original(head, target, request)
    files.config["medusa_fc_bias"] = True
    return files


def to_medusa_tgi(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to TGI's layout. Raises UserError for a projection that TGI could not compute."""
    _check_shared_projection(head, "medusa_tgi", "TGI")
    return _original(head, target, request)


def to_medusa_vllm(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout of vLLM up to 0.32. Raises UserError for a projection that it could not compute."""
    _check_shared_projection(head, "medusa_vllm", "vLLM")
    shared, dtype = head.options.original_lm_head, request.dtype
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "num_heads": head.options.num_heads,
        "num_hidden_layers": head.options.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "logit_scale": float(head.target_head.scale) if shared else 1.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    tensors = {
        re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): value.detach().to(dtype)
        for name, value in head.state_dict().items()
    }
    if shared:
        tensors[SHARED_PROJECTION] = head.target_head.weight.to(dtype)
    return ModelFiles(config, tensors, dtype)


def load_medusa_directory(path: Path | str, target: Target) -> MedusaHead:
    """Return the heads in a directory of the original layout or TGI's, fp32, on the target's device.

    Without projections in the file all heads use the target's. Raises UserError for anything missing or misshapen.
    """
    path = Path(path)
    config, tensors = read_config(path), read_tensors(path, target.device, MEDUSA_WEIGHTS)
    heads, layers = (_count(path, config, key) for key in ("medusa_num_heads", "medusa_num_layers"))
    projection = re.compile(rf"^(\d+)\.{layers}\.weight$")
    own = any(projection.match(name) for name in tensors)
    native = {
        f"lm_heads.{match[1]}.weight" if (match := projection.match(name)) else f"blocks.{name}": value
        for name, value in tensors.items()
    }
    return _fill(MedusaOptions(heads, layers, not own), target, native, path / MEDUSA_WEIGHTS)


def load_medusa_vllm_directory(path: Path | str, target: Target) -> MedusaHead:
    """Return the heads in a directory of vLLM's layout, fp32, on the target's device.

    Raises UserError for anything missing or misshapen, for blocks without biases, and for a shared projection that
    is not the target's.
    """
    path = Path(path)
    config, tensors = read_config(path), read_tensors(path, target.device)
    heads, layers = (_count(path, config, key) for key in ("num_heads", "num_hidden_layers"))
    shared = bool(config.get("original_lm_head", False))
    native = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2.linear.", name): value
        for name, value in tensors.items()
    }
    if shared:
        held = native.pop(SHARED_PROJECTION, None)
        if held is None or not torch.equal(held, target.head.weight.to(held.dtype)):
            raise UserError(
                f"{path / WEIGHTS} {'lacks' if held is None else 'holds another projection than the target in'} the "
                f"tensor {SHARED_PROJECTION}, though original_lm_head is true: export the heads again for this target."
            )
    return _fill(MedusaOptions(heads, layers, shared), target, native, path / WEIGHTS)


def _original(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    options = head.options
    tensors = {
        re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{options.num_layers}.", name.removeprefix("blocks.")): value.detach()
        for name, value in head.state_dict().items()
    }
    config = {
        "medusa_num_heads": options.num_heads,
        "medusa_num_layers": options.num_layers,
        "base_model_name_or_path": target_reference(target),
    }
    sizes = {"H": head.hidden_size, "V": head.vocab_size, "projections": len(head.lm_heads)}
    rounded = {name: value.to(request.dtype) for name, value in tensors.items()}
    return ModelFiles(config, rounded, request.dtype, MEDUSA_WEIGHTS, sizes)


def _check_shared_projection(head: MedusaHead, layout: str, engine: str) -> None:
    if head.options.original_lm_head and head.target_head.bias is not None:
        raise UserError(
            f"The layout {layout} cannot hold heads on the projection of this target, which has a bias that {engine} "
            "would leave out in silence: train with head.original_lm_head false, or export the layout medusa."
        )


def _count(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UserError(f"{path / CONFIG} says {key} {value!r}: it must be a number of at least 1; export again.")
    return value


def _fill(options: MedusaOptions, target: Target, tensors: dict[str, Tensor], source: Path) -> MedusaHead:
    with torch.device(target.device):
        head = MedusaHead(options, target.head)
    fill(head, tensors, source)
    return head
