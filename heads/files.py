"""The files in a head's folder: its configuration, and its tensors in safetensors files or in pickles without code."""

import errno
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import UserError

CONFIG = "config.json"
WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MEDUSA_WEIGHTS, MEDUSA_PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
HYDRA_PICKLED = "hydra_lm_head.pt"
# Safetensors before a pickle, and Medusa's and Hydra's heads before a model that lies beside them.
HEAD_WEIGHTS = (MEDUSA_WEIGHTS, MEDUSA_PICKLED, HYDRA_PICKLED, WEIGHTS, INDEX, PICKLED)
# What torch.load raises on bytes that are cut short or changed; there is no class for it.
_DAMAGED = (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError, struct.error)


def weights_file(folder: Path, names: Sequence[str] = HEAD_WEIGHTS) -> Path | None:
    """Return the file with a head's weights, or the index of several; None where there is none of `names`."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def all_weights_files(folder: Path) -> list[Path]:
    """Return every file that holds a head's weights; none where there are none. UserError where one is missing."""
    file = weights_file(folder)
    if file is None or file.name != INDEX:
        return [] if file is None else [file]
    return [file, *(folder / name for name in sorted(set(_read_index(file).values())))]


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of the folder `path`. Raises UserError where it is missing or not a JSON object."""
    file = path / CONFIG
    if not file.is_file():
        raise UserError(f"{path} holds no head: the file {CONFIG} is missing; give the folder that training wrote.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: it is not JSON ({error}); restore it or train again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object; restore it or train again.")
    return config


@contextmanager
def explain_config(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Make one sentence, which ends in `remedy`, of whatever is raised where config.json describes no `what`."""
    try:
        yield
    except UserError:
        raise  # a sentence already, though it is a ValueError too
    except (
        StrictDataclassError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        why = " ".join(str(error).split()).rstrip(".") or "its parts do not go together"
        raise UserError(f"{path / CONFIG} describes no {what} ({why}): {remedy}.") from error


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of a head's tensors, none where it has no file with weights; tensors are not read.

    Raises UserError for files that are damaged or need code.
    """
    file = weights_file(folder)
    if file is None:
        return frozenset()
    if file.name == INDEX:
        return frozenset(_read_index(file))
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt") as opened:
                return frozenset(opened.keys())
        except SafetensorError as error:
            raise _cut_short(file) from error
    return frozenset(_read_pickle(file, torch.device("cpu"), mmap=zipfile.is_zipfile(file)))


def read_weights(
    folder: Path, device: torch.device, names: Sequence[str] = HEAD_WEIGHTS
) -> tuple[Path, dict[str, Tensor]]:
    """Return the first of the files `names` that is there and the tensors in it, or in those that it lists.

    Of a pickle, only what torch reads without running code. Raises UserError for files that are missing, damaged or
    in need of code.
    """
    file = weights_file(folder, names)
    if file is None:
        missing = f"the file {names[0]} is missing" if len(names) == 1 else f"none of {', '.join(names)}"
        raise UserError(f"{folder} holds no weights ({missing}): restore them, or fetch the whole head.")
    if file.name == INDEX:
        listed = _read_index(file)
        found = {name: value for part in sorted(set(listed.values())) for name, value in _load(folder / part, device)}
        if absent := sorted(listed.keys() - found.keys()):
            raise UserError(f"{file} lists the tensor {absent[0]}, which its file lacks: fetch the head again.")
        return file, found
    if file.suffix == ".safetensors":
        return file, dict(_load(file, device))
    # Copies, as a pickle may hold one tensor under several names.
    return file, {name: value.clone() for name, value in _read_pickle(file, device).items()}


def _load(file: Path, device: torch.device) -> list[tuple[str, Tensor]]:
    try:
        # Copies: a file's own memory begins where its header ends, and products of what begins elsewhere may round otherwise.
        return [(name, value.clone()) for name, value in load_file(file, device=str(device)).items()]
    except SafetensorError as error:
        raise _cut_short(file) from error


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor name -> file of an index of several files, all of which are there."""
    try:
        listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        inside = bool(listed) and all(Path(name).name == name for name in listed.values())
    except (ValueError, LookupError, TypeError):
        inside = False
    if not inside:
        raise UserError(f"{index} is no index of the weight files beside it: fetch the head again.")
    for name in sorted(set(listed.values())):
        if not (index.parent / name).is_file():
            raise UserError(f"The weight file {index.parent / name} is missing: fetch the whole head.")
    return listed


def _read_pickle(file: Path, device: torch.device, mmap: bool = False) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is damaged or holds more than tensors, which could run code when opened: fetch it again, or save "
            "its tensors as safetensors."
        ) from error
    except _DAMAGED as error:
        raise _cut_short(file) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # torch's reader of archives says this of one that is cut short
            raise
        raise _cut_short(file) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in tensors.items()
    ):
        raise UserError(f"{file} holds no names with tensors, so it is no draft head: give the folder of one.")
    return dict(tensors)


def _cut_short(file: Path) -> UserError:
    return UserError(f"The weights {file} are damaged or cut short: restore them, fetch them again or train again.")
