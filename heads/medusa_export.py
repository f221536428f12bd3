"""Medusa heads in and out of the layouts that engines read.

Engines draft the tokens that rank first, so the target's scale and softcap, which change no rank, are none of theirs
where heads share its projection; a bias is, and only the original layout, whose reader calls the target's own module,
can hold heads on such a projection. Shapes: H target hidden, V target vocab.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.eagle3_export import target_reference
from draftsmith.heads.head_files import (
    CONFIG,
    INDEX,
    MEDUSA_PICKLED,
    MEDUSA_WEIGHTS,
    PICKLED,
    WEIGHTS,
    read_config,
    read_weights,
)
from draftsmith.heads.medusa import MedusaHead
from draftsmith.heads.medusa_options import MedusaOptions
from draftsmith.heads.published import is_the_same
from draftsmith.heads.target import Target

SHARED_PROJECTION = "lm_heads.0.weight"


def to_medusa(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the original layout."""
    files = _original(head, target, request)
    files.config["medusa_fc_bias"] = True
    return files


def to_medusa_tgi(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to TGI's layout."""
    return _original(head, target, request)


def to_medusa_vllm(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout of vLLM up to 0.32."""
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

    The file says how many heads and blocks there are, not config.json: published configurations name fewer heads than
    their files hold (the original code would drop the others, which are trained), and more would be random. Without
    projections in the file (the published v2) all heads use the target's. Raises UserError for anything missing in
    between, unknown or misshapen, and for heads of another target's sizes.
    """
    file, tensors = read_weights(Path(path), target.device, (MEDUSA_WEIGHTS, MEDUSA_PICKLED))
    return _fill(_native(tensors, file), target, file)


def load_medusa_vllm_directory(path: Path | str, target: Target) -> MedusaHead:
    """Return the heads in a directory of vLLM's layout, fp32, on the target's device.

    Blocks without biases, which vLLM builds unless medusa_fc_bias is true, get biases of zero. Raises UserError for
    anything missing or misshapen, where config.json, which vLLM goes by, names other numbers of heads or blocks than the
    file holds, and for a shared projection that is not the target's.
    """
    path = Path(path)
    config = read_config(path)
    file, tensors = read_weights(path, target.device, (WEIGHTS, INDEX, PICKLED))
    native = _native(tensors, file)
    heads, layers = _count(native, file)
    for key, found in {"num_heads": heads, "num_hidden_layers": layers}.items():
        if (said := config.get(key, found)) != found:
            raise UserError(
                f"{path / CONFIG} says {key} {said!r}, but {file.name} holds {found}: fetch or export the heads again."
            )
    if config.get("original_lm_head", False):
        held = native.pop(SHARED_PROJECTION, None)
        if held is None or not is_the_same(held, target.head.weight):
            raise UserError(
                f"{file} {'lacks' if held is None else 'holds another projection than the target in'} the tensor "
                f"{SHARED_PROJECTION}, though original_lm_head is true: export the heads again for this target."
            )
    elif not any(name.startswith("lm_heads.") for name in native):
        raise UserError(
            f"{file} holds no projections, though original_lm_head is not true in {CONFIG}: fetch or export the heads again."
        )
    if not config.get("medusa_fc_bias", False) and not any(name.endswith(".bias") for name in native):
        blocks = {name: value for name, value in native.items() if name.startswith("blocks.")}
        native |= {n.removesuffix("weight") + "bias": value.new_zeros(len(value)) for n, value in blocks.items()}
    return _fill(native, target, file)


def _native(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors of either layout under the names of `MedusaHead`; vLLM reads the original names too.

    Raises UserError where there are no blocks, and where blocks are missing before others.
    """
    native, depths = {}, {}
    for name, value in tensors.items():
        plain = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        if projection := re.fullmatch(r"(\d+)\.(\d+)\.weight", plain):
            plain, depths[name] = f"lm_heads.{projection[1]}.weight", int(projection[2])
        for pattern in (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"):
            plain = re.sub(f"^{pattern}$", r"blocks.\1.\2.linear.\3", plain)
        native[plain] = value
    heads, layers = _count(native, file)
    wanted = (f"blocks.{i}.{j}.linear.weight" for i in range(heads) for j in range(layers))
    if missing := next((name for name in wanted if name not in native), None):
        raise UserError(f"{file} lacks the tensor {missing} (by the names here): fetch or export the heads again.")
    if odd := next((name for name, depth in depths.items() if depth != layers), None):
        raise UserError(
            f"{file} holds the projection {odd}, but its heads have {layers} blocks: fetch or export the heads again."
        )
    return native


def _count(native: dict[str, Tensor], file: Path) -> tuple[int, int]:
    """Return how many heads there are and how many blocks each has, by the highest numbers in the names."""
    blocks = [(int(m[1]), int(m[2])) for name in native if (m := re.match(r"blocks\.(\d+)\.(\d+)\.linear\.", name))]
    projections = [int(m[1]) for name in native if (m := re.fullmatch(r"lm_heads\.(\d+)\.weight", name))]
    if not blocks:
        raise UserError(f"{file} holds no Medusa head, whose blocks are {{i}}.{{j}}.linear: give the folder of one.")
    return 1 + max([i for i, _ in blocks] + projections), 1 + max(j for _, j in blocks)


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


def _fill(native: dict[str, Tensor], target: Target, file: Path) -> MedusaHead:
    """Return the heads that the tensors make; those without projections use the target's."""
    heads, layers = _count(native, file)
    width = native["blocks.0.0.linear.weight"].shape[0]
    if width != target.hidden_size:
        raise UserError(
            f"{file} holds heads of width {width}, but the target {target.path} has {target.hidden_size} hidden units: give "
            "the target that they were made for."
        )
    shared = not any(name.startswith("lm_heads.") for name in native)
    with torch.device(target.device):
        head = MedusaHead(MedusaOptions(heads, layers, shared), target.head)
    fill(head, native, file, remedy="fetch or export the heads again, or give the target that they were made for")
    return head
