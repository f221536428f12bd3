"""DFlash heads for engines: schemas, reading, layouts, and how such heads are recognised."""

from pathlib import Path

from draftsmith.heads.block import formats as block
from draftsmith.heads.dflash.head import DFlashHead
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import ABSENT
from draftsmith.target.target import Target

_PREFIX = "variable_prefix"
ONE_PASS = (
    "Only of a head with head.variable_prefix: engines fill in a block once and do not know its second pass, so it accepts less than the "
    "report says."
)


def load_dflash_directory(path: Path | str, target: Target) -> DFlashHead:
    """Return the head in a directory of the DFlash layout, ours or another's, fp32, on the target's device.

    Raises UserError for anything missing or misshapen, for a head of another target, and for what is not computed here:
    causal or sliding attention, biases, a trained output projection or mask embedding.
    """
    path = Path(path)
    config = block.read_block_config(path, target, _PREFIX)
    more = {} if config.get(_PREFIX) is None else block.read_sizes(path, config, "DFlash", _PREFIX)
    return block.load_block(path, config, target, DFlashHead, **more)


# Ours: engines do not know it.
_OURS = {_PREFIX: lambda export: export.head.options.variable_prefix or ABSENT}
DFLASH = block.block_schema("dflash", "DFlashDraftModel", section=_OURS)

CPU_NORMS = (
    "On CPUs vLLM 0.32 normalises the keys of the text with the first layer's weights in all layers (its "
    "`rms_norm` knows one row of weights there), so drafts of several layers are accepted less."
)

_VLLM = Served(
    engines.start_vllm("dflash"),
    rules=(block.biased_projection("DFlash"),),
    caveats=(block.BLOCK_LENGTH_VLLM, CPU_NORMS, ONE_PASS),
    needs="states",
)
_NO_CONVERTER = Rule(
    "a draft vocabulary of its own",
    "has no converter for it",
    "export the layout dflash for vLLM, or train with the whole vocabulary",
    block.has_own_vocabulary,
)
_LLAMA_CPP = block.served_by_llama_cpp("dflash", "DFlash", (_NO_CONVERTER,), (ONE_PASS,))
_FOR_LLAMA_CPP = block.for_llama_cpp(DFLASH, block.LM_HEAD, block.D2T)

LAYOUTS = (
    Layout("dflash", DFLASH, load_dflash_directory, {"vllm": _VLLM}),
    Layout("dflash", _FOR_LLAMA_CPP, load_dflash_directory, {"llama_cpp": _LLAMA_CPP}),
)

FORMATS = (
    Format("a DFlash head", 4, lambda f: "dflash" in f.words or "dflash_config" in f.config, load_dflash_directory),
)
