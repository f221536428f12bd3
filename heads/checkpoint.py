"""Save and load a head's native checkpoint: a folder with `config.json` and `model.safetensors`.

The target's input embeddings are not stored again. The config records the identity of the target
(draftsmith.target.identity): a head loads only onto the target that it was trained for, unless the caller accepts
warnings.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.text import kind_of
from draftsmith.heads.base import DraftHead
from draftsmith.heads.files import CONFIG, WEIGHTS, explain_config, read_config, read_weights
from draftsmith.heads.record import what_it_reads
from draftsmith.heads.registry import find_method
from draftsmith.heads.vocab import check_draft_vocab
from draftsmith.storage import atomic_directory, write_json
from draftsmith.target.config import check_config_values
from draftsmith.target.target import Target

SCHEMA_VERSION = 1
EMBEDDING = "embed_tokens.weight"
_SIZES = re.compile(r"(size|dim|heads|layers|rank|depths|steps|width|_r|window)$")
_ANY_SIZE = 4096
"""Sizes that no tensor need have: a window, the depth of a tree, heads of a layer."""


def save_head(head: DraftHead, path: Path, target: Target, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write `head` to the folder `path`, all or nothing; an older checkpoint there is replaced, other files stay.

    tensors: the whole state dict where the head itself holds only a shard of it; None: the head's own.
    Raises UserError where the disk is full or the folder is not writable.
    """
    config = {
        "schema_version": SCHEMA_VERSION,
        "method": head.method,
        **head.describe(),
        "layer_ids": list(head.reads.layer_ids),
        "target": what_it_reads(head, target.identity).to_json(),
    }
    tensors = dict(head.state_dict() if tensors is None else tensors)
    if EMBEDDING in tensors and borrows_embedding(tensors[EMBEDDING], target):
        del tensors[EMBEDDING]
    with atomic_directory(Path(path)) as temporary:
        write_model_files(temporary, config, tensors)
        for other in Path(path).iterdir() if Path(path).is_dir() else ():
            if not (temporary / other.name).exists():
                (shutil.copytree if other.is_dir() else shutil.copy2)(other, temporary / other.name)


def load_checkpoint(path: Path, target: Target) -> DraftHead:
    """Return the head of a checkpoint that `save_head` wrote, without checking which target it was trained for."""
    config = read_config(path)
    if config.get("schema_version") != SCHEMA_VERSION or "method" not in config:
        raise UserError(
            f"{path / CONFIG} is not a draftsmith checkpoint of schema version {SCHEMA_VERSION}: give the folder that "
            "training wrote."
        )
    file, tensors = read_weights(path, target.device, (WEIGHTS,))
    remedy = "restore it or train again"
    if not isinstance(config["method"], str):
        raise UserError(f"{path / CONFIG} names no method but {kind_of(config['method'])}: {remedy}.")
    method, vocab = find_method(config["method"]), tensors.get("draft_vocab")
    if vocab is not None:
        check_draft_vocab(vocab, target.vocab_size, file)
    own = {name: value for name, value in config.items() if name != "target"}  # whose sizes are not the head's
    check_layer_sizes(own, tensors, path / CONFIG, target.vocab_size)
    with explain_config(path, f"{config['method']} head", remedy):
        head = method.load(config, target, vocab)
    if head.reads.layer_ids:
        target.check_layer_ids(head.reads.layer_ids)
    missing = EMBEDDING in head.state_dict() and EMBEDDING not in tensors
    if missing and not borrows_embedding(head.get_parameter(EMBEDDING), target):
        raise UserError(
            f"{file} lacks the tensor {EMBEDDING}, and the target's has another width: it is incomplete; train it again."
        )
    fill(head, tensors, file)
    return head


def check_layer_sizes(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: Path, vocab_size: int = 0
) -> None:
    """Raise UserError where a configuration names a size, or a number of layers, that the weights beside it cannot have.

    vocab_size: the target's, which heads name that share its embedding and have a draft vocabulary. Found before anything is built of it: a layer of 10^9 would take all memory to be compared with the weights.
    """
    largest = max((size for value in tensors.values() for size in value.shape), default=0)
    for name, value in config.items():
        if name == "vocab_size" and value == vocab_size:
            continue
        if isinstance(value, dict):
            if name.endswith("config"):
                check_config_values(value, file, "restore it or train again", f"{name}.")
            check_layer_sizes(value, tensors, file, vocab_size)
        elif type(value) is int and _SIZES.search(name) and value > max(largest, _ANY_SIZE):
            raise UserError(
                f"{file}: {name} is {value}, but no tensor of the weights is that large ({largest}): restore it or train again."
            )


_NOT_COMPUTED = {
    r"\.(kv_a_proj_with_mqa|kv_a_proj|kv_b_proj|kv_a_layernorm|q_a_proj|q_b_proj|q_a_layernorm)\b": "compresses its keys and values (MLA)",
    r"self_attn\.[qk]_(norm|layernorm)\b": "normalises its queries and keys",
    r"self_attn\.(sinks|gate_proj|g_proj)\b": "has sinks or gates in its attention",
    r"\.(experts|shared_experts?|router)\.|\.mlp\.gate\.": "is a mixture of experts",
    r"_feedforward_layernorm\b|\.(enorm|hnorm)\b|^(enorm|hnorm)\b": "has norms that EAGLE's layer has not",
    r"_proj\.bias$": "has biases in its projections",
    r"^token_map$": "drafts from a part of the vocabulary (token_map)",
    r"(_scale(_inv)?|qweight|qzeros|weight_packed)$": "is quantized",
}
"""Tensors of layers that published heads have -> what such a head does."""


def fill(
    head: DraftHead, tensors: Mapping[str, Tensor], source: Path, remedy: str = "export or train it again"
) -> None:
    """Load `tensors` into `head`, floats as fp32. Raises UserError, ending in `remedy`, for missing or unknown tensors,
    for other shapes, and for integers in place of floats.

    Only the embedding may be missing (the head then keeps the target's). Parameters are replaced, never written
    into: the embedding shares the target's memory.
    """
    expected = head.state_dict()
    missing = [name for name in expected if name not in tensors and name != EMBEDDING]
    surplus = [name for name in tensors if name not in expected]
    for name in surplus:
        if what := next((words for pattern, words in _NOT_COMPUTED.items() if re.search(pattern, name)), None):
            raise UserError(
                f"{source} holds the tensor {name}: the head {what}, which is not computed here; serve it with the engine that it was "
                "made for, or train one."
            )
    if missing or surplus:
        what = f"lacks the tensor {missing[0]}" if missing else f"holds the unknown tensor {surplus[0]}"
        raise UserError(f"{source} {what}: it is incomplete or of another version; {remedy}.")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{source}: tensor {name} has shape {list(value.shape)}, but its configuration says "
                f"{list(expected[name].shape)}; {remedy}."
            )
        if value.is_floating_point() != expected[name].is_floating_point():
            raise UserError(
                f"{source} holds {name} as {value.dtype}, but this version reads {expected[name].dtype}; {remedy}."
            )
    if bad := next((n for n, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())), None):
        raise UserError(f"{source}: tensor {bad} holds NaN or infinity, so drafts would mean nothing; {remedy}.")
    floats = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    head.load_state_dict(floats, strict=False, assign=True)


def write_model_files(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], weights: str = WEIGHTS
) -> None:
    """Write both files into an existing folder. weights: a name ending in .pt writes a pickle, which holds shared
    tensors once."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if weights.endswith(".pt"):
        torch.save(plain, folder / weights)
    else:
        save_file(plain, folder / weights, {"format": "pt"})
    write_json(folder / CONFIG, config)


@contextmanager
def model_directory(path: Path, replaces: Iterable[str] = (CONFIG, WEIGHTS)) -> Iterator[Path]:
    """Yield an empty folder next to `path` that becomes `path` on success and is removed on any exception.

    A folder at `path` is replaced if it holds no files but `replaces`; otherwise UserError is raised, so that no other
    files are lost. Where `path` is a link, the folder that it points to is written.
    """
    check_replaceable(path, replaces)
    with atomic_directory(path) as temporary:
        yield temporary


def check_replaceable(path: Path, replaces: Iterable[str]) -> None:
    """Raise UserError where `path` is a file, or a folder with other files than `replaces`."""
    foreign = sorted({f.name for f in path.iterdir()} - set(replaces)) if path.is_dir() else []
    if foreign or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} is not a model folder (it holds {foreign or 'a file'}): choose another output folder.")


def borrows_embedding(embedding: Tensor, target: Target) -> bool:
    """Return whether a head's embedding is the target's, exactly or in a wider dtype, and so need not be stored.

    A difference too small for the target's dtype counts: such an embedding has been trained.
    """
    held, own = embedding.to(target.device), target.embedding
    return torch.equal(held.to(own.dtype), own) and torch.equal(held, own.to(held.dtype))
