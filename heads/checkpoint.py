"""The native checkpoint of a head: a folder with `config.json` and `model.safetensors`.

What the target already holds is not stored again (input embeddings), but the target is named by its fingerprint,
and a head loads only onto the target it was trained for.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.files import explain_os_error, write_json
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import find_method
from draftsmith.heads.target import Target

SCHEMA_VERSION = 1
CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"


def save_head(head: DraftHead, path: Path, target: Target, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write `head` to the folder `path`, all or nothing; an older checkpoint there is replaced.

    tensors: its state where the head itself holds only a shard of it; None takes the head's own.
    Raises UserError where `path` holds anything else, the disk is full or the folder is not writable.
    """
    config = {
        "schema_version": SCHEMA_VERSION,
        "method": head.method,
        **head.describe(),
        "layer_ids": list(head.layer_ids),
        "target": describe_target(target),
    }
    tensors = dict(head.state_dict() if tensors is None else tensors)
    if EMBEDDING in tensors and borrows_embedding(tensors[EMBEDDING], target):
        del tensors[EMBEDDING]
    write_model_directory(Path(path), config, tensors)


def load_head(path: Path, target: Target) -> DraftHead:
    """Return the head in the folder `path`, fp32, on the target's device: a checkpoint, or a published EAGLE-1 head.

    Raises UserError for a folder that is neither, is damaged, or belongs to another target.
    """
    path = Path(path)
    config = read_config(path)
    if not config.keys() & {"schema_version", "method"}:
        from draftsmith.heads.eagle1_layouts import load_eagle1_directory  # imports this file

        return load_eagle1_directory(path, target)
    if config.get("schema_version") != SCHEMA_VERSION or "method" not in config:
        raise UserError(
            f"{path / CONFIG} is not a draftsmith checkpoint of schema version {SCHEMA_VERSION}: give the folder that "
            "training wrote; an engine's directory is no checkpoint."
        )
    check_target(path, config.get("target", {}), target)
    tensors = read_tensors(path, target.device)
    head = find_method(config["method"]).load(config, target, tensors.get("draft_vocab"))
    fill(head, tensors, path / WEIGHTS)
    return head


def weights_file(folder: Path) -> Path | None:
    """Return the file with a head's weights, safetensors before a pickle; None where there is neither."""
    return next((folder / name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()), None)


def describe_target(target: Target) -> dict[str, Any]:
    """Return what a checkpoint remembers of its target."""
    return {
        "path": target.path,
        "fingerprint": target.fingerprint,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "architectures": list(getattr(target.model.config, "architectures", None) or [type(target.model).__name__]),
    }


def check_target(path: Path, trained_for: Mapping[str, Any], target: Target) -> None:
    """Raise UserError, in one sentence, unless `target` is the one described by `trained_for`."""
    now = describe_target(target)
    words = {"vocab_size": "tokens", "hidden_size": "hidden units", "num_layers": "layers"}
    for key, word in words.items():
        if trained_for.get(key) != now[key]:
            raise UserError(
                f"The head {path} was trained for a target with {trained_for.get(key)} {word} ({trained_for.get('path')}), "
                f"but {target.path} has {now[key]}: give the target it was trained for."
            )
    if trained_for.get("fingerprint") != now["fingerprint"]:
        raise UserError(
            f"The weights of the target {target.path} are not those the head {path} was trained for (fingerprint "
            f"{now['fingerprint']}, expected {trained_for.get('fingerprint')}): give that target, or train again."
        )


def fill(
    head: DraftHead, tensors: Mapping[str, Tensor], source: Path, remedy: str = "export or train it again"
) -> None:
    """Put `tensors` into `head`, floats as fp32; UserError, which ends in `remedy`, for missing, surplus or misshapen
    ones.

    Only the embedding may be missing (the head then keeps the target's). Parameters are replaced, never written
    into: the embedding shares the target's memory.
    """
    expected = head.state_dict()
    missing = [name for name in expected if name not in tensors and name != EMBEDDING]
    surplus = [name for name in tensors if name not in expected]
    if missing or surplus:
        what = f"lacks the tensor {missing[0]}" if missing else f"holds the unknown tensor {surplus[0]}"
        raise UserError(f"{source} {what}: it is incomplete or of another version; {remedy}.")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{source}: tensor {name} has shape {list(value.shape)}, but its configuration says "
                f"{list(expected[name].shape)}; {remedy}."
            )
    if bad := next((n for n, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())), None):
        raise UserError(f"{source}: tensor {bad} holds NaN or infinity, so drafts would mean nothing; {remedy}.")
    floats = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    head.load_state_dict(floats, strict=False, assign=True)


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


def read_tensors(path: Path, device: torch.device, weights: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the tensors of the file `weights` in the folder `path`. UserError where it is missing or damaged."""
    file = path / weights
    if not file.is_file():
        raise UserError(f"{path} holds no weights: the file {weights} is missing (pickled weights are never read).")
    try:
        return load_file(file, device=str(device))
    except SafetensorError as error:
        raise UserError(f"The weights {file} are damaged or cut short: restore them or train again.") from error


def write_model_directory(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into the folder `path`, all or nothing."""
    with atomic_directory(path) as temporary:
        write_model_files(temporary, config, tensors)


def write_model_files(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], weights: str = WEIGHTS
) -> None:
    """Write both files into an existing folder."""
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / weights, {"format": "pt"}
    )
    write_json(folder / CONFIG, config)


@contextmanager
def atomic_directory(path: Path, replaces: Iterable[str] = (CONFIG, WEIGHTS)) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes `path` on success and vanishes on any exception.

    A model folder at `path`, one with no files but `replaces`, is replaced; UserError where it holds others, so that
    nothing foreign is lost.
    """
    path = path.absolute()
    temporary, retired = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    foreign = sorted({f.name for f in path.iterdir()} - set(replaces)) if path.is_dir() else []
    if foreign or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} is not a model folder (it holds {foreign or 'a file'}): choose another output folder.")
    with explain_os_error(path):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                _flush(file)
            if path.exists():
                path.rename(retired)
            temporary.rename(path)
            _flush(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(retired, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def borrows_embedding(embedding: Tensor, target: Target) -> bool:
    """Whether a head's embedding is the target's (maybe held in another dtype), and so need not be stored."""
    return torch.equal(embedding.to(target.device, target.dtype), target.embedding)
