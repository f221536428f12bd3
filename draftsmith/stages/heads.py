"""Trained heads on disk: the run's own, those that it is compared with, and the one that training starts from."""

from collections.abc import Callable
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.files import CONFIG, all_weights_files, weights_file
from draftsmith.heads.formats.recognise import CHECKPOINT, load_head, recognise, refuse_other_files
from draftsmith.recipe.record import FOLLOWERS
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.run import FILES
from draftsmith.storage import fingerprint, sha256_file
from draftsmith.target.target import Target

WARM_START = "train.warm_start"


def find_head(recipe: Recipe, folder: Path | None = None, key: str = "--head") -> Path:
    """Return the folder of a trained head; `folder` is a head's or a run's, by default the recipe's own run.

    key: the option or recipe key that named the folder, for messages. Raises UserError where there is no head, and for
    one whose format cannot be loaded.
    """
    folder = folder or recipe.run_dir
    best, own = folder / "train" / "best", folder.resolve() == recipe.run_dir.resolve()
    head_folder = best if best.exists() or own else folder
    refuse_other_files(head_folder)
    if weights_file(head_folder) is None:
        if own:
            why = f"There is no trained head in {folder}: run `draftsmith train` first, or name one with --head."
        elif not folder.exists():
            hub = "a head on the Hub is fetched first, with `hf download NAME --local-dir FOLDER`"
            why = f"{key}: there is no folder {folder}: check its name; {hub}."
        elif not folder.is_dir():
            why = f"{key}: {folder} is a file: name the folder that holds it."
        else:
            why = f"{key}: there is no trained head in {folder}: train it first, or name another folder."
        raise UserError(why)
    recognise(head_folder)
    return head_folder


def head_digest(folder: Path) -> str:
    """Return 16 hex digits that name the weights of the head in a folder; of one in another format than a checkpoint also its
    configuration."""
    files = all_weights_files(folder)
    if recognise(folder) is CHECKPOINT:
        return sha256_file(files[0])[:16]
    return fingerprint([sha256_file(file) for file in (folder / CONFIG, *files)])


def warm_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the head that training starts from, None where it starts from scratch.

    Raises UserError where there is no head that can be loaded, and for a head of this run itself, trained or exported,
    which `--redo train` would remove.
    """
    named = recipe.train.warm_start
    if named is None:
        return None
    folder = find_head(recipe, Path(named), WARM_START)
    own = [recipe.run_dir / name for stage in FOLLOWERS["train"] for name in FILES[stage]]
    if any(folder.resolve().is_relative_to(one.resolve()) for one in own):
        raise UserError(
            f"{WARM_START} is {named}, which this run makes itself: give the run another --name or --output_dir."
        )
    return folder


def load_warm(recipe: Recipe, target: Target, warn: Callable[[str], None] | None = None) -> DraftHead | None:
    """Load the head that training starts from, in float32; None where it starts from scratch.

    It may have been made for another target of the same sizes, such as the one that `target` was tuned from; `warn`
    then receives a sentence per difference. Raises UserError for a head of a method that this one cannot start from.
    """
    folder = warm_folder(recipe)
    if folder is None:
        return None
    head = load_head(folder, target, warn=warn or (lambda text: None))
    if head.method not in (recipe.method, *getattr(recipe.head, "WARM_FROM", ())):
        raise UserError(
            f"{WARM_START} names {folder}, a head of {head.method}, but method is {recipe.method}: name one of that "
            f"method, or set method to {head.method}."
        )
    return head
