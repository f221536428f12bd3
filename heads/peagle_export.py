"""P-EAGLE heads in and out of the layouts that engines read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.eagle3_export import read_fused, read_speculators, to_flat_eagle3, to_speculators
from draftsmith.heads.head_files import CONFIG, read_config
from draftsmith.heads.peagle import PEagleHead, PEagleOptions
from draftsmith.heads.target import Target

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
