"""P-EAGLE heads for engines: contracts, conversion both ways, layouts, and how such heads are recognised.

The layouts are EAGLE-3's (heads/eagle/) with the streams and the token of what is not drafted yet.
Symbols in shapes: those of heads/eagle/formats.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.heads.eagle.formats import (
    EAGLE3,
    EAGLE3_SPECULATORS,
    SPECULATORS_CLASSES,
    read_fused,
    read_speculators,
    to_flat_eagle3,
    to_speculators,
)
from draftsmith.heads.files import read_config
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.contracts import (
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    replace_keys,
)
from draftsmith.heads.formats.layout import Layout, Rule, Served, has_flag, served_by_speculators
from draftsmith.heads.formats.published import check_mask_token
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.peagle.head import PEagleHead, PEagleOptions
from draftsmith.target.target import Target

_MASK_HIDDEN = TensorRule("mask_hidden", ("1", "1", "A*Ht"))
_MASK_TOKEN = KeyRule("mask_token_id", int, "the token of rows that are not drafted yet")


def _check_mask_token(contract: Contract, files: ModelFiles) -> None:
    V = contract.sizes(files.config)["V"]
    if not 0 <= (token := files.config["mask_token_id"]) < V:
        raise broken(contract, "config key mask_token_id", f"a token below {V}", repr(token))


def _with_mask(contract: Contract, name: str, **only: Any) -> Contract:
    """The contract of an EAGLE-3 layout, with mask token and streams and without feedback. only: keys with another value."""
    keys = replace_keys(contract.keys, "nothing is fed back", norm_output=False)
    return replace(
        contract,
        name=name,
        tensors=(*contract.tensors, _MASK_HIDDEN),
        keys=(*replace_keys(keys, **only), _MASK_TOKEN),
        checks=(*contract.checks, _check_mask_token),
    )


# vLLM, with parallel_drafting beside method eagle3.
PEAGLE = _with_mask(EAGLE3, "peagle")

_SAID = {
    "speculators_model_type": "peagle",
    "speculators_config.algorithm": "peagle",
    "architectures": [SPECULATORS_CLASSES["peagle"]],
}
# speculators: the package, and vLLM, which starts the target that the directory names and sets parallel_drafting itself.
PEAGLE_SPECULATORS = _with_mask(EAGLE3_SPECULATORS, "peagle_speculators", **_SAID)

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the mask token, in this order."""


def to_peagle(head: PEagleHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the flat layout of EAGLE-3, with the mask token and its streams."""
    return _with_token(to_flat_eagle3(head, target, request), head)


def to_peagle_speculators(head: PEagleHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the speculators layout. Raises UserError where the request does not say how many tokens to draft."""
    return _with_token(to_speculators(head, target, request, "peagle"), head)


def load_peagle_directory(path: Path | str, target: Target) -> PEagleHead:
    """Return the head in a flat P-EAGLE directory, ours or another's, fp32, on the target's device; what config.json leaves
    out is what engines take for it, see `load_eagle3_directory`."""
    return _read(Path(path), read_config(Path(path)), target)


def load_peagle_speculators_directory(path: Path | str, target: Target) -> PEagleHead:
    """Return the head in a P-EAGLE directory of the speculators layout; otherwise as `load_peagle_directory`."""
    return _read(Path(path), read_speculators(Path(path), "peagle", "P-EAGLE"), target)


def _with_token(files: ModelFiles, head: PEagleHead) -> ModelFiles:
    files.config["mask_token_id"] = head.options.mask_token_id
    return files


def _read(path: Path, config: Mapping[str, Any], target: Target) -> PEagleHead:
    token = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    check_mask_token(path, token, target)
    return read_fused(path, config, target, PEagleHead, PEagleOptions, mask_token_id=token)


_RUNNER = (
    "Leave `VLLM_USE_V2_MODEL_RUNNER` unset: where it is 1, vLLM 0.32 ignores `parallel_drafting`, and says nothing."
)

LAYOUTS = (
    Layout(
        "peagle",
        PEAGLE,
        to_peagle,
        load_peagle_directory,
        {
            "vllm": Served(
                engines.start_vllm("eagle3", parallel_drafting=True),
                rules=(),
                caveats=(
                    "`parallel_drafting` must be true: without it vLLM drafts token by token with the same weights, says "
                    "nothing, and accepts little. Name the method too: without it vLLM guesses from the path of the draft.",
                    _RUNNER,
                    engines.VLLM_SAME_GPUS,
                ),
                needs="states",
            )
        },
    ),
    Layout(
        "peagle",
        PEAGLE_SPECULATORS,
        to_peagle_speculators,
        load_peagle_speculators_directory,
        {
            "vllm": Served(
                engines.start_vllm_speculators,
                rules=(
                    Rule(
                        "P-EAGLE's head.fc_norm",
                        "leaves it out where it reads this format",
                        "export the layout peagle, or train without it",
                        has_flag("fc_norm"),
                    ),
                ),
                caveats=(_RUNNER, engines.SPECULATORS_NUMBERS),
                needs="states",
            ),
            "speculators": served_by_speculators("P-EAGLE's head.hidden_size other than the target's"),
        },
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
        load_peagle_speculators_directory,
    ),
    Format("a P-EAGLE head", 2, _is_peagle, load_peagle_directory),
)
