"""EAGLE-1 heads as EAGLE publishes them: a Llama configuration and one file of tensors.

EAGLE's own reader is `eagle/model/{ea_model,cnets1}.py`; vLLM and SGLang serve the same files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.eagle1 import Eagle1Head
from draftsmith.heads.eagle1_contract import FC_BIAS, OUTPUT_BIAS
from draftsmith.heads.eagle1_options import Eagle1Options
from draftsmith.heads.head_files import explain_config, read_config, read_weights
from draftsmith.heads.published import check_sizes, is_the_same, read_layer, tidy
from draftsmith.heads.target import Target

PROJECTION = "lm_head.weight"


def load_eagle1_directory(path: Path | str, target: Target) -> Eagle1Head:
    """Return the head in a directory of EAGLE's layout, fp32, on the target's device.

    The layer is what config.json says, its defaults those of a Llama configuration, RoPE included: where it names no
    rope_theta, that is 10000 whatever the target's, as EAGLE's own decoder and the engines take it. Biases of `fc` (in
    the first published heads) and of the projections (for Qwen2) are read where the file has them, unless EAGLE's keys
    `bias` and `qkv_bias` contradict it. An embedding that differs from the target's is kept; without one, the head
    reads the target's.

    Nothing in the files names the target: it is known by its sizes alone. Raises UserError for other sizes than the
    target's, more layers than one, and weights that are missing, damaged, surplus, misshapen or in need of code.
    """
    path = Path(path)
    config = read_config(path)
    check_sizes(path, config, target)
    file, found = read_weights(path, target.device)
    tensors = tidy(found, file, target)
    if "fc.weight" not in tensors:
        raise UserError(
            f"{file} lacks the tensor fc.weight, so it is no EAGLE-1 head: give the folder of a draft head."
        )
    _drop_the_targets_projection(tensors, file, target)
    for name in (FC_BIAS, OUTPUT_BIAS):
        if name in tensors and not config.get("bias") and not bool(tensors[name].any()):
            del tensors[name]  # SGLang's layout has zeros where the head has no bias
    head = _make_head(path, config, tensors, target)
    fill(head, tensors, file, remedy="fetch the head again")
    return head


def _drop_the_targets_projection(tensors: dict[str, Tensor], file: Path, target: Target) -> None:
    """Remove a projection that is the target's; refuse another one."""
    projection, own = tensors.pop(PROJECTION, None), target.head.weight
    if projection is not None and not is_the_same(projection, own):
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
    with explain_config(path, "Llama layer", "fetch the head again"), torch.device(target.device):
        return Eagle1Head(options, read_layer(config), target.embedding, target.head)
