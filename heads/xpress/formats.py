"""XPress heads for engines: the layout that vLLM reads, reading it, and how such heads are recognised.

The mixer's file holds L as it is trained: vLLM reads what is on and below its diagonal, and adds the identity itself.
"""

from operator import attrgetter
from pathlib import Path

from draftsmith.heads.block import formats as block
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.xpress.head import XPressHead
from draftsmith.target.target import Target

_SIZES = ("xpress_rank", "xpress_mlp_hidden")


def load_xpress_directory(path: Path | str, target: Target) -> XPressHead:
    """Return the head in a directory of the XPress layout, ours or another's, fp32, on the target's device.

    Raises UserError as `load_dflash_directory` does.
    """
    path = Path(path)
    config = block.read_block_config(path, target)
    # The mixer's size decides.
    config = {**config, "block_size": config.get("xpress_block_size", 16)}
    return block.load_block(path, config, target, XPressHead, **block.read_sizes(path, config, "XPress", *_SIZES))


_PARTS = ("w1", "down_h", "down_g", "in_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "w2")
XPRESS = block.block_schema(
    "xpress",
    "Qwen3XPressModel",
    tensors=(*(f"xpress_head.{part}.weight" for part in _PARTS), "xpress_head.mix.L"),
    keys={
        "is_causal": False,
        "sample_from_anchor": False,
        **block.option_keys(*_SIZES),
        "xpress_block_size": attrgetter("head.options.block_size"),
        "xpress_num_passes": 6,  # what heads are published with
    },
)

_VLLM = Served(
    engines.start_vllm("dflash", one_length=True),
    rules=(
        block.whole_vocabulary("XPress", "corrects the logits of the target's whole vocabulary"),
        block.bare_matrix("XPress"),
    ),
    caveats=(
        "vLLM has XPress from 0.33 on, in its runner for GPUs alone. The number of tokens is that of the trained block: its mixer "
        "has no other size.",
        "It refines a block in `xpress_num_passes` passes (6, in config.json), behind which that many of its tokens at least are "
        "those that draftsmith drafts, and among the `xpress_topc` likeliest tokens of each slot (512; 0 for all). It drafts the "
        "most likely tokens at every temperature.",
    ),
    needs="states",
    since="0.33",
)
LAYOUTS = (Layout("xpress", XPRESS, load_xpress_directory, {"vllm": _VLLM}),)

FORMATS = (
    Format("an XPress head", 3, lambda f: "xpress" in f.words or "xpress_rank" in f.config, load_xpress_directory),
)
