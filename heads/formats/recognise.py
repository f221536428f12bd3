"""Which format a head's folder has, told by what is in it, and loading whatever it is.

A folder is known by its configuration where that says enough, else by the names of its tensors; what is recognised and
cannot be loaded is refused by name. Each method lists the formats of its heads as FORMATS in its formats.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.adapter import DraftAdapter, add_adapter
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import load_checkpoint
from draftsmith.heads.files import (
    ADAPTER_CONFIG,
    CONFIG,
    HEAD_WEIGHTS,
    all_weights_files,
    explain_config,
    read_config,
    tensor_names,
    unwrapped,
    weights_file,
)
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.record import RECORD, TUNED, Passport, check_facts, check_made_for, read_passport
from draftsmith.heads.registry import find_method, is_known, methods, served_method
from draftsmith.heads.warm_start import restart
from draftsmith.storage import fingerprint, sha256_file
from draftsmith.target.folder import read_object
from draftsmith.target.target import Target

HINT = "give a draftsmith checkpoint or the folder of an EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DFlash2, Domino, DSpark, JetSpec, XPress, Medusa or Hydra head, or of a small Llama"


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


_WHOLE = 20


@dataclass(frozen=True)
class Format:
    """A format of heads.

    name: in sentences. rank: formats are tried from the lowest rank up, so one that another could be taken for has a lower
    one; below 10 the configuration alone tells, from 10 on names of tensors are read too, and from 20 on folders are of no
    draft head but of a model. fits: whether a folder is of it. load(path, target) -> head; None where nothing loads it.
    """

    name: str
    rank: int
    fits: Callable[[HeadFolder], bool]
    load: Callable[[Path, Target], DraftHead] | None = None

    @property
    def whole(self) -> bool:
        """Whether folders of it hold a whole model, with a hidden size and a tokenizer of its own."""
        return self.rank >= _WHOLE


CHECKPOINT = Format(
    "a draftsmith checkpoint", 0, lambda f: bool(f.config.keys() & {"schema_version", "method"}), load_checkpoint
)


def head_digest(folder: Path) -> str:
    """Return 16 hex digits that name the head in a folder by its weights and its configuration, as layers, norms and states that it reads are
    named there alone; of a checkpoint without the target, which is compared on its own, and the models that its training started from."""
    files = all_weights_files(folder)
    if recognise(folder) is not CHECKPOINT:
        return fingerprint([sha256_file(file) for file in (folder / CONFIG, *files)])
    config = read_config(folder)
    method, options = str(config.get("method")), config.get("options")
    if is_known(method) and isinstance(options, dict):
        models = getattr(find_method(method).options_class, "MODELS", ())
        config["options"] = {key: value for key, value in options.items() if key not in models}
    computed = {key: value for key, value in config.items() if key != "target"}
    weights = [sha256_file(file) for file in files]
    digest = fingerprint([computed, *weights])
    _BY_WEIGHTS[digest] = weights[0][:16]
    return digest


_BY_WEIGHTS: dict[str, str] = {}
"""What earlier versions named checkpoints by, their weights alone, by the digests that were asked for."""


def earlier_digest(digest: str) -> str:
    """Return how an earlier version named the head of a digest that `head_digest` has returned; any other text as it is."""
    return _BY_WEIGHTS.get(digest, digest)


def _load_adapted(path: Path, target: Target) -> DraftHead:
    """Return the head that an adapter of `train.lora_rank` belongs to, with the adapter in its weights."""
    config, file = read_config(path), path / CONFIG
    facts = config["adapter"]
    kinds = {"rank": int, "alpha": float | int, "base": str, "digest": str}
    wrong = [k for k, kind in kinds.items() if not isinstance(facts, dict) or not isinstance(facts.get(k), kind)]
    if wrong or facts["rank"] < 1:
        raise UserError(
            f"{file}: adapter.{(wrong or ['rank'])[0]} is missing or no value for it: restore it, or train it again."
        )
    adapter = DraftAdapter(facts["rank"], facts["alpha"], Path(facts["base"]), facts["digest"])
    if not adapter.base.is_dir():
        raise UserError(
            f"{path} is an adapter of the head {adapter.base}, which is not there: put it back, or name its place as adapter.base in {file}."
        )
    digest = head_digest(adapter.base)
    if adapter.digest not in (digest, earlier_digest(digest)):
        raise UserError(
            f"{path} is an adapter of another head than {adapter.base} is now (digest {digest}, expected {adapter.digest}): name the "
            f"place of its own as adapter.base in {file}."
        )
    # Of the target it was trained for; its own record has been compared.
    head = load_head(adapter.base, target, warn=lambda text: None)
    if options := config.get("options"):  # with which it was trained, on the base's weights
        with explain_config(path, f"{head.method} adapter", "restore it, or train it again"):
            head = restart(head, type(head.options)(**options), target).eval()
    return add_adapter(head, path, adapter)


ADAPTED = Format("an adapter of a head", -1, lambda f: {"adapter", "method"} <= f.config.keys(), _load_adapted)

OTHER_FORMATS = (
    Format("an MTP head", 5, lambda f: "mtp" in f.words),
    Format("a head of speculators other than EAGLE-3", 6, lambda f: "speculators_model_type" in f.config),
    Format("a whole language model", 29, lambda f: "norm.weight" in f.names),
)
"""Formats of no method here, each with its own sentence."""


def formats() -> list[Format]:
    """Return all formats in the order in which they are tried."""
    of_methods = [one for method in methods().values() for one in method.recognised]
    return sorted([ADAPTED, CHECKPOINT, *of_methods, *OTHER_FORMATS], key=lambda one: one.rank)


def load_head(path: Path | str, target: Target, *, warn: Callable[[str], None] | None = None) -> DraftHead:
    """Return a head in float32, in eval mode, on the target's device.

    Args:
        path: the folder of a checkpoint, of an export for an engine, or of a head that others have published.
        target: what the head drafts for.
        warn: receives a sentence per difference between `target` and the target that the head was made for, where the folder
            records that one; None refuses a target that computes something else.

    Raises:
        UserError: the head was made for other sizes or, without `warn`, for another target; or the folder holds no head, or is
            damaged or of a format that cannot be loaded.
    """
    path = Path(path)
    known = recognise(path)
    passport = read_passport(path)
    if passport is not None:
        _check_files(path, passport)
    check_made_for(path, target, warn)
    assert known.load is not None
    head = known.load(path, target)
    if passport is not None:
        check_facts(path, passport, head)
    return head.to(target.device).eval()


def _check_files(path: Path, passport: Passport) -> None:
    """Raise UserError where the files of an export are not those of its passport."""
    name = next(iter(passport.changed(path)), None)
    if name in passport.files:
        raise UserError(
            f"{path / name} is not the file that was exported (its hash is not that in {RECORD}): restore it, export the head "
            f"again or, if you changed it yourself, remove {RECORD} and measure the head anew."
        )
    if name is not None:
        raise UserError(
            f"{path / name} was not exported with the head ({RECORD} does not name it), but may be read in place of its weights: move it "
            f"away or, if it holds the head's weights now, remove {RECORD} and measure the head anew."
        )


def recognise(path: Path) -> Format:
    """Return the format of the head in the folder `path`. Raises UserError for none and for one that cannot be loaded."""
    refuse_other_files(path)
    folder = HeadFolder(path, read_config(path))
    known = _of_record(path) or next((one for one in formats() if one.fits(folder)), None)
    if known is None:
        lacks = "no tensor fc.weight" if folder.names else "no weights"
        raise UserError(
            f"{path} holds no draft head that is known here: its {CONFIG} names no method of draftsmith's and no kind of "
            f"published head, and there is {lacks}; {HINT}."
        )
    if known is CHECKPOINT and "method" in folder.config and not is_known(str(folder.config["method"])):
        raise UserError(
            f"{path} holds a head of the method {folder.config['method']!r}, which no installed package adds: install the package "
            "that it came from."
        )
    if known.load is None:
        raise UserError(f"{path} is {known.name}, which cannot be loaded: {HINT}.")
    return known


def _of_record(path: Path) -> Format | None:
    """Return the format of an export of draftsmith's, ours or another package's, by the record beside it; None where there is
    none. Raises UserError for the layout of a package that is not installed any more."""
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    method, name = str(record.get("method")), record.get("layout")
    if name in (None, TUNED):
        return None
    layout = layouts_of(method).get(str(name))
    if layout is not None:
        rank = max((one.rank for one in find_method(served_method(method)).recognised), default=0)
        return Format(f"a {method} head in the layout {name}", rank, lambda folder: True, layout.load)
    if served_method(method) in methods():
        return None
    raise UserError(
        f"{path} holds a head of the method {method!r} in the layout {name!r}, which no installed package adds: install the "
        "package that it came from."
    )


def is_head_config(file: Path) -> bool:
    """Whether the folder of a config.json holds a draft head of a format that is known, loaded or not; False for a file
    that cannot be read, which is for the reader of models to tell.

    Names of tensors are read where the configuration has one layer only, since a head has no more.
    """
    try:
        config = unwrapped(read_object(file)) if file.is_file() else {}
        if (recorded := _of_record(file.parent)) is not None:
            return not recorded.whole
        known = None if config.get("num_hidden_layers") == 1 else frozenset[str]()
        folder = HeadFolder(file.parent, config, known)
        return any(not one.whole and one.fits(folder) for one in formats())
    except UserError:
        return False


def refuse_head(path: str) -> None:
    """Raise UserError where a local path that shall be a target is a draft head's folder."""
    if is_head_config(Path(path) / CONFIG):
        raise UserError(f"The target {path} is a draft head: give the folder of the model that it drafts for.")


def refuse_other_files(path: Path) -> None:
    """Refuse what has no configuration of a model, by its name where that is known."""
    if path.suffix == ".gguf" or (path.is_dir() and weights_file(path) is None and any(path.glob("*.gguf"))):
        raise UserError(f"{path} is a GGUF file or holds one, which only llama.cpp reads: {HINT}.")
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise UserError(f"{path} is a PEFT adapter, which changes a target and drafts nothing: {HINT}.")
    if weights_file(path) is None and (path / CONFIG).is_file():
        raise UserError(
            f"{path} holds no weights (none of {', '.join(HEAD_WEIGHTS)}): restore them, or fetch the whole head."
        )
