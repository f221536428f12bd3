"""The files in a head's folder: its configuration, and its tensors in safetensors files or in pickles without code."""

import os
import pickle
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import read_object
from draftsmith.foreign.weights import read_header, read_index

CONFIG = "config.json"
WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MEDUSA_WEIGHTS, MEDUSA_PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
HYDRA_PICKLED = "hydra_lm_head.pt"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Safetensors before a pickle, and Medusa's and Hydra's heads before a model that lies beside them.
HEAD_WEIGHTS = (MEDUSA_WEIGHTS, MEDUSA_PICKLED, HYDRA_PICKLED, WEIGHTS, INDEX, PICKLED, ADAPTER_WEIGHTS)
_FETCH = "fetch the whole head again"
_RESTORE = "restore them, fetch them again or train again"


def weights_file(folder: Path, names: Sequence[str] = HEAD_WEIGHTS) -> Path | None:
    """Return the file with a head's weights, or the index of several; None where there is none of `names`."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def all_weights_files(folder: Path) -> list[Path]:
    """Return every file that holds a head's weights; none where there are none. UserError where one is missing."""
    file = weights_file(folder)
    if file is None or file.name != INDEX:
        return [] if file is None else [file]
    return [file, *(folder / name for name in sorted(set(read_index(file, _FETCH).values())))]


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of the folder `path`. Raises UserError where it is missing or not a JSON object."""
    file = path / CONFIG
    if not os.path.lexists(file):
        raise UserError(f"{path} holds no head: the file {CONFIG} is missing; give the folder that training wrote.")
    return unwrapped(read_object(file, "restore it or train again", infinite=True))


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a head's configuration, those of vLLM's EAGLE from inside the layer's."""
    inner = config.pop("model", None) if config.get("model_type") == "eagle" else None
    if not isinstance(inner, dict):
        return config
    # vLLM sets the outer keys in the layer's, and calls the bias of `fc` by another name.
    return {**inner, "bias": bool(config.get("eagle_fc_bias")), **config}


def explain_config(path: Path, what: str, remedy: str) -> AbstractContextManager[None]:
    """Make one sentence, which ends in `remedy`, of whatever is raised where config.json describes no `what`."""
    return foreign_code(f"{path / CONFIG} describes no {what}", remedy)


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of a head's tensors, none where it has no file with weights; tensors are not read.

    Raises UserError for files that are damaged or need code.
    """
    file = weights_file(folder)
    if file is None:
        return frozenset()
    if file.name == INDEX:
        return frozenset(read_index(file, _FETCH))
    if file.suffix == ".safetensors":
        return frozenset(span.name for span in read_header(file, _RESTORE))
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
        listed = read_index(file, _FETCH)
        tensors = {name: value for part in sorted(set(listed.values())) for name, value in _load(folder / part, device)}
        if absent := sorted(listed.keys() - tensors.keys()):
            raise UserError(f"{file} lists the tensor {absent[0]}, which its file lacks: fetch the head again.")
        return file, tensors
    if file.suffix == ".safetensors":
        return file, dict(_load(file, device))
    # Copies, as a pickle may hold one tensor under several names.
    return file, {name: value.clone() for name, value in _read_pickle(file, device).items()}


def _load(file: Path, device: torch.device) -> list[tuple[str, Tensor]]:
    read_header(file, _RESTORE)  # every entry, before anything is mapped
    with foreign_code(f"The weights {file} cannot be read", _RESTORE):
        # Copies: a file's own memory begins where its header ends, and products of what begins elsewhere may round otherwise.
        return [(name, value.clone()) for name, value in load_file(file, device=str(device)).items()]


def _read_pickle(file: Path, device: torch.device, mmap: bool = False) -> dict[str, Tensor]:
    with foreign_code(f"The weights {file} are damaged or cut short", _RESTORE):
        try:
            tensors = torch.load(file, map_location=device, weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{file} is damaged or holds more than tensors, which could run code when opened: fetch it again, or save "
                "its tensors as safetensors."
            ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in tensors.items()
    ):
        raise UserError(f"{file} holds no names with tensors, so it is no draft head: give the folder of one.")
    return dict(tensors)
