"""Medusa heads for engines: schemas, reading, layouts, and how such heads are recognised.

The layouts are the original one, that of TGI and that of vLLM (up to 0.32). The first two name neither sizes nor dtype: their
readers take them from the target. In names of tensors {i} is the head, {j} its block, {p} the head of a projection.

Heads may share the target's output projection. If that has a scale or a softcap, engines may leave it out, since the tokens keep
their rank and engines draft those that rank first. A bias changes the rank. Only the original code applies it, because it calls
the target's own module, so only its layout takes heads that share such a projection.
"""

import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.files import (
    CONFIG,
    INDEX,
    MEDUSA_PICKLED,
    MEDUSA_WEIGHTS,
    PICKLED,
    WEIGHTS,
    read_config,
    read_weights,
    weights_file,
)
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.published import check_width, is_the_same
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.schema import Export, Schema, TensorRow, renamed, target_reference
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.target.target import Target


class VllmSchema(Schema):
    """vLLM's, with a copy of the target's projection where the heads share it: vLLM does not ask the target for it."""

    def head_tensors(self, export: Export) -> dict[str, Tensor]:
        own, head = export.head.state_dict(), export.head
        return {**own, SHARED_PROJECTION: head.target_head.weight} if head.options.original_lm_head else own


SHARED_PROJECTION = "lm_heads.0.weight"
# The tensors by the head's names. Projections are there for all heads or for none: TGI uses the target's for every head, and vLLM
# leaves one random, in silence, where a single one is missing.
_TENSORS = (
    TensorRow("blocks.{i}.{j}.linear.weight"),
    TensorRow("blocks.{i}.{j}.linear.bias"),
    TensorRow("lm_heads.{p}.weight"),
)

# TGI reads these three keys. With architectures it would take the folder for another speculator, load none and fail at the first
# request; the original code, too, finds the layout by its absence.
MEDUSA_TGI = Schema(
    name="medusa_tgi",
    tensors=renamed(_TENSORS, {"blocks.": "", "lm_heads.{p}.": "{p}.{medusa_num_layers}."}),
    keys={
        "medusa_num_heads": attrgetter("head.options.num_heads"),  # those that the file lacks stay random in silence
        "medusa_num_layers": attrgetter("head.options.num_layers"),
        "base_model_name_or_path": lambda export: target_reference(export.target),  # which the reader loads from there
    },
    weights=MEDUSA_WEIGHTS,
)

# The layout of FasterDecoding/Medusa, which looks for a pickle alone; TensorRT-LLM converts it too. Without medusa_fc_bias a reader
# drops the blocks' biases in silence. For vLLM the layout is not enough: nothing there says that heads share the target's
# projection, and vLLM would leave theirs random.
MEDUSA = replace(MEDUSA_TGI, name="medusa", keys={**MEDUSA_TGI.keys, "medusa_fc_bias": True}, weights=MEDUSA_PICKLED)

# vLLM takes any key with num and heads, or num and layers, in its name for one of its own.
MEDUSA_VLLM = VllmSchema(
    name="medusa_vllm",
    tensors=renamed(_TENSORS, {"blocks.{i}.{j}.linear.": "blocks.{i}.layers.{j}."}),
    keys={
        "model_type": "medusa",  # how vLLM finds the configuration class
        "architectures": ["MedusaModel"],
        "hidden_size": attrgetter("head.hidden_size"),  # vLLM assumes 4096
        "vocab_size": attrgetter("head.vocab_size"),  # vLLM assumes 32001
        "num_heads": attrgetter("head.options.num_heads"),  # vLLM assumes 5, and uses as many as the tokens it drafts
        "num_hidden_layers": attrgetter("head.options.num_layers"),  # vLLM assumes 1
        "medusa_fc_bias": True,  # vLLM drops the blocks' biases in silence without it
        "original_lm_head": attrgetter("head.options.original_lm_head"),  # vLLM assumes a projection for each head
        "logit_scale": lambda export: (
            float(export.head.target_head.scale) if export.head.options.original_lm_head else 1.0
        ),
        "torch_dtype": attrgetter("dtype_name"),
    },
)


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
    for key, count in {"num_heads": heads, "num_hidden_layers": layers}.items():
        if (said := config.get(key, count)) != count:
            raise UserError(
                f"{path / CONFIG} says {key} {said!r}, but {file.name} holds {count}: fetch or export the heads again."
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
    plain = {name.removeprefix("medusa_heads.").removeprefix("medusa_head."): value for name, value in tensors.items()}
    native = MEDUSA_VLLM.rename(MEDUSA.rename(plain))
    depths = {name: int(m[1]) for name in plain if (m := re.fullmatch(r"\d+\.(\d+)\.weight", name))}
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


def _fill(native: dict[str, Tensor], target: Target, file: Path) -> MedusaHead:
    """Return the heads that the tensors make; those without projections use the target's."""
    heads, layers = _count(native, file)
    check_width(file, native["blocks.0.0.linear.weight"].shape[0], target)
    shared = not any(name.startswith("lm_heads.") for name in native)
    with torch.device(target.device):
        head = MedusaHead(MedusaOptions(heads, layers, shared), None, target)
    fill(head, native, file, remedy="fetch or export the heads again, or give the target that they were made for")
    return head


_SHARED_BIAS = Rule(
    "head.original_lm_head, for a target whose output projection has a bias",
    "leaves the bias out of the drafts",
    "train with head.original_lm_head false, or export the layout medusa for the original code",
    lambda files, target, head: head.options.original_lm_head and target.head.bias is not None,
)

_ORIGINAL = Served(
    engines.start_original("medusa"),
    rules=(
        Rule(
            "head.num_layers above 1",
            "makes all blocks of a head one module, so that only the last would count, in silence",
            "export the layout medusa_vllm for vLLM, or train with head.num_layers 1",
            lambda files, target, head: files.config["medusa_num_layers"] > 1,
            refused=True,  # the layout is this code's own
        ),
        Rule(
            "another head.num_heads than 5",
            "makes five heads whatever config.json says, in silence",
            "export the layout medusa_vllm for vLLM, or train with 5",
            lambda files, target, head: head.options.num_heads != 5,
        ),
    ),
    caveats=(
        "It looks for the target that the export names, and for its heads in a Llama or Mistral model of its own.",
    ),
)
_SHARED = Rule(
    "head.original_lm_head",
    "looks for a projection of each head in the file",
    "train with head.original_lm_head false",
    lambda files, target, head: head.options.original_lm_head,
)
_TGI = Served(
    engines.start_tgi,
    rules=(
        Rule(
            "head.num_layers above 1 and head.original_lm_head",
            "stops at more than one block beside the target's projection",
            "export the layout medusa_vllm for vLLM, or train with head.original_lm_head false",
            lambda files, target, head: head.options.original_lm_head and head.options.num_layers > 1,
        ),
        _SHARED_BIAS,
    ),
    caveats=("TGI loads the target that the export names.",),
)
_VLLM = Served(
    engines.start_vllm("medusa"),
    rules=(_SHARED_BIAS,),
    caveats=(
        "vLLM 0.33 removed Medusa: use 0.32 or older. " + engines.path_decides("medusa"),
        "vLLM drafts a chain, with at most as many tokens as heads.",
        engines.VLLM_SAME_GPUS,
    ),
    until="0.32",
    reserved=engines.RESERVED_PATH_WORDS,
)
_TENSORRT_LLM = Served(engines.start_tensorrt_llm_medusa, rules=(_SHARED,))

LAYOUTS = (
    Layout("medusa", MEDUSA, load_medusa_directory, {"medusa_original": _ORIGINAL, "tensorrt_llm": _TENSORRT_LLM}),
    Layout("medusa", MEDUSA_TGI, load_medusa_directory, {"tgi": _TGI}),
    Layout("medusa", MEDUSA_VLLM, load_medusa_vllm_directory, {"vllm": _VLLM}),
)


def _is_medusa(folder: HeadFolder) -> bool:
    """Known by its configuration or by its file, unless that lies beside a whole model whose configuration is silent."""
    named = "medusa_num_heads" in folder.config or "medusa" in folder.words
    weights, beside = weights_file(folder.path), any((folder.path / name).is_file() for name in (WEIGHTS, INDEX))
    return named or (weights is not None and "medusa" in weights.name and not beside)


def _is_medusa_for_vllm(folder: HeadFolder) -> bool:
    """vLLM finds the class by a name, and the weights where models have them."""
    weights = weights_file(folder.path)
    return "medusa" in folder.words and weights is not None and "medusa" not in weights.name


FORMATS = (
    Format("a Medusa head for vLLM", 7, _is_medusa_for_vllm, load_medusa_vllm_directory),
    Format("a Medusa head", 8, _is_medusa, load_medusa_directory),
)
