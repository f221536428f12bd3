"""JetSpec heads for engines: schema, reading, layout, and how such heads are recognised.

The files are DFlash's. That the block is causal is said twice: `causal_head` is the key of JetSpec's own code, `causal` vLLM's.
"""

from pathlib import Path

from draftsmith.heads.block import formats as block
from draftsmith.heads.dflash.formats import CPU_NORMS
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Served
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.jetspec.head import JetSpecHead
from draftsmith.target.target import Target


def load_jetspec_directory(path: Path | str, target: Target) -> JetSpecHead:
    """Return the head in a directory of the JetSpec layout, ours or another's, fp32, on the target's device.

    Raises UserError as `load_dflash_directory` does, and for attention that is not causal.
    """
    path = Path(path)
    config = block.read_block_config(path, target, causal=True)
    return block.load_block(path, config, target, JetSpecHead)


def _is_jetspec(folder: HeadFolder) -> bool:
    section = folder.config.get(block.SECTION)
    said = isinstance(section, dict) and any(section.get(key) is True for key in (block.CAUSAL, "causal"))
    others = "dflash2" in folder.words or "dspark" in folder.words
    return "jetspec" in folder.words or (said and not others)


JETSPEC = block.block_schema("jetspec", "DFlashDraftModel", section={block.CAUSAL: True, "causal": True})

_VLLM = Served(
    engines.start_vllm("dflash"),
    rules=(block.biased_projection("JetSpec"),),
    caveats=(
        "vLLM drafts chains of it, no trees. One of before June 2026 does not read `dflash_config.causal`, and lets slots see "
        "those behind them, which accepts less.",
        CPU_NORMS,
    ),
    needs="states",
)
LAYOUTS = (Layout("jetspec", JETSPEC, load_jetspec_directory, {"vllm": _VLLM}),)

FORMATS = (
    # The namesake of speculators, which reads drafted tokens in place of masks, is refused for its format.
    Format("a JetSpec head", 3, _is_jetspec, load_jetspec_directory),
)
