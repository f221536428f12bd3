"""The original of a target that was tuned with its heads and exported whole: what its evaluation is held against."""

from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.heads.fingerprint import fingerprint_directory
from draftsmith.heads.identity import TargetIdentity
from draftsmith.heads.record import tuned_from
from draftsmith.heads.target import Target
from draftsmith.session import Session


def find_original(session: Session) -> TargetIdentity | None:
    """Return the original that the session's target is to be compared with, None for a target that was not tuned. Where it
    cannot be, or the recipe does not want it, results carry a warning and None is returned."""
    made_from = tuned_from(Path(session.target_path))
    if made_from is None:
        return None
    folder = Path(made_from.path or "")
    if not session.recipe.evaluate.original:
        why = "evaluate.original is false"
    elif made_from.path is None or (folder.is_absolute() and not folder.is_dir()):
        why = "it is not there any more"
    elif folder.is_dir() and fingerprint_directory(folder) != made_from.fingerprint:
        why = "another model lies there now"
    else:
        return made_from
    session.warn(
        f"the target {session.target_path} was tuned together with heads, and is not compared with the original "
        f"({made_from.path}), as {why}: speed here is beside the tuned target, and what the tuning changed is in the report of "
        "the run that tuned it."
    )
    return None


def load_original(session: Session, made_from: TargetIdentity, dtype: str) -> Target:
    """Load the original. Raises UserError where a model of its name is another one now."""
    assert made_from.path is not None
    target = session.load_target(dtype, made_from.path)
    if target.fingerprint != made_from.fingerprint:
        raise UserError(
            f"The target {session.target_path} was tuned from {made_from.path}, which is another model now: give that one "
            "back, or set evaluate.original to false."
        )
    return target
