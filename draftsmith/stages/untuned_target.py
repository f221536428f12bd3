"""The original of a target that was tuned with its heads and exported whole: what its evaluation is held against."""

from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.record import tuned_from
from draftsmith.heads.target.fingerprint import fingerprint_directory
from draftsmith.heads.target.identity import TargetIdentity
from draftsmith.heads.target.pretrained import weights_directory
from draftsmith.heads.target.target import Target
from draftsmith.stages.session import Session


def find_original(session: Session) -> TargetIdentity | None:
    """Return the original that the session's target is to be compared with, None for a target that was not tuned. Where it
    cannot be, or the recipe does not want it, results carry a warning and None is returned."""
    made_from = tuned_from(Path(session.target_path))
    if made_from is None or (why := _why_not(session, made_from)) is None:
        return made_from
    session.warn(
        f"the target {session.target_path} was tuned together with heads, and is not compared with the original "
        f"({made_from.path}), as {why}: speed here is beside the tuned target, and what the tuning changed is in the report of "
        "the run that tuned it."
    )
    return None


def _why_not(session: Session, made_from: TargetIdentity) -> str | None:
    if not session.recipe.evaluate.original:
        return "evaluate.original is false"
    if made_from.path is None or (Path(made_from.path).is_absolute() and not Path(made_from.path).is_dir()):
        return "it is not there any more"
    try:
        same = fingerprint_directory(weights_directory(made_from.path)) == made_from.fingerprint
    except (OSError, UserError):
        return "it cannot be read any more"
    return None if same else "another model lies there now"


def compared_before(session: Session, stage: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return `inputs` with the original that a finished stage was made with, where that is gone since: what was measured of it
    stays."""
    made_from = tuned_from(Path(session.target_path))
    if made_from is None or not session.recipe.evaluate.original or stage in session.redo:
        return inputs
    earlier = inputs | {"original": made_from.fingerprint}
    return earlier if session.directory(stage).holds(stage, earlier) else inputs


def load_original(session: Session, made_from: TargetIdentity, dtype: str) -> Target:
    """Load what `find_original` returned."""
    assert made_from.path is not None
    return session.load_target(dtype, made_from.path)
