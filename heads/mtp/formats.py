"""The MTP layer in a target's own files: its names, reading it, and how such folders are recognised.

The files hold one decoder layer behind the target's N, under `model.layers.N.` (DeepSeek-V3, GLM-4.5 and others, as vLLM's
`deepseek_mtp.py` and transformers' `MtpModel` read it) or `mtp.` (Qwen3-Next, Qwen3.5; vLLM's `qwen3_next_mtp.py`).
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import read_object
from draftsmith.foreign.weights import TensorSpan, read_header
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.files import CONFIG, INDEX, read_config
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.published import check_sizes, is_the_same, uncomputed_attention
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import Export, ModelFiles, Schema, TensorRow, find_row, llama_layer, renamed
from draftsmith.heads.layers.from_target import derive_layer_config, final_norm_weight
from draftsmith.heads.mtp import MtpOptions
from draftsmith.heads.mtp.head import ROUTING_BIAS, MtpHead, measure_norm
from draftsmith.heads.record import RECORD, read_passport
from draftsmith.storage import write_json
from draftsmith.target.folder import read_directory, read_text_config, weight_files
from draftsmith.target.gguf_file import is_gguf
from draftsmith.target.target import Target

REMEDY = "fetch the target again"
FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LAYER = (*llama_layer("layers.0."), *(TensorRow(f"layers.0.self_attn.{part}_norm.weight") for part in "qk"))
_COMPRESSED = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
_OTHERS = (
    *(TensorRow(f"layers.0.self_attn.{name}.weight") for name in _COMPRESSED),
    *(TensorRow(f"layers.0.self_attn.{name}.bias") for name in ("q_a_proj", "kv_a_proj_with_mqa")),
    *(TensorRow(f"layers.0.self_attn.{part}_proj.bias") for part in "qkvo"),
    TensorRow("layers.0.mlp.gate.weight"),
    TensorRow(f"layers.0.mlp.gate.{ROUTING_BIAS}", dtype=torch.float32),
    *(
        TensorRow(f"layers.0.mlp.{which}.{part}_proj.weight")
        for which in ("experts.{i}", "shared_experts")
        for part in ("gate", "up", "down")
    ),
)
"""What layers of targets have that Llama's have not."""
_PARTS = ("fc", "enorm", "hnorm", "norm")
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of MTP layers."""


def _rows(layer: str, *names: str) -> tuple[TensorRow, ...]:
    """Return rows for the names of `_PARTS`, and for the decoder layer under `layer`."""
    own = (TensorRow(f"{name}.weight", f"{part}.weight") for part, name in zip(_PARTS, names, strict=True))
    # Optional, as files have one family's.
    return tuple(replace(row, optional=True) for row in (*own, *renamed((*_LAYER, *_OTHERS), {"layers.0.": layer})))


_N = "model.layers.{num_hidden_layers}."
DEEPSEEK = _rows(_N, *(f"{_N}{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")))
QWEN = _rows("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_BEYOND = tuple(row for row in (*DEEPSEEK, *QWEN) if row.ours in {other.name for other in _OTHERS})
_EXPERTS = "layers.0.mlp.experts."
_DECODERS = ("", "model.", "language_model.model.", "model.language_model.")
"""What the names of a decoder's layers begin with."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors under a layer's prefix that are the target's own again."""


def load_native(path: Path, target: Target, target_state: str = "after_norm") -> MtpHead:
    """Return the MTP layer in a folder of the target's files as a head that reads such states, fp32, on the target's device.

    Raises UserError for files without such a layer or with several, for a configuration that says otherwise, for other sizes than
    the target's, and for a layer that is not computed here.
    """
    config = read_config(path)
    config = {**config, **read_text_config(config)}
    spans, layers = read_directory(path), config.get("num_hidden_layers")
    prefix = _prefix(layers, [span.name for span in spans])
    count = next((config[key] for key in _COUNTS if config.get(key) is not None), None if prefix is None else 1)
    if prefix is None or count != 1:
        key = next((key for key in _COUNTS if config.get(key) is not None), _COUNTS[0])
        held = "its files hold none" if prefix is None else f"its files hold them under {prefix}, and a head is one"
        raise UserError(f"{path / CONFIG} says {key} {count!r}, but {held}: {REMEDY}, or take another target.")
    own_spans = [span for span in spans if span.name.startswith(prefix)]
    llama = uncomputed_attention(config) is None and not any(find_row(_BEYOND, span.name)[0] for span in own_spans)
    check_sizes(path, config, target, shapes=True, llama=llama)
    if (what := _not_computed(config, target, llama)) is not None:
        raise UserError(
            f"{path / CONFIG} describes an MTP layer {what}, which is not computed here: serve it with the engine that it was made for, "
            "or train a head."
        )
    tensors = {}
    for span in own_spans:
        with foreign_code(f"The weights {span.file} cannot be read", REMEDY), safe_open(span.file, "pt") as opened:
            value = opened.get_tensor(span.name).clone().to(target.device)
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise UserError(f"{path} holds {span.name} as {value.dtype}: give a target that is not quantized.")
        tensors[span.name] = value
    for name, own in zip(_COPIES, (target.embedding, target.head.weight), strict=True):
        held_own = tensors.pop(prefix + name, None)
        if held_own is not None and not is_the_same(held_own, own):
            raise UserError(
                f"{path} holds its own {prefix}{name}, which is not the target's: such layers are not computed here; serve it with the "
                "engine that it was made for."
            )
    found = MTP.rename(tensors)
    gate = found.get("layers.0.mlp.gate_proj.weight")
    options = MtpOptions(
        qk_norm=llama and "layers.0.self_attn.q_norm.weight" in found,
        layer=None if llama else "target",
        target_state=target_state,  # type: ignore[arg-type]
        intermediate_size=len(gate) if llama and gate is not None else None,
    )
    found = found if llama else _fused(found, path)
    with torch.device(target.device):
        head = measure_norm(MtpHead(options, derive_layer_config(options, target), target), target)
    if head.target_norm is not None:
        found["target_norm"] = head.target_norm
    fill(head, found, path, remedy=REMEDY)
    return head


def _prefix(layers: Any, names: Iterable[str]) -> str | None:
    """Return what the names of an MTP layer begin with among those of a target with so many layers, None where it has none."""
    known = (f"model.layers.{layers}.", "mtp.")
    return next((one for one in known if any(name.startswith(one) for name in names)), None)


def _fused(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return tensors in which all experts are one, as transformers holds them. Raises UserError where one is missing."""
    fused = {name: value for name, value in tensors.items() if not name.startswith(_EXPERTS)}
    count = len({name.removeprefix(_EXPERTS).split(".")[0] for name in tensors.keys() - fused.keys()})
    names = [[f"{_EXPERTS}{i}.{part}_proj.weight" for part in ("gate", "up", "down")] for i in range(count)]
    if missing := next((name for one in names for name in one if name not in tensors), None):
        raise UserError(f"{path} lacks the tensor {missing} of its MTP layer: {REMEDY}.")
    experts = [[tensors[name] for name in one] for one in names]
    if experts:
        fused[f"{_EXPERTS}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        fused[f"{_EXPERTS}down_proj"] = torch.stack([down for _, _, down in experts])
    return fused


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which each expert has its own, as files hold them."""
    apart = {name: value for name, value in tensors.items() if not name.startswith(_EXPERTS)}
    for name in tensors.keys() - apart.keys():
        parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
        for number, expert in enumerate(tensors[name]):
            pieces = zip(parts, expert.chunk(len(parts)), strict=True)
            apart |= {f"{_EXPERTS}{number}.{part}_proj.weight": piece for part, piece in pieces}
    return apart


def _not_computed(config: Mapping[str, Any], target: Target, llama: bool) -> str | None:
    """Return what an MTP layer of this configuration does that ours does not, None for nothing. llama: it is like Llama's."""
    if llama and (attention := uncomputed_attention(config)) is not None:
        return f"that {attention}"
    if config.get("mtp_hidden_states_first"):
        return "that reads states before embeddings (mtp_hidden_states_first)"
    if llama and (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"with the activation {act!r}"
    held, measured = getattr(getattr(target.decoder, "norm", None), "weight", None), final_norm_weight(target)
    # The parts of a target that a store keeps have the measured weight alone: there the export finds it.
    if (
        held is not None
        and not held.is_meta
        and measured is not None
        and float((measured - held.float()).abs().median()) > 0.5
    ):
        return "whose norms are stored as differences from 1"
    return None


def _contradiction(head: MtpHead, target: Target, spans: Mapping[str, TensorSpan], held: str | None) -> str | None:
    """Return what a target has otherwise than a head, by its configuration and by the shapes of the MTP layer that its files hold
    under `held`, or, with None, of its last layer, which engines build the MTP layer like."""
    options = MtpOptions(layer=head.options.layer, intermediate_size=head.config.intermediate_size)
    own = derive_layer_config(options, target)
    for key in _SIZES:
        if (value := getattr(own, key)) != (ours := getattr(head.config, key)):
            return f"has {key} {value}, and the head {ours}"
    layer = f"layers.{target.num_layers - 1}." if held is None else held
    parts = ((*name.partition(layer), span) for name, span in spans.items())
    theirs = {rest: span for before, found, rest, span in parts if found and before in _DECODERS}
    if not any(name.startswith("self_attn.") for name in theirs):
        return None  # an architecture with other names
    ours = {
        n.removeprefix("layers.0."): list(v.shape)
        for n, v in _apart(head.state_dict()).items()
        if n.startswith("layers.0.")
    }
    for name, span in theirs.items():
        if held is None and name not in ours and name.endswith((".weight", ".bias")):
            return f"holds {span.name}, and the head no such tensor"
        if name in ours and span.dtype in FLOAT_TYPES and list(span.shape) != ours[name]:
            return f"holds {span.name} of shape {list(span.shape)}, and the head one of {ours[name]}"
    lost = next((name for name in ours if name.endswith("_norm.weight") and name not in theirs), None)
    return None if lost is None else f"holds no {layer}{lost}, and the head does"


def _names_in_files(own: Iterable[str], table: tuple[TensorRow, ...], num_layers: int) -> dict[str, str]:
    """Return what a family's files call the tensors of an MTP layer, those of a head and those of a Llama layer. Raises UserError for one
    that they have no name for."""
    rows = {}
    for name in (*(row.ours for row in DEEPSEEK if row not in _BEYOND), *own):
        row, numbers = find_row(table, name, ours=True)
        if row is None:
            raise UserError(
                f"The head holds {name}, which MTP layers in files of targets have no name for: leave head.layer out, or train the "
                "method eagle3."
            )
        rows[name] = row.name.format(num_hidden_layers=num_layers, **numbers)
    return rows


def _unmeasured(path: Path, target: Target) -> MtpHead:
    raise UserError(
        f"{path} holds an MTP head in a target's files, and which of the target's states it reads does not stand there: "
        "`draftsmith import` with a recipe of that target measures it, and writes a head to give here."
    )


def _load_export(path: Path, target: Target) -> MtpHead:
    """As `load_native`, for states that the record of an export names."""
    passport = read_passport(path)
    facts = None if passport is None else passport.head
    return load_native(path, target, "after_norm" if facts is None or facts.last_state is None else facts.last_state)


class NativeSchema(Schema):
    """The target's own directory with its MTP layer replaced, or added under the names of the target's family.

    For a target that came from no folder, the layer alone.
    """

    def write(self, export: Export) -> ModelFiles:
        target, folder = export.target, _folder(export)
        spans = {} if folder is None else {span.name: span for span in read_directory(folder)}
        prefix = _prefix(target.num_layers, spans)
        qwen = prefix == "mtp." or (prefix is None and target.model_type.startswith(("qwen3_next", "qwen3_5")))
        own = {
            name: value
            for name, value in _apart(export.head.state_dict()).items()
            if name not in (EMBEDDING, "target_norm")
        }
        rows = _names_in_files(own, QWEN if qwen else DEEPSEEK, target.num_layers)
        strange = [
            span.name
            for span in spans.values()
            if prefix and span.name.startswith(prefix) and span.name.removeprefix(prefix) not in _COPIES
            if span.name not in rows.values() or span.dtype not in FLOAT_TYPES
        ]
        if strange:
            raise UserError(
                f"The target {target.path} holds {strange[0]}, so its own MTP layer is of another kind or quantized, and this head cannot "
                "take its place: measure it with draftsmith evaluate, or train the method eagle3."
            )
        written = self.values(export) if folder is None else read_config(folder)
        config = {**written, **read_text_config(written)}
        if prefix is None and read_text_config(written) is not written:
            raise UserError(
                f"The target {target.path} holds its language model in a larger one ({written.get('model_type')}) and came without an MTP "
                "layer, so no engine builds one there: train the method eagle3."
            )
        if (what := _not_computed(config, target, export.head.options.layer is None)) is not None:
            raise UserError(
                f"The configuration of the target {target.path} asks for an MTP layer {what}, which this head does not compute: "
                f"{'' if _not_computed(config, target, False) else 'set head.layer to target, or '}train the method eagle3."
            )
        assert isinstance(export.head, MtpHead)
        held = None if prefix is None else rows[_LAYER[0].name].removesuffix(_LAYER[0].name.removeprefix("layers.0."))
        if (what := _contradiction(export.head, target, spans, held)) is not None:
            raise UserError(
                f"The target {target.path} {what}, so this head cannot be its MTP layer: leave the sizes out of the recipe's head and set "
                "head.qk_norm as its layers have it or head.layer to target, or train the method eagle3."
            )
        weights = [rows[name] for name in own if not name.endswith(ROUTING_BIAS)]
        dtypes = {FLOAT_TYPES[spans[name].dtype] for name in weights if name in spans}
        dtype = dtypes.pop() if len(dtypes) == 1 else export.dtype
        if (count := max(config.get(key) or 0 for key in _COUNTS)) > 1:
            raise UserError(
                f"The configuration of the target {target.path} asks for {count} MTP layers, and this head is one: serve it with the layers "
                "that it came with, or train the method eagle3."
            )
        if not count:
            read_text_config(written)[_COUNTS[2] if qwen else _COUNTS[0]] = 1
        tensors = {
            rows[name]: value.detach().to(dtype if rows[name] in weights else torch.float32)
            for name, value in own.items()
        }
        return ModelFiles(written, tensors, dtype, copies=self.copies(export))

    def copies(self, export: Export) -> dict[str, Path]:
        folder, ours = _folder(export), (CONFIG, RECORD, "README.md")
        return (
            {}
            if folder is None
            else {f.name: f for f in sorted(folder.iterdir()) if f.is_file() and f.name not in ours}
        )

    def save(self, folder: Path, files: ModelFiles) -> None:
        """As `Schema.save`; files of the target's weights that hold no part of the layer are linked where that is possible."""
        # Those that the target is read from: others beside them are nobody's.
        weights = [file.name for file in weight_files(next(iter(files.copies.values())).parent)] if files.copies else []
        if not weights:
            super().save(folder, files)
            return
        write_json(folder / CONFIG, files.config)
        held = {name: {span.name for span in read_header(files.copies[name], REMEDY)} for name in weights}
        new = files.tensors.keys() - set[str]().union(*held.values())
        for name, source in files.copies.items():
            mine = held.get(name, set()) & files.tensors.keys() | (new if name == weights[-1] else set())
            if mine:
                with foreign_code(f"The weights {source} cannot be read", REMEDY), safe_open(source, "pt") as opened:
                    kept = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
                    metadata = opened.metadata()
                save_file(
                    {**kept, **{key: files.tensors[key].cpu().contiguous() for key in mine}}, folder / name, metadata
                )
            elif name == INDEX and new:
                index = read_object(source, REMEDY)
                index["weight_map"] |= dict.fromkeys(sorted(new), weights[-1])
                write_json(folder / name, index)
            else:
                _place(source, folder / name, link=name in held)


def _folder(export: Export) -> Path | None:
    return None if is_gguf(export.target.path) else export.target.directory


def _place(source: Path, destination: Path, *, link: bool) -> None:
    """Copy a file, or give it a second name where the disk can."""
    try:
        if link:
            os.link(source.resolve(), destination)
            return
    except OSError:
        pass  # another disk
    shutil.copyfile(source, destination)


MTP = NativeSchema(
    "mtp",
    (*DEEPSEEK, *QWEN),
    {
        "architectures": lambda export: export.target.identity.to_json()["architectures"],
        "model_type": attrgetter("target.model_type"),
        **{key: attrgetter(f"head.config.{key}") for key in _SIZES},
        "num_hidden_layers": attrgetter("target.num_layers"),
    },
)


_BEFORE_NORM = Rule(
    "head.target_state before_norm",
    "feeds the target's states behind the final norm to it",
    "train a head with after_norm, or measure it with draftsmith evaluate",
    lambda files, target, head: head.options.target_state == "before_norm",
    refused=True,
)
_AS_VLLM = Rule(
    "head.target_state vllm",
    "shows the first token to the layer, and feeds it its own normed outputs",
    "train it on with after_norm, or serve it with vLLM",
    lambda files, target, head: head.options.target_state == "vllm",
)
_ON_THE_EXPORT = "Start it on the export: it is the target's directory, and holds the draft."
_VLLM = Served(
    engines.start_vllm("mtp", native=True),
    rules=(_BEFORE_NORM,),
    caveats=(
        _ON_THE_EXPORT,
        "vLLM 0.32 hides the first token of a text from the layer and, for targets of the classes Glm4MoeForCausalLM and "
        "Glm4MoeLiteForCausalLM, feeds it its own outputs before the final norm from the second token on: a head with "
        "`head.target_state: vllm` is trained, measured and verified so; start it with another one and `num_speculative_tokens` 1, or "
        "measure whether more pay.",
        engines.path_decides("mtp"),
    ),
    needs="mtp",
    reserved=engines.RESERVED_PATH_WORDS,
)
_SGLANG = Served(engines.start_sglang("EAGLE", native=True), (_AS_VLLM,), caveats=(_ON_THE_EXPORT,), needs="mtp")
LAYOUTS = (Layout("mtp", MTP, _load_export, {"vllm": _VLLM, "sglang": _SGLANG}),)
FORMATS = (
    Format("an MTP head", 20, lambda f: any("eh_proj" in n or n == "mtp.fc.weight" for n in f.names), _unmeasured),
)
