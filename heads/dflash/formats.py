"""DFlash heads for engines: contracts, conversion both ways, layouts, and how such heads are recognised."""

from dataclasses import replace
from pathlib import Path

from draftsmith.heads.block.contracts import (
    BLOCK_LENGTH_LLAMA_CPP,
    BLOCK_LENGTH_VLLM,
    CHECKS,
    FORBIDDEN,
    KEYS,
    MEASURE_ALONE,
    TENSORS,
    bare_matrix,
    block_sizes,
    scaled_rope,
    without_tensors,
)
from draftsmith.heads.block.convert import (
    block_config,
    block_options,
    block_tensors,
    load_block,
    not_computed,
    read_block_config,
)
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.dflash.head import DFlashHead, DFlashOptions
from draftsmith.heads.formats.contracts import (
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
)
from draftsmith.heads.formats.engine_rules import biased_target
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.start import start_llama_cpp, start_vllm
from draftsmith.heads.target.target import Target


def to_dflash(head: DFlashHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout of the published DFlash, the embeddings included."""
    config = {"architectures": ["DFlashDraftModel"], **block_config(head, target, request)}
    return ModelFiles(config, block_tensors(head, target, request), request.dtype)


def load_dflash_directory(path: Path | str, target: Target) -> DFlashHead:
    """Return the head in a directory of the DFlash layout, ours or another's, fp32, on the target's device.

    Raises UserError for anything missing or misshapen, for a head of another target, and for what is not computed here:
    causal or sliding attention, biases, a trained output projection or mask embedding.
    """
    path = Path(path)
    config = read_block_config(path, target)
    if config.get("sample_from_anchor"):
        raise not_computed(path, "sample_from_anchor true, with which the first slot drafts too")
    return load_block(path, config, target, DFlashHead, DFlashOptions(**block_options(path, config, target)))


DFLASH = Contract(
    name="dflash",
    tensors=TENSORS,
    keys=(KeyRule("architectures", list, "how engines find the model class", ["DFlashDraftModel"]), *KEYS),
    sizes=block_sizes,
    ranges={"m": "M"},
    forbidden=FORBIDDEN,
    checks=CHECKS,
)

# llama.cpp drafts through the embeddings of a draft that has them, where it has no projection of its own. Its converter
# knows no vocabulary of a DFlash head's own.
DFLASH_LLAMA_CPP = replace(
    DFLASH, name="dflash_llama_cpp", tensors=without_tensors(DFLASH, EMBEDDING, "lm_head.weight", "d2t")
)


_BIASED_TARGET = Rule(
    "a target whose output projection has a bias, for DFlash",
    "takes the bare matrix for the drafts",
    MEASURE_ALONE,
    # A scale or a softcap leaves the most likely token what it is, which is all that vLLM takes of DFlash's logits unless
    # it is told to sample its drafts.
    biased_target,
)


LAYOUTS = (
    Layout(
        "dflash",
        DFLASH,
        to_dflash,
        load_dflash_directory,
        {
            "vllm": Served(
                start_vllm("dflash"),
                rules=(_BIASED_TARGET,),
                caveats=(
                    BLOCK_LENGTH_VLLM,
                    "On CPUs vLLM 0.32 normalises the keys of the text with the first layer's weights in all layers (its "
                    "`rms_norm` knows one row of weights there), so drafts of several layers are accepted less.",
                ),
            )
        },
    ),
    Layout(
        "dflash",
        DFLASH_LLAMA_CPP,
        to_dflash,
        load_dflash_directory,
        {
            "llama_cpp": Served(
                start_llama_cpp("draft-dflash"),
                rules=(
                    Rule(
                        "a draft vocabulary of its own",
                        "has no converter for it",
                        "export the layout dflash for vLLM, or train with the whole vocabulary",
                        lambda files, target, head: files.config["draft_vocab_size"] != files.config["vocab_size"],
                    ),
                    scaled_rope("dflash", "DFlash"),
                    bare_matrix("DFlash"),
                ),
                caveats=(BLOCK_LENGTH_LLAMA_CPP,),
            )
        },
    ),
)

FORMATS = (
    Format("a DFlash head", 4, lambda f: "dflash" in f.words or "dflash_config" in f.config, load_dflash_directory),
)
