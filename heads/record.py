"""Write, read and check the record of a head's target: in config.json of a native checkpoint, in `draftsmith.json` of
an export."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import draftsmith
from draftsmith.errors import UserError
from draftsmith.storage import write_json
from draftsmith.target.folder import read_object
from draftsmith.target.identity import CHANGES_OUTPUT, TargetIdentity, compare

if TYPE_CHECKING:
    from draftsmith.heads.base import DraftHead
    from draftsmith.target.target import Target

SCHEMA_VERSION = 1
RECORD = "draftsmith.json"
TUNED = "target"
"""The layout that the record of a tuned target has."""


def write_record(folder: Path, method: str, layout: str, made_for: TargetIdentity) -> None:
    """Write `draftsmith.json` into the folder of an export: what it is, and for which target."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "draftsmith": draftsmith.__version__,
        "method": method,
        "layout": layout,
    }
    write_json(folder / RECORD, record | {"target": made_for.to_json()})


def what_it_reads(head: "DraftHead", made_for: TargetIdentity) -> TargetIdentity:
    """Return the part of the target's identity that `head` depends on, which is what is recorded."""
    return made_for if head.reads.target_states else made_for.for_texts()


def read_record(folder: Path) -> TargetIdentity | None:
    """Return the target that the head in `folder` was trained for, None where it is not recorded.

    Raises UserError for a damaged record and for one of a later version.
    """
    file = folder / RECORD
    if file.is_file():
        record = read_object(file)
        if (version := record.get("schema_version")) is None:
            raise UserError(f"{file} is damaged: it is no record of a head; restore it, or export the head again.")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{file} is of schema version {version}, but this draftsmith reads {SCHEMA_VERSION}: use the version of "
                "draftsmith that exported it."
            )
        return TargetIdentity.from_json(record.get("target"), str(file))
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
