"""Medusa heads for engines: contracts, conversion both ways, layouts, and how such heads are recognised.

The layouts are the original one, that of TGI and that of vLLM (up to 0.32). Symbols in shapes: H target hidden, V target
vocab, heads, layers (blocks per head), projections (output projections in the file). The first two layouts name neither
sizes nor dtype: their readers take them from the target.

Engines draft the tokens that rank first, so the target's scale and softcap, which change no rank, are none of theirs
where heads share its projection; a bias is, and only the original layout, whose reader calls the target's own module,
can hold heads on such a projection.
"""

import re
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
from draftsmith.heads.formats.contracts import (
    Config,
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
    TensorRule,
    target_reference,
)
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.published import check_width, is_the_same
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.heads.medusa.options import MedusaOptions
from draftsmith.target.target import Target


def _sizes(config: Config) -> dict[str, int]:
    return {"heads": config["medusa_num_heads"], "layers": config["medusa_num_layers"]}


def _vllm_sizes(config: Config) -> dict[str, int]:
    heads = config["num_heads"]
    projections = 1 if config["original_lm_head"] else heads
    own = {"heads": heads, "layers": config["num_hidden_layers"], "projections": projections}
    return {"H": config["hidden_size"], "V": config["vocab_size"], **own}


_TENSORS = (
    TensorRule("{i}.{j}.linear.weight", ("H", "H")),
    TensorRule("{i}.{j}.linear.bias", ("H",)),
    # All or none: TGI uses the target's projection for every head, in silence, where a single one is missing.
    TensorRule("{p}.{layers}.weight", ("V", "H")),
)
_RANGES = {"i": "heads", "j": "layers", "p": "projections"}
_HEADS = KeyRule("medusa_num_heads", int, "the heads; those that the file lacks stay random in silence")
_BLOCKS = KeyRule("medusa_num_layers", int, "the blocks of each head")
_BASE = KeyRule("base_model_name_or_path", str, "the target, which the reader loads from there")

# The layout of FasterDecoding/Medusa, with safetensors for its pickle; TensorRT-LLM converts it too. For vLLM it is
# not enough: nothing there says that heads share the target's projection, and vLLM would leave theirs random.
MEDUSA = Contract(
    name="medusa",
    tensors=_TENSORS,
    keys=(
        _HEADS,
        _BLOCKS,
        _BASE,
        KeyRule("medusa_fc_bias", bool, "a reader that does not find it drops the blocks' biases in silence", True),
    ),
    sizes=_sizes,
    ranges=_RANGES,
    forbidden={"architectures": "readers find the layout by its absence"},
)

MEDUSA_TGI = Contract(
    name="medusa_tgi",
    tensors=_TENSORS,
    keys=(_HEADS, _BLOCKS, _BASE),
    sizes=_sizes,
    ranges=_RANGES,
    forbidden={"architectures": "TGI would take it for another speculator, load none and fail at the first request"},
    closed="TGI reads three keys",
)

MEDUSA_VLLM = Contract(
    name="medusa_vllm",
    tensors=(
        TensorRule("blocks.{i}.layers.{j}.weight", ("H", "H")),
        TensorRule("blocks.{i}.layers.{j}.bias", ("H",)),
        # vLLM leaves a missing one random in silence. The shared one is a copy: it does not ask the target for it.
        TensorRule("lm_heads.{p}.weight", ("V", "H")),
    ),
    keys=(
        KeyRule("model_type", str, "how vLLM finds the configuration class", "medusa"),
        KeyRule("architectures", list, "how vLLM finds the model class", ["MedusaModel"]),
        KeyRule("hidden_size", int, "H; vLLM assumes 4096"),
        KeyRule("vocab_size", int, "V; vLLM assumes 32001"),
        KeyRule("num_heads", int, "the heads; vLLM assumes 5, and uses as many as the tokens it drafts"),
        KeyRule("num_hidden_layers", int, "the blocks of each head; vLLM assumes 1"),
        KeyRule("medusa_fc_bias", bool, "vLLM drops the blocks' biases in silence without it", True),
        KeyRule("original_lm_head", bool, "one projection for all heads; vLLM assumes one for each"),
        KeyRule("logit_scale", float, "vLLM multiplies the logits by it"),
        KeyRule("torch_dtype", str, "the dtype of every tensor"),
    ),
    sizes=_vllm_sizes,
    ranges=_RANGES,
    closed="vLLM takes any key with num and heads, or num and layers, in its name for one of its own",
)


SHARED_PROJECTION = "lm_heads.0.weight"


def to_medusa(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the original layout."""
    files = to_medusa_tgi(head, target, request)
    files.config["medusa_fc_bias"] = True
    return files


def to_medusa_tgi(head: MedusaHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to TGI's layout."""
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


def _fill(native: dict[str, Tensor], target: Target, file: Path) -> MedusaHead:
    """Return the heads that the tensors make; those without projections use the target's."""
    heads, layers = _count(native, file)
    check_width(file, native["blocks.0.0.linear.weight"].shape[0], target)
    shared = not any(name.startswith("lm_heads.") for name in native)
    with torch.device(target.device):
        head = MedusaHead(MedusaOptions(heads, layers, shared), target.head)
    fill(head, native, file, remedy="fetch or export the heads again, or give the target that they were made for")
    return head


def _shares_projection(files: ModelFiles) -> bool:
    return bool(files.config.get("original_lm_head")) or files.sizes.get("projections") == 0


_SHARED_BIAS = Rule(
    "head.original_lm_head, for a target whose output projection has a bias",
    "leaves the bias out of the drafts",
    "train with head.original_lm_head false, or export the layout medusa for the original code",
    lambda files, target, head: _shares_projection(files) and target.head.bias is not None,
)

LAYOUTS = (
    Layout(
        "medusa",
        MEDUSA,
        to_medusa,
        load_medusa_directory,
        {
            "medusa_original": Served(
                engines.start_original("medusa"),
                rules=(
                    Rule(
                        "head.num_layers above 1",
                        "makes all blocks of a head one module, so that only the last would count, in silence",
                        "export the layout medusa_vllm for vLLM, or train with head.num_layers 1",
                        lambda files, target, head: files.config["medusa_num_layers"] > 1,
                    ),
                ),
                caveats=(
                    "It looks for the target that the export names, and for its heads in a Llama or Mistral model of its own.",
                ),
            ),
            "tensorrt_llm": Served(
                engines.start_tensorrt_llm_medusa,
                rules=(
                    Rule(
                        "head.original_lm_head",
                        "looks for a projection of each head in the file",
                        "train with head.original_lm_head false",
                        lambda files, target, head: _shares_projection(files),
                        refused=False,
                    ),
                ),
                caveats=(),
            ),
        },
    ),
    Layout(
        "medusa",
        MEDUSA_TGI,
        to_medusa_tgi,
        load_medusa_directory,
        {
            "tgi": Served(
                engines.start_tgi,
                rules=(
                    Rule(
                        "head.num_layers above 1 and head.original_lm_head",
                        "stops at more than one block beside the target's projection",
                        "export the layout medusa_vllm for vLLM, or train with head.original_lm_head false",
                        lambda files, target, head: _shares_projection(files) and files.config["medusa_num_layers"] > 1,
                    ),
                    _SHARED_BIAS,
                ),
                caveats=("TGI loads the target that the export names.",),
            )
        },
    ),
    Layout(
        "medusa",
        MEDUSA_VLLM,
        to_medusa_vllm,
        load_medusa_vllm_directory,
        {
            "vllm": Served(
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
        },
    ),
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
