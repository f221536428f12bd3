"""DSpark heads for engines: schemas, reading, layouts, and how such heads are recognised."""

from operator import attrgetter
from pathlib import Path

import torch

from draftsmith.heads.block import formats as block
from draftsmith.heads.dspark.head import DSparkHead
from draftsmith.heads.files import explain_config
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import ABSENT, Config, TensorRow
from draftsmith.target.target import Target


def load_dspark_directory(path: Path | str, target: Target) -> DSparkHead:
    """Return the head in a directory of the DSpark layout; otherwise as `load_dflash_directory`."""
    path = Path(path)
    config = block.read_block_config(path, target, from_anchor=True)
    if config.get("sample_from_anchor") is False or config.get("markov_head_type", "vanilla") != "vanilla":
        raise block.not_computed(
            path, "a block whose first slot drafts nothing, or another Markov head than the vanilla one"
        )
    confident = bool(config.get("enable_confidence_head", False))
    if confident and not config.get("confidence_head_with_markov", False):
        raise block.not_computed(path, "a confidence that does not read the token before")
    rank = block.read_sizes(path, config, "DSpark", "markov_rank")
    head = block.load_block(path, config, target, DSparkHead, **rank, confidence_head=confident)
    if confident and (stored := config.get("confidence_temperatures")) is not None:
        with explain_config(path, "list of temperatures", "fetch the head again"):
            temperatures = torch.tensor(stored, dtype=torch.float32)
            if temperatures.shape != head.temperatures.shape or not bool((temperatures > 0).all()):
                raise ValueError(f"{len(head.temperatures)} numbers above 0 are needed, one for each slot")
            head.temperatures.copy_(temperatures)
    return head


def _confident(config: Config) -> bool:
    return bool(config["enable_confidence_head"])


DSPARK = block.block_schema(
    "dspark",
    "Qwen3DSparkModel",
    tensors=(
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        TensorRow("confidence_head.proj.weight", when=_confident),
        TensorRow("confidence_head.proj.bias", when=_confident),
    ),
    keys={
        **block.option_keys("markov_rank"),
        "markov_head_type": "vanilla",  # engines know others
        "enable_confidence_head": attrgetter("head.options.confidence_head"),
        "confidence_head_with_markov": True,  # it reads the token before too
        "sample_from_anchor": True,  # every slot drafts
        # No engine reads them.
        "confidence_temperatures": lambda export: (
            export.head.temperatures.tolist() if export.head.options.confidence_head else ABSENT
        ),
    },
)

_VLLM = Served(
    engines.start_vllm("dspark"),
    rules=(block.bare_matrix("DSpark"),),
    caveats=(
        block.BLOCK_LENGTH_VLLM,
        "vLLM 0.32 has DSpark in its runner for GPUs alone, which is the default there: leave "
        "`VLLM_USE_V2_MODEL_RUNNER` unset.",
        "vLLM 0.32 knows no temperatures of the confidences: `enable_adaptive_verification` (off by default) "
        "ranks drafts by the raw ones, not by those of evaluate.drafts.",
    ),
    needs="states",
)
_THRESHOLD = (
    "`--spec-draft-p-min` ends a draft before the first slot whose own confidence is lower. It knows no "
    "temperatures, and no product over slots: its thresholds are not those of evaluate.drafts."
)
_LLAMA_CPP = block.served_by_llama_cpp("dspark", "DSpark", caveats=(_THRESHOLD,))

LAYOUTS = (
    Layout("dspark", DSPARK, load_dspark_directory, {"vllm": _VLLM}),
    Layout("dspark", block.for_llama_cpp(DSPARK), load_dspark_directory, {"llama_cpp": _LLAMA_CPP}),
)

FORMATS = (Format("a DSpark head", 3, lambda f: "dspark" in f.words, load_dspark_directory),)
