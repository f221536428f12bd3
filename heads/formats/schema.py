"""The schema of a layout: its tensors and the keys of its config.json. Exports are written from it, checked against it, and
read by its names.

Engines load a wrong checkpoint in silence more often than not (a missing norm, absolute ids where offsets belong, a flag they
do not know), so what they read is written down here once, with the reasons beside it. The schemas themselves are in the
formats.py of each method.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import write_model_files
from draftsmith.heads.files import WEIGHTS
from draftsmith.heads.layers.from_target import LAYER_KEYS
from draftsmith.target.target import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Config = Mapping[str, Any]
ABSENT = object()
"""What a function among the keys of a schema returns for a key that is left out."""


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds: config.json and the tensors of the file `weights`.

    Attributes:
        config: The content of config.json.
        tensors: The tensors by the names that engines know.
        dtype: Of all float tensors.
        weights: The name of the file with the tensors.
        copies: Further files, by name, that are copied as they are.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    weights: str = WEIGHTS
    copies: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Export:
    """What the files of an export are made from.

    Attributes:
        head: As it is served.
        target: That it drafts for.
        dtype: Of the float tensors in the files.
        num_speculative_tokens: How many tokens an engine is told to draft, None where the caller does not say.
    """

    head: Any
    target: Target
    dtype: torch.dtype
    num_speculative_tokens: int | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a layout, or one per number in its name ("{i}"). It has the shape that it has in the head, which reading the
    files again holds against the sizes in config.json.

    Attributes:
        name: Its name in the layout; "{key}" with a key of config.json is the number there.
        ours: Its name in the head, with the same numbers; "" where that is the same.
        dtype: None for that of the floats.
        when: Whether the configuration asks for it; None for always.
        optional: It may be missing, which only reading the files again finds; an embedding is left out where it is the target's.
    """

    name: str
    ours: str = ""
    dtype: torch.dtype | None = None
    when: Callable[[Config], bool] | None = None
    optional: bool = False


@dataclass(frozen=True)
class Schema:
    """What the files of a layout hold, and how they are made of a head.

    What heads of the method may have and its engines lack is not here but in the rules of the layout, which are asked first:
    what breaks a schema is a fault of draftsmith.

    Attributes:
        name: Of the layout.
        tensors: No others may be there.
        keys: Of config.json: a value, a function of the `Export` that returns it, or a mapping of such keys.
        weights: The name of the file with the tensors.
    """

    name: str
    tensors: tuple[TensorRow, ...]
    keys: Mapping[str, Any]
    weights: str = WEIGHTS

    def head_tensors(self, export: Export) -> Mapping[str, Tensor]:
        """Return the tensors by the head's names. Layouts that hold more than the head, or other values, override it."""
        return export.head.state_dict()

    def copies(self, export: Export) -> Mapping[str, Path]:
        """Return further files of the export, by name."""
        return {}

    def save(self, folder: Path, files: ModelFiles) -> None:
        """Write the files into an existing folder."""
        write_model_files(folder, files.config, files.tensors, files.weights)
        for name, source in files.copies.items():
            shutil.copyfile(source, folder / name)

    def write(self, export: Export) -> ModelFiles:
        """Return the files that the schema makes of a head.

        Tensors that no row names keep the head's names, so that `check` can name them.

        Raises:
            UserError: The caller left something open that the configuration says, or the head has a layer that no engine computes.
        """
        config, tensors = self.values(export), {}
        for name, value in self.head_tensors(export).items():
            row, numbers = find_row(self.tensors, name, ours=True)
            theirs = row.name.format(**{**config, **numbers}) if row else name
            tensors[theirs] = value.detach().to(export.dtype if value.is_floating_point() else value.dtype)
        return ModelFiles(config, tensors, export.dtype, self.weights, self.copies(export))

    def values(self, export: Export) -> dict[str, Any]:
        """Return the keys of config.json with their values."""
        return _values(self.keys, export)

    def check(self, files: ModelFiles) -> None:
        """Hold the tensors against the rows.

        Raises:
            UserError: A tensor is missing, no row names it, or it has another dtype than its row says. Shapes, and that tensors are
                there for all numbers of a row, are left to the reading that follows every export.
        """
        there = set()
        for name, value in files.tensors.items():
            row, _ = find_row(self.tensors, name, files.config)
            if row is None or (row.when is not None and not row.when(files.config)):
                raise self._broken(name, "no such tensor", f"one of shape {list(value.shape)}")
            there.add(row.name)
            if value.dtype != (dtype := row.dtype or files.dtype):
                raise self._broken(name, f"{dtype}", f"{value.dtype}")
        for row in self.tensors:
            wanted = row.when(files.config) if row.when is not None else not row.optional and "{" not in row.name
            if wanted and row.name not in there:
                raise self._broken(row.name, "one", "nothing")

    def knows(self, name: str) -> bool:
        """Whether the layout has a tensor of that name."""
        return find_row(self.tensors, name)[0] is not None

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the layout under the head's names; what no row names keeps its name."""
        rows = {name: find_row(self.tensors, name) for name in tensors}
        return {
            (row.ours or row.name).format(**numbers) if row else name: tensors[name]
            for name, (row, numbers) in rows.items()
        }

    def _broken(self, name: str, expected: str, got: str) -> UserError:
        return UserError(
            f"The export does not fit the layout {self.name}: tensor {name}: expected {expected}, got {got}; this is a fault of "
            "draftsmith, so report it, and export another layout meanwhile."
        )


def find_row(
    rows: tuple[TensorRow, ...], name: str, config: Config | None = None, *, ours: bool = False
) -> tuple[TensorRow | None, dict[str, int]]:
    """Return the first row of that name and the numbers in it, of which those that are keys of `config` must be what it says."""
    for row in rows:
        if match := _pattern((ours and row.ours) or row.name).fullmatch(name):
            numbers = {key: int(number) for key, number in match.groupdict().items()}
            if all((config or {}).get(key, number) == number for key, number in numbers.items()):
                return row, numbers
    return None, {}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(name)))


def _values(keys: Mapping[str, Any], export: Export) -> dict[str, Any]:
    """Return the keys with what their functions return, without those that are left out."""
    config = {}
    for name, value in keys.items():
        value = value(export) if callable(value) else value
        if value is not ABSENT:
            config[name] = _values(value, export) if isinstance(value, Mapping) else value
    return config


def renamed(rows: Iterable[TensorRow], changes: Mapping[str, str]) -> tuple[TensorRow, ...]:
    """Return copies of the rows with another beginning of their names; `ours` keeps the head's names.

    changes: beginnings of names -> what they become. "" is the beginning of every name, and stands last.
    """
    theirs = []
    for row in rows:
        old = next((beginning for beginning in changes if row.name.startswith(beginning)), None)
        name = row.name if old is None else changes[old] + row.name.removeprefix(old)
        theirs.append(replace(row, name=name, ours=row.ours or row.name))
    return tuple(theirs)


def llama_layer(prefix: str) -> tuple[TensorRow, ...]:
    """Return the weights of a Llama layer."""
    attention = (f"self_attn.{part}_proj" for part in "qkvo")
    mlp = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
    names = ("input_layernorm", *attention, "post_attention_layernorm", *mlp)
    return tuple(TensorRow(f"{prefix}{name}.weight") for name in names)


def _rope_scaling(export: Export) -> Any:
    """Scaling as engines with older transformers read it; they know no key for none."""
    rope = export.head.config.rope_parameters
    return {k: v for k, v in rope.items() if k != "rope_theta"} if rope["rope_type"] != "default" else ABSENT


def _activation(export: Export) -> str:
    """The activation of a draft's layer: engines compute no other than SiLU, whatever config.json says."""
    if (name := export.head.config.hidden_act) != "silu":
        raise UserError(
            f"The head cannot be exported: its layers have the activation {name!r}, and engines compute drafts with SiLU; measure it "
            "with draftsmith evaluate."
        )
    return name


LLAMA_KEYS: dict[str, Any] = {
    "model_type": "llama",
    **{name: attrgetter(f"head.config.{name}") for name in LAYER_KEYS},  # head_dim too: H // N is not always right
    "hidden_act": _activation,
    "num_hidden_layers": 1,
    # The base that engines read outside rope_parameters.
    "rope_theta": lambda export: float(export.head.config.rope_parameters["rope_theta"]),
    # Biases do not load in llama.cpp, and other readers would look for them.
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": attrgetter("dtype_name"),
    "rope_scaling": _rope_scaling,
}
"""What describes a Llama layer without biases."""


def draft_vocab_size(export: Export) -> int:
    """Return how many tokens the head drafts among."""
    return export.target.vocab_size if export.head.draft_vocab is None else len(export.head.draft_vocab)


def rendered_by(data: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return `Serving.rendered` by the section `data` of a recipe."""
    template, file = ((data or {}).get(key) for key in ("template", "chat_template"))
    path = str(Path(file).expanduser().absolute()) if file else ""
    return json.dumps(template) if template else "", path


def target_reference(target: Target) -> str:
    """Return how an engine finds the target from wherever it is started: the full path of a folder or file, or a Hub name."""
    return str(Path(target.path).resolve()) if Path(target.path).exists() else target.path


# A speculators config keeps what makes the layer in a section of its own.
LAYER_SECTION = "transformer_layer_config"


def flatten(config: Config) -> dict[str, Any]:
    """Return the keys of a flat config.json for either kind: those of the layer's section move to the top."""
    section = config.get(LAYER_SECTION)
    return {**section, **config} if isinstance(section, Mapping) else dict(config)
