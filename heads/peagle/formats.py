"""P-EAGLE heads for engines: schemas, reading, layouts, and how such heads are recognised.

The layouts are EAGLE-3's (heads/eagle/) with the streams and the token of what is not drafted yet.
"""

from pathlib import Path

from draftsmith.heads.eagle.formats import (
    EAGLE3,
    EAGLE3_SPECULATORS,
    FusedSchema,
    read_either,
    read_fused,
    speculators_keys,
)
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served, has_flag, served_by_speculators
from draftsmith.heads.formats.published import check_mask_token
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.schema import TensorRow
from draftsmith.heads.peagle.head import PEagleHead, PEagleOptions
from draftsmith.target.target import Target

_MASK_HIDDEN = TensorRow("mask_hidden")
_MASK_TOKEN = {"mask_token_id": lambda export: export.head.options.mask_token_id}
"""The token of rows that are not drafted yet."""

# vLLM, with parallel_drafting beside method eagle3.
PEAGLE = FusedSchema("peagle", (*EAGLE3.tensors, _MASK_HIDDEN), {**EAGLE3.keys, **_MASK_TOKEN})
# speculators: the package, and vLLM, which starts the target that the directory names and sets parallel_drafting itself.
PEAGLE_SPECULATORS = FusedSchema(
    "peagle_speculators", (*EAGLE3_SPECULATORS.tensors, _MASK_HIDDEN), {**speculators_keys("peagle"), **_MASK_TOKEN}
)

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the mask token, in this order."""


def load_peagle_directory(path: Path | str, target: Target) -> PEagleHead:
    """Return the head in a P-EAGLE directory, flat or of speculators, ours or another's, fp32, on the target's device; what
    config.json leaves out is what engines take for it, see `load_eagle3_directory`."""
    config = read_either(Path(path), "peagle", "P-EAGLE")
    token = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    check_mask_token(Path(path), token, target)
    return read_fused(Path(path), config, target, PEagleHead, PEagleOptions, mask_token_id=token)


_RUNNER = (
    "Leave `VLLM_USE_V2_MODEL_RUNNER` unset: where it is 1, vLLM 0.32 ignores `parallel_drafting`, and says nothing."
)

_VLLM = Served(
    # Its runner makes room for the largest length alone, and reads other requests' drafts at shorter ones.
    engines.start_vllm("eagle3", one_length=True, parallel_drafting=True),
    caveats=(
        "`parallel_drafting` must be true: without it vLLM drafts token by token with the same weights, says "
        "nothing, and accepts little. Name the method too: without it vLLM guesses from the path of the draft.",
        _RUNNER,
        engines.VLLM_SAME_GPUS,
    ),
    needs="states",
)
_LEFT_OUT = Rule(
    "P-EAGLE's head.fc_norm",
    "leaves it out where it reads this format",
    "export the layout peagle, or train without it",
    has_flag("fc_norm"),
    refused=True,
)
_VLLM_SPECULATORS = Served(
    engines.start_vllm_speculators,
    rules=(_LEFT_OUT,),
    caveats=(_RUNNER, engines.SPECULATORS_NUMBERS),
    needs="states",
)
_SPECULATORS = served_by_speculators("P-EAGLE's head.hidden_size other than the target's")

LAYOUTS = (
    Layout("peagle", PEAGLE, load_peagle_directory, {"vllm": _VLLM}),
    Layout(
        "peagle",
        PEAGLE_SPECULATORS,
        load_peagle_directory,
        {"vllm": _VLLM_SPECULATORS, "speculators": _SPECULATORS},
    ),
)


def _is_peagle(folder: HeadFolder) -> bool:
    # The configuration comes first: the tensors' names take reading the file.
    named = folder.config.keys() & {"draft_vocab_size", "mask_token_id", "pard_token", "ptd_token_id"}
    return "peagle" in folder.words or (bool(named) and "mask_hidden" in folder.names)


FORMATS = (
    Format(
        "a P-EAGLE head of speculators",
        1,
        lambda f: f.config.get("speculators_model_type") == "peagle",
        load_peagle_directory,
    ),
    Format("a P-EAGLE head", 2, _is_peagle, load_peagle_directory),
)
