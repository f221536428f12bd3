"""P-EAGLE heads for engines: contracts, conversion both ways, layouts, and how such heads are recognised.

The layouts are EAGLE-3's (heads/eagle/) with the streams and the token of what is not drafted yet.
Symbols in shapes: those of heads/eagle/contracts.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.eagle.contracts import EAGLE3, EAGLE3_SPECULATORS
from draftsmith.heads.eagle.convert import read_fused, read_speculators, to_flat_eagle3, to_speculators
from draftsmith.heads.files import CONFIG, read_config
from draftsmith.heads.formats.contracts import Contract, ExportRequest, KeyRule, ModelFiles, TensorRule, broken
from draftsmith.heads.formats.engine_rules import (
    SPECULATORS_COMPLETE,
    SPECULATORS_NUMBERS,
    VLLM_SAME_GPUS,
    has_flag,
    other_width,
)
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.start import start_speculators, start_vllm, start_vllm_speculators
from draftsmith.heads.peagle.head import PEagleHead, PEagleOptions
from draftsmith.heads.target.target import Target

_MASK_HIDDEN = TensorRule("mask_hidden", ("1", "1", "A*Ht"))
_MASK_TOKEN = KeyRule("mask_token_id", int, "the token of rows that are not drafted yet")


def _check_mask_token(contract: Contract, files: ModelFiles) -> None:
    V = contract.sizes(files.config)["V"]
    if not 0 <= (token := files.config["mask_token_id"]) < V:
        raise broken(contract, "config key mask_token_id", f"a token below {V}", repr(token))


def _without_feedback(rule: KeyRule) -> KeyRule:
    return replace(rule, only=False, why="nothing is fed back") if rule.name == "norm_output" else rule


_SAID = {
    "speculators_model_type": "peagle",
    "speculators_config.algorithm": "peagle",
    "architectures": ["PEagleDraftModel"],
}

# vLLM, with parallel_drafting beside method eagle3.
PEAGLE = replace(
    EAGLE3,
    name="peagle",
    tensors=(*EAGLE3.tensors, _MASK_HIDDEN),
    keys=(*(_without_feedback(rule) for rule in EAGLE3.keys), _MASK_TOKEN),
    checks=(*EAGLE3.checks, _check_mask_token),
)

# speculators: the package, and vLLM, which starts the target that the directory names and sets parallel_drafting itself.
PEAGLE_SPECULATORS = replace(
    EAGLE3_SPECULATORS,
    name="peagle_speculators",
    tensors=(*EAGLE3_SPECULATORS.tensors, _MASK_HIDDEN),
    keys=(
        *(
            replace(_without_feedback(r), only=_SAID.get(r.name, r.only)) if r.name in _SAID else _without_feedback(r)
            for r in EAGLE3_SPECULATORS.keys
        ),
        _MASK_TOKEN,
    ),
    checks=(*EAGLE3_SPECULATORS.checks, _check_mask_token),
)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the mask token, in this order."""


def to_peagle(head: PEagleHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the flat layout of EAGLE-3, with the mask token and its streams."""
    return _with_mask(to_flat_eagle3(head, target, request), head)


def to_peagle_speculators(head: PEagleHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the speculators layout. Raises UserError where the request does not say how many tokens to draft."""
    return _with_mask(to_speculators(head, target, request, "peagle", "PEagleDraftModel"), head)


def load_peagle_directory(path: Path | str, target: Target) -> PEagleHead:
    """Return the head in a flat P-EAGLE directory, ours or another's, fp32, on the target's device; what config.json leaves
    out is what engines take for it, see `load_eagle3_directory`."""
    return _read(Path(path), read_config(Path(path)), target)


def load_peagle_speculators_directory(path: Path | str, target: Target) -> PEagleHead:
    """Return the head in a P-EAGLE directory of the speculators layout; otherwise as `load_peagle_directory`."""
    return _read(Path(path), read_speculators(Path(path), "peagle", "P-EAGLE"), target)


def _with_mask(files: ModelFiles, head: PEagleHead) -> ModelFiles:
    files.config["mask_token_id"] = head.options.mask_token_id
    return files


def _read(path: Path, config: Mapping[str, Any], target: Target) -> PEagleHead:
    token = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise UserError(
            f"{path / CONFIG} says mask_token_id {token!r}, but the target has tokens 0 to {target.vocab_size - 1}: write "
            "there the token that the head was trained with."
        )
    return read_fused(path, config, target, PEagleHead, PEagleOptions, FLAGS, mask_token_id=token)


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
                start_vllm("eagle3", parallel_drafting=True),
                rules=(),
                caveats=(
                    "`parallel_drafting` must be true: without it vLLM drafts token by token with the same weights, says "
                    "nothing, and accepts little. Name the method too: without it vLLM guesses from the path of the draft.",
                    _RUNNER,
                    VLLM_SAME_GPUS,
                ),
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
                start_vllm_speculators,
                rules=(
                    Rule(
                        "P-EAGLE's head.fc_norm",
                        "leaves it out where it reads this format",
                        "export the layout peagle, or train without it",
                        has_flag("fc_norm"),
                    ),
                ),
                caveats=(_RUNNER, SPECULATORS_NUMBERS),
            ),
            "speculators": Served(
                start_speculators,
                rules=(other_width("P-EAGLE's head.hidden_size other than the target's"),),
                caveats=(SPECULATORS_COMPLETE,),
            ),
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
