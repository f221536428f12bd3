"""Hydra heads for engines: the layout of zankner/Hydra, the code that Hydra was published with, and the way there and back.

Its reader makes the heads from the target's configuration and fills them from `hydra_lm_head.pt`, and what the file lacks
or calls otherwise stays random in silence. There every head has a projection with a bias, so heads on the target's projection
get copies of it, and heads without biases zeros.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.files import CONFIG, HYDRA_PICKLED, read_config, read_weights, weights_file
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served, more_than_a_matrix
from draftsmith.heads.formats.published import check_width, is_the_same
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.schema import (
    Config,
    Export,
    ModelFiles,
    Schema,
    TensorRow,
    llama_layer,
    renamed,
    target_reference,
)
from draftsmith.heads.hydra import SIZES, HydraOptions
from draftsmith.heads.hydra.head import HydraHead
from draftsmith.heads.layers.from_target import derive_layer_config, fold
from draftsmith.target.target import Target

PREFIX = "prefix_embeding_layer."  # sic
MLP, PREFIX_MLP = "mlp", "prefix-mlp"
ARCHITECTURE = "hydra_head_arch"


OURS = "prefix_embedding_layer."
_BLOCK = r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight"
_AGAIN = "fetch or export the heads again"
_MADE_FOR = "give the target that they were made for"


class HydraSchema(Schema):
    """The layout of the published code, in which every head has all its blocks, and a projection with a bias."""

    def head_tensors(self, export: Export) -> dict[str, Tensor]:
        head, own = export.head, export.head.state_dict()
        o, dtype = head.options, export.dtype
        for name in own:
            if re.fullmatch(r"hydra_mlp\.\d+\.0\.(linear|res_connection)\.weight", name):
                own[name] = fold(own[name].detach(), slice(head.hidden_size, None), head.embedding_scale)
        tensors = {name: value for name, value in own.items() if name.startswith(OURS)}
        # On the CPU once: each head's copy of it there would be a tensor of its own in the file.
        shared, none = export.target.head.weight.to("cpu", dtype), torch.zeros(head.vocab_size, dtype=dtype)
        for i in range(o.num_heads):
            for j in range(o.num_layers):
                ours = f"hydra_mlp.{i}.{min(j, len(head.blocks(i)) - 1)}."
                # With a prefix layer a module of dropout stands before each block.
                theirs = f"hydra_mlp.{i}.{2 * j + 1 if o.prefix_attention else j}."
                tensors |= {theirs + n.removeprefix(ours): value for n, value in own.items() if n.startswith(ours)}
            name = f"hydra_lm_head.{i}" + (".1" if o.prefix_attention else "")
            tensors[f"{name}.weight"] = own.get(f"hydra_lm_head.{i}.weight", shared)
            tensors[f"{name}.bias"] = own.get(f"hydra_lm_head.{i}.bias", none)
        return tensors


def _prefixed(config: Config) -> bool:
    return config[ARCHITECTURE] == PREFIX_MLP


_PROJECTION = (TensorRow("hydra_lm_head.{i}.weight"), TensorRow("hydra_lm_head.{i}.bias"))
_PREFIX_LAYER = (*llama_layer(f"{OURS}layers.0."), TensorRow(f"{OURS}norm.weight"))
HYDRA = HydraSchema(
    name="hydra",
    tensors=(
        *(TensorRow(f"hydra_mlp.{{i}}.{{j}}.linear.{kind}") for kind in ("weight", "bias")),
        # Of a head's first block.
        *(TensorRow(f"hydra_mlp.{{i}}.{{j}}.res_connection.{kind}") for kind in ("weight", "bias")),
        *_PROJECTION,
        *renamed(_PROJECTION, {"hydra_lm_head.{i}.": "hydra_lm_head.{i}.1."}),  # with a prefix layer
        *(replace(row, when=_prefixed) for row in renamed(_PREFIX_LAYER, {OURS: PREFIX})),
    ),
    keys={
        "hydra_num_heads": attrgetter("head.options.num_heads"),
        "hydra_num_layers": attrgetter("head.options.num_layers"),
        # The reader assumes mlp.
        ARCHITECTURE: lambda export: PREFIX_MLP if export.head.options.prefix_attention else MLP,
        "grounded_heads": True,  # heads that read tokens; the reader assumes those that read none
        "hidden_state_offset": 0,  # heads read the target's last state
        "base_model_name_or_path": lambda export: target_reference(export.target),  # which the reader loads from there
        # Ours: the projections in the file are copies of the target's; the biases there are those of the heads.
        "original_lm_head": attrgetter("head.options.original_lm_head"),
        "lm_head_bias": attrgetter("head.options.lm_head_bias"),
    },
    weights=HYDRA_PICKLED,
)


def load_hydra_directory(path: Path | str, target: Target) -> HydraHead:
    """Return the heads in a directory of the published layout, fp32, on the target's device.

    The file says how many heads and blocks there are. If all blocks after a head's first are equal, they are read as one block
    that is applied several times: the published code trains them so. The prefix layer takes its RoPE and its sizes from the
    target. Raises UserError for other kinds of Hydra's heads, for anything missing, unknown or misshapen, and for heads of
    another target's sizes or embeddings.
    """
    path = Path(path)
    config = read_config(path)
    # The published code has other heads too, which draft otherwise.
    wanted = {ARCHITECTURE: (MLP, PREFIX_MLP), "grounded_heads": (True,), "hidden_state_offset": (0,)}
    for key, known in wanted.items():
        if (value := config.get(key, known[0])) not in known:
            raise UserError(
                f"{path / CONFIG} says {key} {value!r}, but only {' and '.join(map(repr, known))} can be loaded: give Hydra or "
                "Hydra++ heads."
            )
    file, tensors = read_weights(path, target.device, (HYDRA_PICKLED,))
    native = _native(_without_the_targets(tensors, target, file), file)
    heads, blocks = _count(native, file)
    prefixed = any(name.startswith(OURS) for name in native)
    if config.get(ARCHITECTURE, kind := PREFIX_MLP if prefixed else MLP) != kind:
        raise UserError(
            f"{file} holds {'a' if prefixed else 'no'} prefix layer, but {CONFIG} says {ARCHITECTURE} "
            f"{config[ARCHITECTURE]!r}: {_AGAIN}."
        )
    check_width(file, next(iter(native["hydra_mlp.0.0.linear.weight"].shape), 0), target)
    shared = config.get("original_lm_head", False) is True
    if shared:
        for i in range(heads):
            held = native.pop(f"hydra_lm_head.{i}.weight", None)
            if held is None or not is_the_same(held, target.head.weight):
                raise UserError(
                    f"{file} {'lacks the projection' if held is None else 'holds another projection than the target'} in head "
                    f"{i}, though original_lm_head is true in {CONFIG}: export the heads again for this target."
                )
    tied = blocks > 2 and _tie(native, heads, blocks)
    biases = [native.get(f"hydra_lm_head.{i}.bias") for i in range(heads)]
    # The layout has biases in any case; where it is not said, zeros are what heads without any were written with.
    biased = config.get("lm_head_bias") is True or any(bias is not None and bool(bias.any()) for bias in biases)
    if not biased:
        native = {name: x for name, x in native.items() if not re.fullmatch(r"hydra_lm_head\.\d+\.bias", name)}
    options = HydraOptions(
        num_heads=heads,
        num_layers=blocks,
        tie_blocks=tied,
        prefix_attention=prefixed,
        original_lm_head=shared,
        lm_head_bias=biased,
    )
    layer = derive_layer_config(options, target) if options.prefix_attention else None
    with torch.device(target.device):
        head = HydraHead(options, layer, target)
    fill(head, native, file, remedy=f"{_AGAIN}, or {_MADE_FOR}")
    return head


def _without_the_targets(tensors: dict[str, Tensor], target: Target, file: Path) -> dict[str, Tensor]:
    """Leave out what the published files hold besides the heads: the target's embeddings, and what the prefix layer has
    and does not use. Raises UserError where the embeddings are another target's."""
    unused = (f"{PREFIX}embed_tokens.weight",)
    kept = {name: x for name, x in tensors.items() if name not in unused and not name.endswith("rotary_emb.inv_freq")}
    held = kept.pop("input_embed_fn.weight", None)
    if held is not None and not is_the_same(held, target.embedding):
        raise UserError(
            f"{file} holds heads that read other input embeddings than those of the target {target.path}: {_MADE_FOR}."
        )
    return kept


def _native(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors under the names of `HydraHead`, blocks numbered one after the other."""
    native = {}
    prefixed = any(name.startswith(PREFIX) for name in tensors)
    for name, value in HYDRA.rename(tensors).items():
        if block := re.fullmatch(r"(hydra_mlp\.\d+)\.(\d+)\.(.+)", name):
            number = int(block[2])
            if prefixed and number % 2 == 0:
                raise UserError(f"{file} holds the tensor {name}, where Hydra++ has no block: {_AGAIN}.")
            name = f"{block[1]}.{number // 2 if prefixed else number}.{block[3]}"
        native[name] = value
    return native


def _count(native: Mapping[str, Tensor], file: Path) -> tuple[int, int]:
    """Return how many heads there are and how many blocks each has, by the highest numbers in the names; all of them are
    there then."""
    blocks = [(int(m[1]), int(m[2])) for name in native if (m := re.fullmatch(_BLOCK, name))]
    if not blocks:
        raise UserError(f"{file} holds no Hydra head, whose blocks are hydra_mlp.{{i}}.{{j}}.linear: {_AGAIN}.")
    heads, layers = 1 + max(i for i, _ in blocks), 1 + max(j for _, j in blocks)
    for i in range(heads):
        for j in range(layers):
            if (i, j) not in blocks:
                raise UserError(f"{file} lacks block {j} of head {i}, though other heads have as many: {_AGAIN}.")
    return heads, layers


def _tie(native: dict[str, Tensor], heads: int, blocks: int) -> bool:
    """Whether the blocks behind each head's first are equal; all but one of them are then taken out."""
    pairs = [
        (f"hydra_mlp.{i}.{j}.linear.{part}", f"hydra_mlp.{i}.1.linear.{part}")
        for i in range(heads)
        for j in range(2, blocks)
        for part in ("weight", "bias")
    ]
    if not all({a, b} <= native.keys() and torch.equal(native[a], native[b]) for a, b in pairs):
        return False
    for later, _ in pairs:
        del native[later]
    return True


def _other_prefix_sizes(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    if head.config is None:
        return False
    usual = derive_layer_config(HydraOptions(prefix_attention=True), target)
    return any(getattr(head.config, key) != getattr(usual, key) for key in SIZES)


_ORIGINAL = Served(
    engines.start_original("hydra"),
    rules=(
        Rule(
            "head.num_layers above 2 without head.tie_blocks",
            "makes all blocks of a head after its first one module, so that only the last would count, in silence",
            "train with head.tie_blocks true",
            # Whatever they hold: new blocks are equal.
            lambda files, target, head: head.options.num_layers > 2 and not head.options.tie_blocks,
        ),
        Rule(
            "a prefix layer of other sizes than the target's layers",
            "makes it from the target's configuration and stops at other shapes",
            "train with the target's sizes",
            _other_prefix_sizes,
        ),
        Rule(
            "head.original_lm_head, for a target whose output projection has a bias, a scale or a softcap",
            "knows a matrix of each head alone",
            "train with head.original_lm_head false",
            lambda files, target, head: files.config["original_lm_head"] and more_than_a_matrix(files, target, head),
        ),
    ),
    caveats=(
        "It is research code for Llama targets and one text at a time, and it looks for the target that the export "
        "names. No serving engine that draftsmith knows reads Hydra.",
        "The weights are a pickle of tensors, since it reads no other file.",
    ),
)
LAYOUTS = (Layout("hydra", HYDRA, load_hydra_directory, {"hydra_original": _ORIGINAL}),)


def _is_hydra(folder: HeadFolder) -> bool:
    """Known by its configuration, or by its file, which has a name of its own."""
    named = any(key.startswith("hydra_") for key in folder.config)
    return named or weights_file(folder.path, (HYDRA_PICKLED,)) is not None


FORMATS = (Format("a Hydra head", 4, _is_hydra, load_hydra_directory),)
