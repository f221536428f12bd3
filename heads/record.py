"""Write, read and check what is recorded of a head: its target in config.json of a native checkpoint; in `draftsmith.json`, the
passport of an export, also how the head is computed, what it learned from, what was measured of it, and the hashes of its files."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.heads.files import HEAD_WEIGHTS
from draftsmith.storage import fingerprint, sha256_file, write_json
from draftsmith.target.folder import read_object
from draftsmith.target.identity import CHANGES_OUTPUT, TargetIdentity, compare

if TYPE_CHECKING:
    from draftsmith.heads.base import DraftHead
    from draftsmith.target.target import Target

EARLIER = 1
"""Records of this version hold the target alone."""
RECORD = "draftsmith.json"
TUNED = "target"
"""The layout that the record of a tuned target has."""


@dataclass(frozen=True)
class HeadFacts:
    """How a head is computed, where engines and trainers are known to differ: what every reader of its files must find again.

    layer_ids: the aux layers, tapped at their input. last_state: where it reads the target's last state, `head.target_state`: "after_norm", "before_norm" or "vllm".
    attention: "causal" or "bidirectional", among the slots of a draft; None without attention. first_slot: of a block, the first that
    drafts (0 is the anchor's own). draft_vocab: a hash of the target ids that it drafts among, None for all. Lengths in tokens.
    """

    layer_ids: tuple[int, ...]
    last_state: str | None
    attention: str | None
    window: int | None
    first_slot: int | None
    max_speculative_tokens: int | None
    draft_vocab_size: int | None
    draft_vocab: str | None


@dataclass(frozen=True)
class Trained:
    """What a head learned from. longest: tokens of the longest of these answers. data: identifies them, as run.json does. warm_start:
    the digest of the head that training started from."""

    answers: int
    longest: int
    data: str | None = None
    warm_start: str | None = None


@dataclass(frozen=True)
class Measured:
    """What an evaluation found at one temperature, for one way to draft. tau: overall and by slice. prompts: identifies them, as
    result.json does."""

    drafter: str
    date: str
    dtype: str
    temperature: float
    num_speculative_tokens: int
    prompts: str | None
    tau: dict[str, float | None]
    tau_interval: tuple[float, float] | None


@dataclass(frozen=True)
class History:
    """What is known of a head's training, None where it is not, and of its acceptance."""

    trained: Trained | None = None
    measured: tuple[Measured, ...] = ()


NO_HISTORY = History()


@dataclass(frozen=True)
class Passport:
    """`draftsmith.json` of an export: what it is, and for which target (a `TargetIdentity`).

    num_speculative_tokens: drafted tokens of a round, the target's own not among them, that engines are started with. files: the SHA-256
    of each but README.md. All from `head` on is null or empty for tuned targets and in records of earlier versions.
    """

    draftsmith: str
    method: str
    layout: str
    target: dict[str, Any]
    head: HeadFacts | None = None
    num_speculative_tokens: int | None = None
    dtype: str | None = None
    trained: Trained | None = None
    measured: tuple[Measured, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    schema_version: int = 2

    def changed(self, folder: Path) -> list[str]:
        """Return the names of the files that are gone from the folder of the export, or are others than were exported, and of files with
        weights that were added to it: readers, engines too, may take them for the head's."""
        paths = {name: folder / name for name in self.files}
        others = [name for name, path in paths.items() if not path.is_file() or sha256_file(path) != self.files[name]]
        added = [name for name in HEAD_WEIGHTS if self.files and name not in paths and (folder / name).is_file()]
        return [*others, *added]


def write_passport(folder: Path, passport: Passport) -> None:
    """Write `draftsmith.json` into the folder of an export, bound to the files of a head that are there by their hashes."""
    if passport.head is not None:
        bound = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in (RECORD, "README.md")]
        passport = replace(passport, files={file.name: sha256_file(file) for file in bound})
    value = asdict(passport)
    write_json(folder / RECORD, value | {"digest": fingerprint(value)})


def read_passport(folder: Path) -> Passport | None:
    """Return what `draftsmith.json` of a folder holds, None where there is none.

    Raises UserError for one that is damaged, was changed since it was written, or is of a later version.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    value = read_object(file)
    if (version := value.get("schema_version")) is None:
        raise UserError(f"{file} is damaged: it is no record of a head; restore it, or export the head again.")
    if version == EARLIER:
        nothing = asdict(Passport("", "", "", {})) | {"measured": []}
        value = nothing | {name: value.get(name) for name in ("draftsmith", "method", "layout", "target")}
    elif version != Passport.schema_version:
        raise UserError(
            f"{file} is of schema version {version}, but this draftsmith reads {EARLIER} and {Passport.schema_version}: use the version "
            "of draftsmith that exported it."
        )
    elif value.pop("digest", None) != fingerprint(value):
        raise UserError(f"{file} was changed since the head was exported: restore it, or export the head again.")
    return read_dataclass(Passport, value, str(file))


def facts_of(head: "DraftHead") -> HeadFacts:
    """Return how a head is computed, as its passport says."""
    ids, vocab = head.reads.layer_ids, head.draft_vocab
    if vocab is not None and bool((vocab.cpu() == torch.arange(len(vocab))).all()):
        vocab = None  # nothing is mapped, which files may leave out
    reads_last = head.reads.target_states and not ids
    return HeadFacts(
        layer_ids=tuple(ids),
        last_state=(getattr(head.options, "target_state", None) or "after_norm") if reads_last else None,
        attention=None if head.config is None else "causal" if getattr(head, "causal", True) else "bidirectional",
        window=head.window,
        first_slot=getattr(head, "first_slot", None),
        max_speculative_tokens=head.drafts.max_speculative_tokens,
        draft_vocab_size=None if vocab is None else len(vocab),
        draft_vocab=None if vocab is None else hashlib.sha256(vocab.cpu().numpy().tobytes()).hexdigest(),
    )


def check_facts(folder: Path, passport: Passport, head: "DraftHead") -> None:
    """Raise UserError where a head that was loaded from an export is not computed as its passport says."""
    if passport.head is None or passport.head == facts_of(head):
        return
    recorded, found = asdict(passport.head), asdict(facts_of(head))
    name = next(name for name in recorded if recorded[name] != found[name])
    raise UserError(
        f"{folder} was exported as a head with {name} {recorded[name]}, but is read as one with {found[name]}: use the version of "
        f"draftsmith that exported it ({passport.draftsmith}), or export the head again."
    )


def what_it_reads(head: "DraftHead", made_for: TargetIdentity) -> TargetIdentity:
    """Return the part of the target's identity that `head` depends on, which is what is recorded: of a drafter that reads text alone no
    sizes and no hashes of weights. The fingerprint stays, so that another target is noticed."""
    sizes, hashes = ("hidden_size", "num_layers", "num_heads"), ("config", "weights", "embeddings", "lm_head")
    unknown: dict[str, Any] = {} if head.reads.target_states else dict.fromkeys((*sizes, *hashes))
    return replace(made_for, **unknown)


def read_record(folder: Path) -> TargetIdentity | None:
    """Return the target that the head in `folder` was trained for, None where it is not recorded.

    Raises UserError for a damaged record and for one of a later version.
    """
    if (passport := read_passport(folder)) is not None:
        return TargetIdentity.from_json(passport.target, str(folder / RECORD))
    config = read_object(folder / "config.json")
    if {"schema_version", "method", "target"} <= config.keys():
        return TargetIdentity.from_json(config["target"], str(folder / "config.json"))
    return None


def tuned_from(folder: Path) -> TargetIdentity | None:
    """Return the original target of one that was tuned together with its heads and exported whole; None for any other
    folder."""
    file = folder / RECORD
    whole = file.is_file() and read_object(file).get("layout") == TUNED
    return read_record(folder) if whole else None


def check_made_for(folder: Path, target: "Target", warn: Callable[[str], None] | None = None) -> None:
    """Compare the recorded target of the head in `folder` with `target`; without a record there is nothing to check.

    warn: receives a sentence for each difference; None: a target that computes other numbers is refused instead. Raises
    UserError for those, and always for a target of other sizes.
    """
    made_for = read_record(folder)
    if made_for is None:
        return
    differences = compare(made_for, target.identity)
    for one in differences:
        if one.severity == "refuse":
            raise UserError(
                f"The head {folder} was made for another target ({made_for.path}): {target.path} has {one.found}; "
                f"{one.remedy}."
            )
    if warn is not None:
        for one in differences:
            warn(f"the head {folder} was made for {made_for.path}; {target.path} has {one.found}; {one.remedy}.")
    elif changed := [one.kind for one in differences if one.kind in CHANGES_OUTPUT]:
        alone = changed == ["config"]
        what, those = ("configuration", "is not the one") if alone else ("weights", "are not those")
        raise UserError(
            f"The {what} of the target {target.path} {those} the head {folder} was trained for (fingerprint "
            f"{target.fingerprint}, expected {made_for.fingerprint}): give that target, or train again."
        )
