"""Which format a head's folder has, told by what is in it, and what loads it: one line per format.

A folder is known by its configuration where that says enough, else by the names of its tensors; what is recognised and
cannot be loaded is refused by name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.heads.head_files import (
    CONFIG,
    HEAD_WEIGHTS,
    HYDRA_PICKLED,
    INDEX,
    WEIGHTS,
    read_config,
    tensor_names,
    weights_file,
)
from draftsmith.heads.record import RECORD, TUNED
from draftsmith.heads.registry import METHODS, brought_layouts, is_known, served_method
from draftsmith.heads.target_files import read_object

if TYPE_CHECKING:
    from draftsmith.heads.base import DraftHead
    from draftsmith.heads.target import Target

GIVE = "give a draftsmith checkpoint or the folder of an EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DSpark, Medusa or Hydra head, or of a small Llama"


@dataclass(frozen=True)
class HeadFolder:
    """A folder and its config.json. known: the names of its tensors where they shall not be read from the files."""

    path: Path
    config: Mapping[str, Any]
    known: frozenset[str] | None = None

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors, without a leading `model.`."""
        names = tensor_names(self.path) if self.known is None else self.known
        return frozenset(name.removeprefix("model.") for name in names)

    @cached_property
    def words(self) -> str:
        """What the configuration calls itself, in small letters."""
        keys = ("architectures", "model_type", "speculators_model_type")
        return " ".join(str(self.config.get(key, "")) for key in keys).lower()

    def has(self, name: str) -> bool:
        """Whether a file of that name is in the folder."""
        return (self.path / name).is_file()


@dataclass(frozen=True)
class Format:
    """A format of heads: its name in sentences, whether a folder is of it, and what loads one, a callable (path, target) ->
    head or its "module:function" in draftsmith.heads; "" where nothing does. whole: it is a whole model, with a hidden size
    and a tokenizer of its own."""

    name: str
    fits: Callable[[HeadFolder], bool]
    loader: "str | Callable[[Path, Target], DraftHead]" = ""
    whole: bool = False

    @property
    def load(self) -> "Callable[[Path, Target], DraftHead]":
        """What loads a folder of this format."""
        if not isinstance(self.loader, str):
            return self.loader
        module, _, name = self.loader.partition(":")
        return getattr(import_module(f"draftsmith.heads.{module}"), name)


def _called(*words: str) -> Callable[[HeadFolder], bool]:
    return lambda folder: any(word in folder.words for word in words)


def _keys(*names: str) -> Callable[[HeadFolder], bool]:
    return lambda folder: bool(folder.config.keys() & set(names))


def _speculators(folder: HeadFolder) -> bool:
    return "speculators_model_type" in folder.config


def _is_hydra(folder: HeadFolder) -> bool:
    """Known by its configuration, or by its file, which has a name of its own."""
    return (
        any(key.startswith("hydra_") for key in folder.config)
        or weights_file(folder.path, (HYDRA_PICKLED,)) is not None
    )


def _is_medusa(folder: HeadFolder) -> bool:
    """Known by its configuration or by its file, unless that lies beside a whole model whose configuration is silent."""
    named = "medusa_num_heads" in folder.config or "medusa" in folder.words
    weights = weights_file(folder.path)
    return named or (
        weights is not None and "medusa" in weights.name and not (folder.has(WEIGHTS) or folder.has(INDEX))
    )


def _is_medusa_for_vllm(folder: HeadFolder) -> bool:
    """vLLM finds the class by a name, and the weights where models have them."""
    weights = weights_file(folder.path)
    return "medusa" in folder.words and weights is not None and "medusa" not in weights.name


def _is_eagle3(folder: HeadFolder) -> bool:
    """`hidden_norm` is in no other head of one layer: published configurations may name neither class nor vocabulary."""
    told = "draft_vocab_size" in folder.config or "eagle3" in folder.words
    return told or any(name.endswith(".hidden_norm.weight") for name in folder.names)


def _is_peagle(folder: HeadFolder) -> bool:
    # What may stand in the configuration is asked before the tensors' names, which take reading the file.
    told = folder.config.keys() & {"draft_vocab_size", "mask_token_id", "pard_token", "ptd_token_id"}
    return "peagle" in folder.words or (bool(told) and "mask_hidden" in folder.names)


def _is_llama(folder: HeadFolder) -> bool:
    """A whole plain Llama; what it drafts for, its loader asks."""
    known = folder.config.get("architectures") == ["LlamaForCausalLM"]
    return known and {"norm.weight", "embed_tokens.weight"} <= folder.names


CHECKPOINT = Format("a draftsmith checkpoint", _keys("schema_version", "method"), "checkpoint:load_checkpoint")
# The first that fits. Those that the configuration alone can tell stand before those that need the tensors' names.
FORMATS = (
    CHECKPOINT,
    Format(
        "an EAGLE-3 head of speculators",
        lambda f: f.config.get("speculators_model_type") == "eagle3",
        "eagle3_export:load_speculators_directory",
    ),
    Format(
        "a P-EAGLE head of speculators",
        lambda f: f.config.get("speculators_model_type") == "peagle",
        "peagle_export:load_peagle_speculators_directory",
    ),
    Format("a P-EAGLE head", _is_peagle, "peagle_export:load_peagle_directory"),
    Format("a DSpark head", _called("dspark"), "block_export:load_dspark_directory"),
    Format(
        "a DFlash head",
        lambda f: "dflash" in f.words or "dflash_config" in f.config,
        "block_export:load_dflash_directory",
    ),
    Format("a Hydra head", _is_hydra, "hydra_export:load_hydra_directory"),
    Format("an MTP head", _called("mtp")),
    Format("a head of speculators other than EAGLE-3", _speculators),
    Format("a Medusa head for vLLM", _is_medusa_for_vllm, "medusa_export:load_medusa_vllm_directory"),
    Format("a Medusa head", _is_medusa, "medusa_export:load_medusa_directory"),
    Format("an EAGLE-3 head", _is_eagle3, "eagle3_export:load_eagle3_directory"),
    Format("an EAGLE-1 head", lambda f: "fc.weight" in f.names, "eagle1_layouts:load_eagle1_directory"),
)
# What is no draft head at all, so that nothing else may be asked about it first.
STRANGERS = (
    Format("an MTP head", lambda f: any("eh_proj" in name for name in f.names)),
    Format("a draft model", _is_llama, "draft_lm_export:load_draft_model_directory", whole=True),
    Format("a whole language model", lambda f: "norm.weight" in f.names),
)


def recognise(path: Path) -> Format:
    """Return the format of the head in the folder `path`. Raises UserError for none and for one that cannot be loaded."""
    refuse_other_files(path)
    folder = HeadFolder(path, read_config(path))
    found = _brought(path) or next((one for one in (*FORMATS, *STRANGERS) if one.fits(folder)), None)
    if found is None:
        lacks = "no tensor fc.weight" if folder.names else "no weights"
        raise UserError(
            f"{path} holds no draft head that is known here: its {CONFIG} names no method of draftsmith's and no kind of "
            f"published head, and there is {lacks}; {GIVE}."
        )
    if found is CHECKPOINT and not is_known(str(folder.config["method"])):
        raise UserError(
            f"{path} holds a head of the method {folder.config['method']!r}, which no installed package adds: install the package "
            "that it came from."
        )
    if not found.loader:
        raise UserError(f"{path} is {found.name}, which cannot be loaded: {GIVE}.")
    return found


def _brought(path: Path) -> Format | None:
    """Return the format of an export in a layout that another package brings, by our record beside it; None for others. Raises
    UserError where that package is not installed any more."""
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    method, name = str(record.get("method")), record.get("layout")
    served = served_method(method)
    if name is None or served in METHODS or name == TUNED:
        return None
    found = next((one for one in brought_layouts(served) if one.contract.name == name), None)
    if found is None:
        raise UserError(
            f"{path} holds a head of the method {method!r} in the layout {name!r}, which no installed package adds: install the "
            "package that it came from."
        )
    return Format(f"a {method} head in the layout {name}", lambda folder: True, found.load)


def is_head_config(file: Path) -> bool:
    """Whether the folder of a config.json holds a draft head of a format that is known, loaded or not; False for a file
    that cannot be read, which is for the reader of models to tell.

    Names of tensors are read where the configuration has one layer only, since a head has no more.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            return False
        known = None if config.get("num_hidden_layers") == 1 else frozenset[str]()
        folder = HeadFolder(file.parent, config, known)
        return any(one.fits(folder) for one in FORMATS)
    except (OSError, ValueError, UserError):
        return False


def refuse_other_files(path: Path) -> None:
    """Refuse what has no configuration of a model, by its name where that is known."""
    if path.suffix == ".gguf" or (path.is_dir() and weights_file(path) is None and any(path.glob("*.gguf"))):
        raise UserError(f"{path} is a GGUF file or holds one, which only llama.cpp reads: {GIVE}.")
    if (path / "adapter_config.json").is_file() and weights_file(path) is None:
        raise UserError(f"{path} is a PEFT adapter, which changes a target and drafts nothing: {GIVE}.")
    if weights_file(path) is None and (path / CONFIG).is_file():
        raise UserError(
            f"{path} holds no weights (none of {', '.join(HEAD_WEIGHTS)}): restore them, or fetch the whole head."
        )
