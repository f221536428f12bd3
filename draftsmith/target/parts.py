"""What a finished store of hidden states leaves to ask of its target: embeddings, output projection, and what new heads measure on it.

The store keeps the measured part in a file of its own, with the identity of the target; the two matrices are read from the target's
folder, whose layers may be missing.

Shapes: B = 2 rows of n probe tokens, A aux layers, Ht target hidden size, V target vocab.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import open_file, parse_json
from draftsmith.foreign.weights import TensorSpan, read_header
from draftsmith.storage import atomic_path
from draftsmith.target.config import attention_of, opener_of
from draftsmith.target.folder import (
    EMBEDDINGS,
    find_projection,
    find_tensor,
    fingerprint_directory,
    hash_json,
    hash_weights,
    local_folder,
    read_directory,
    read_eos_ids,
    stable_config,
    weight_files,
)
from draftsmith.target.gguf_file import model_folder
from draftsmith.target.identity import TargetIdentity
from draftsmith.target.pretrained import load_config, probe_ids
from draftsmith.target.target import Target, TargetOutput

PARTS = "target.safetensors"
"""The file in a store: last [B, n, Ht], aux.{k} [B, n, Ht] and final_norm [Ht] of the probe, and `Record` in its metadata."""
_AGAIN, _FETCH = "make the store again with --redo features", "fetch the target again"
_ROWS = 4096


@dataclass(frozen=True)
class Record:
    """What a store says of its target. identity: of `TargetIdentity`. dtype: that it computed in. scale, softcap: of its logits.
    embedding, projection, bias: names of tensors in its files. files: hashes of its weight files by name."""

    identity: dict[str, Any]
    dtype: str
    scale: float
    softcap: float | None
    embedding: str
    projection: str
    bias: str | None
    files: dict[str, str]


class TargetParts(Target):
    """A target without its layers, whose states are known for the tokens of `probe_ids` alone."""

    def __init__(self, model: Any, record: Record, probe: dict[str, Tensor], path: str, directory: Path) -> None:
        self._recorded = replace(TargetIdentity.from_json(record.identity, PARTS), path=path)
        super().__init__(model, path=path, fingerprint=str(self._recorded.fingerprint), directory=directory)
        self.head.scale, self.head.softcap = record.scale, record.softcap
        self._probe = probe

    @cached_property
    def identity(self) -> TargetIdentity:
        """What distinguishes the target that made the store."""
        return self._recorded

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """As of the whole target, of which transformers reads the generation config too."""
        return read_eos_ids(cast(Path, self.directory)) or ()

    @property
    def layer_ids(self) -> set[int]:
        """The aux layers whose states of the probe are known."""
        return {int(name.removeprefix("aux.")) for name in self._probe if name.startswith("aux.")}

    @property
    def final_norm(self) -> Tensor | None:
        """[Ht] what `final_norm_weight` found of the whole target."""
        return self._probe.get("final_norm")

    def forward(self, input_ids: Tensor, *, layer_ids: tuple[int, ...] = (), **others: Any) -> TargetOutput:
        """Return the states of the probe's tokens."""
        known = self.layer_ids.issuperset(layer_ids) and torch.equal(input_ids, probe_ids(self))
        assert known, f"The layers of {self.path} are not loaded."
        last = self._probe["last"]
        aux = [self._probe[f"aux.{k}"] for k in layer_ids]
        return TargetOutput(torch.cat(aux, -1) if aux else last[..., :0], last)


class SharedTarget(Target):
    """A target whose layers this process shares with others, once all of them have asked it for what heads want to know of any: the
    states of the tokens of `probe_ids`, and its final norm. So one process may make a head alone; any other pass takes all of them.

    final_norm: [Ht] what `final_norm_weight` found, None for nothing. tell: of the `Team` of all processes.
    """

    def __init__(self, target: Target, final_norm: Tensor | None, tell: Callable[[Callable[[], Any]], Any]) -> None:
        vars(self).update(vars(target))
        self._tell, self.final_norm, self._ids = tell, final_norm, probe_ids(target)
        self._probe = target.forward(self._ids, layer_ids=tuple(range(target.num_layers)))

    def agreed(self, make: Callable[[], Any]) -> Any:
        """Return what `make` does in rank 0."""
        return self._tell(make)

    def forward(self, input_ids: Tensor, *, layer_ids: tuple[int, ...] = (), **others: Any) -> TargetOutput:
        """As `Target.forward`, where the probe's states are known."""
        if others or input_ids.shape != self._ids.shape or not torch.equal(input_ids, self._ids):
            return super().forward(input_ids, layer_ids=layer_ids, **others)
        streams = self._probe.aux.unflatten(-1, (self.num_layers, self.hidden_size))
        return TargetOutput(streams[..., list(layer_ids), :].flatten(-2), self._probe.last)


@torch.no_grad()
def write_parts(target: Target, file: Path, layer_ids: Sequence[int], final_norm: Tensor | None) -> None:
    """Write what heads that read these layers need of a target. Writes nothing where its folder does not hold its embeddings and
    projection as they are, such as packed ones: then the whole target is read, as ever."""
    if target.directory is None:
        return
    spans = read_directory(target.directory)
    embedding, projection = find_tensor(spans, EMBEDDINGS), find_projection(spans, target.directory)
    beside = "" if projection is None else f"{projection.name.removesuffix('weight')}bias"
    bias = next((span for span in spans if span.name == beside), None)
    held = ((embedding, target.embedding), (projection, target.head.weight), (bias, target.head.bias))
    if embedding is None or projection is None or not all(_holds(span, value) for span, value in held):
        return
    output = target.forward(probe_ids(target), layer_ids=tuple(layer_ids))
    tensors = {"last": output.last} | ({} if final_norm is None else {"final_norm": final_norm})
    streams = output.aux.split(target.hidden_size, -1)
    tensors |= {f"aux.{k}": stream for k, stream in zip(layer_ids, streams, strict=False)}
    record = Record(
        identity=replace(target.identity, path=None).to_json(),  # however it was named: the same bytes
        dtype=target.dtype_name,
        scale=target.head.scale,
        softcap=target.head.softcap,
        embedding=embedding.name,
        projection=projection.name,
        bias=None if bias is None else bias.name,
        files={one.name: _hash_file(one) for one in weight_files(target.directory)},
    )
    with atomic_path(file) as temporary:
        plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
        save_file(plain, temporary, {"target": json.dumps(asdict(record), sort_keys=True)})


def open_parts(
    path: str, file: Path, *, dtype: str, device: str, attn_implementation: str, trust_remote_code: bool
) -> TargetParts | None:
    """Open the target that made a store, without its layers; None where the store does not say enough, or the target at `path` is
    another or in another dtype, which opening the whole one tells.

    file: of `write_parts`. Raises UserError where files of the target are missing and what is there is another's.
    """
    folder = local_folder(str(model_folder(path)))
    if folder is None or not file.exists():
        return None
    record, probe = _read(file)
    files = weight_files(folder, partly=True)
    there = [one for one in files if one.is_file()]
    spans = {span.name: span for one in there for span in read_header(one, _FETCH)}
    if dtype not in ("auto", record.dtype) or not {record.embedding, record.projection} <= spans.keys():
        return None
    if len(there) == len(files):
        if fingerprint_directory(folder) != record.identity["fingerprint"]:
            return None
    elif odd := _another(folder, there, record):
        raise UserError(
            f"The target {path} lacks weights, and its {odd} is not that of the target which made the store {file.parent}: give "
            f"that target, or fetch this one whole and {_AGAIN}."
        )
    source, taken = str(model_folder(path)), getattr(torch, record.dtype)
    config = load_config(source, trust_remote_code)
    own = getattr(config, "dtype", None) or record.dtype
    if dtype == "auto" and str(own).removeprefix("torch.") != record.dtype:
        return None  # the store was made in another than the checkpoint's
    with foreign_code(f"Cannot open the target {path}", "fetch it again"), torch.device("meta"):
        model = opener_of(config).from_config(
            config,
            dtype=taken,
            attn_implementation=attention_of(config, attn_implementation),
            trust_remote_code=trust_remote_code,
        )
    held = {}
    for name in filter(None, {record.embedding, record.projection, record.bias}):
        at = spans[name].file
        with foreign_code(f"{at} is cut short or damaged", _FETCH), safe_open(at, "pt") as opened:
            held[name] = nn.Parameter(opened.get_tensor(name).to(device, taken), False)
    model.get_input_embeddings().weight = held[record.embedding]
    projection = model.get_output_embeddings()
    projection.weight = held[record.projection]
    if record.bias is not None:
        projection.bias = held[record.bias]
    probe = {name: value.to(device) for name, value in probe.items()}
    return TargetParts(model, record, probe, path, folder)


def _another(folder: Path, there: list[Path], record: Record) -> str | None:
    """Return the name of a file that the target of a record has not in this form; None where all are its."""
    if hash_json(stable_config(folder)) != record.identity["config"]:
        return "config.json"
    return next((one.name for one in there if record.files.get(one.name) != _hash_file(one)), None)


def _hash_file(file: Path) -> str:
    return hash_weights(sorted(read_header(file, "fetch the target again"), key=lambda span: span.name))


def _read(file: Path) -> tuple[Record, dict[str, Tensor]]:
    """Return what `write_parts` wrote."""
    open_file(file, _AGAIN).close()
    with foreign_code(f"{file} is cut short or damaged", _AGAIN), safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("target", "")
        probe = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return read_dataclass(Record, parse_json(text, str(file), _AGAIN), str(file)), probe


def _holds(span: TensorSpan | None, value: Tensor | None) -> bool:
    """Return whether a tensor on disk is `value`, up to its dtype; some rows at a time."""
    if span is None or value is None:
        return span is value
    if span.shape != tuple(value.shape):
        return False
    with foreign_code(f"{span.file} is cut short or damaged", _FETCH), safe_open(span.file, "pt") as opened:
        rows = opened.get_slice(span.name)
        starts = range(0, len(value), _ROWS)
        return all(torch.equal(rows[at : at + _ROWS].to(value), value[at : at + _ROWS]) for at in starts)
