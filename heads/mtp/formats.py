"""The MTP layer in a target's own files: its names, reading it, and how such folders are recognised.

The files hold one decoder layer behind the target's N, under `model.layers.N.` (DeepSeek-V3, GLM-4.5 and others, as vLLM's
`deepseek_mtp.py` and transformers' `MtpModel` read it) or `mtp.` (Qwen3-Next, Qwen3.5; vLLM's `qwen3_next_mtp.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.weights import TensorSpan
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.files import CONFIG, read_config
from draftsmith.heads.formats.published import check_sizes, is_the_same
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import Schema, TensorRow, llama_layer, renamed
from draftsmith.heads.layers.from_target import derive_layer_config, final_norm_weight
from draftsmith.heads.mtp import MtpOptions
from draftsmith.heads.mtp.head import MtpHead, measure_norm
from draftsmith.target.folder import read_directory
from draftsmith.target.target import Target

REMEDY = "fetch the target again"
_LAYER = (*llama_layer("layers.0."), *(TensorRow(f"layers.0.self_attn.{part}_norm.weight") for part in "qk"))
_PARTS = ("fc", "enorm", "hnorm", "norm")
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of MTP layers."""


def _rows(layer: str, *names: str) -> tuple[TensorRow, ...]:
    """Return rows for the names of `_PARTS`, and for the decoder layer under `layer`."""
    own = (TensorRow(f"{name}.weight", f"{part}.weight") for part, name in zip(_PARTS, names, strict=True))
    return (*own, *renamed(_LAYER, {"layers.0.": layer}))


_N = "model.layers.{num_hidden_layers}."
DEEPSEEK = Schema("mtp", _rows(_N, *(f"{_N}{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))), {})
QWEN = Schema(
    "mtp_qwen",
    _rows("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    {},
)
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors under a layer's prefix that are the target's own again."""


def load_native(path: Path, target: Target, target_state: str = "after_norm") -> MtpHead:
    """Return the MTP layer in a folder of the target's files as a head that reads such states, fp32, on the target's device.

    Raises UserError for files without such a layer or with several, for a configuration that says otherwise, for other sizes than
    the target's, and for a layer that is not computed here.
    """
    config = read_config(path)
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    spans, layers = read_directory(path), config.get("num_hidden_layers")
    families = {f"model.layers.{layers}.": DEEPSEEK, "mtp.": QWEN}
    prefix = next((one for one in families if any(span.name.startswith(one) for span in spans)), None)
    count = next((config[key] for key in _COUNTS if config.get(key) is not None), None if prefix is None else 1)
    if prefix is None or count != 1:
        key = next((key for key in _COUNTS if config.get(key) is not None), _COUNTS[0])
        held = "its files hold none" if prefix is None else f"its files hold them under {prefix}, and a head is one"
        raise UserError(f"{path / CONFIG} says {key} {count!r}, but {held}: {REMEDY}, or take another target.")
    check_sizes(path, config, target, shapes=True)
    if (what := _not_computed(config, target)) is not None:
        raise UserError(
            f"{path / CONFIG} describes an MTP layer {what}, which is not computed here: serve it with the engine that it was made for, "
            "or train a head."
        )
    tensors = _read([span for span in spans if span.name.startswith(prefix)], path, target)
    for name, own in zip(_COPIES, (target.embedding, target.head.weight), strict=True):
        held_own = tensors.pop(prefix + name, None)
        if held_own is not None and not is_the_same(held_own, own):
            raise UserError(
                f"{path} holds its own {prefix}{name}, which is not the target's: such layers are not computed here; serve it with the "
                "engine that it was made for."
            )
    found = families[prefix].rename(tensors)
    gate = found.get("layers.0.mlp.gate_proj.weight")
    options = MtpOptions(
        qk_norm="layers.0.self_attn.q_norm.weight" in found,
        target_state=target_state,  # type: ignore[arg-type]
        intermediate_size=None if gate is None else len(gate),
    )
    with torch.device(target.device):
        head = measure_norm(MtpHead(options, derive_layer_config(options, target), target), target)
    if head.target_norm is not None:
        found["target_norm"] = head.target_norm
    fill(head, found, path, remedy=REMEDY)
    return head


def _not_computed(config: Mapping[str, Any], target: Target) -> str | None:
    """Return what an MTP layer of this configuration does that ours does not, None for nothing."""
    if config.get("mtp_hidden_states_first"):
        return "that reads states before embeddings (mtp_hidden_states_first)"
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"with the activation {act!r}"
    held, measured = getattr(getattr(target.decoder, "norm", None), "weight", None), final_norm_weight(target)
    if held is not None and measured is not None and float((measured - held.float()).abs().median()) > 0.5:
        return "whose norms are stored as differences from 1"
    return None


def _read(spans: list[TensorSpan], path: Path, target: Target) -> dict[str, Tensor]:
    """Return some tensors by name. Raises UserError for damaged files and quantized tensors."""
    tensors = {}
    for span in spans:
        with foreign_code(f"The weights {span.file} cannot be read", REMEDY), safe_open(span.file, "pt") as opened:
            value = opened.get_tensor(span.name).clone().to(target.device)
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise UserError(f"{path} holds {span.name} as {value.dtype}: give a target that is not quantized.")
        tensors[span.name] = value
    return tensors


def _unmeasured(path: Path, target: Target) -> MtpHead:
    raise UserError(
        f"{path} holds an MTP head in a target's files, and which of the target's states it reads does not stand there: "
        "`draftsmith import` with a recipe of that target measures it, and writes a head to give here."
    )


FORMATS = (
    Format("an MTP head", 20, lambda f: any("eh_proj" in n or n == "mtp.fc.weight" for n in f.names), _unmeasured),
)
