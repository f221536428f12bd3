"""The head that training starts from: a new one, or with `train.warm_start` one that exists."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import find_method
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.stages.run import FILES, FOLLOWERS
from draftsmith.stages.session import Session, say
from draftsmith.stages.stages import find_head

KEY = "train.warm_start"


def warm_folder(session: Session) -> Path | None:
    """Return the folder of the head that training starts from, None where it starts from scratch.

    Raises UserError where there is no head that can be loaded, and for a head of this run itself, trained or exported,
    which `--redo train` would remove.
    """
    named = session.recipe.train.warm_start
    if named is None:
        return None
    folder = find_head(session, Path(named), KEY)
    own = [session.recipe.run_dir / name for stage in FOLLOWERS["train"] for name in FILES[stage]]
    if any(folder.resolve().is_relative_to(one.resolve()) for one in own):
        raise UserError(f"{KEY} is {named}, which this run makes itself: give the run another --name or --output_dir.")
    return folder


def load_warm(session: Session, warn: Callable[[str], None] | None = None) -> DraftHead | None:
    """Return the head that training starts from, fp32, None where it starts from scratch. It may have been made for
    another target of the same sizes, such as the one that this target was tuned from; `warn` is told then."""
    folder = warm_folder(session)
    if folder is None:
        return None
    head = load_head(folder, session.target, warn=warn or (lambda text: None))
    if head.method not in (session.recipe.method, *getattr(session.recipe.head, "WARM_FROM", ())):
        raise UserError(
            f"{KEY} names {folder}, a head of {head.method}, but method is {session.recipe.method}: name one of that "
            f"method, or set method to {head.method}."
        )
    return head


def head_options(session: Session) -> Any:
    """Return the recipe's options of the head; where it starts from one that exists, with the sizes of that. Says where
    it was made for another target."""
    differences: list[str] = []
    head, named = load_warm(session, differences.append), session.recipe.train.warm_start
    if head is None:
        return session.recipe.head
    if differences:
        say(
            f"warning: {KEY}: the head in {named} was made for another target, or for this one before it was changed: it "
            f"is trained on for {session.target.path} as it is now."
        )
    return adopt_options(session.recipe.head, head, session.target, str(named))


def start_head(
    session: Session, warm: DraftHead | None, draft_vocab: Tensor | None, samples: Iterable[Tokenized] = ()
) -> DraftHead:
    """Return the head to train: `warm` of `load_warm`, or a new one with this draft vocabulary. samples: what it learns from;
    says where they hold the token that the recipe takes for a mask."""
    mask = getattr(session.head_options, "mask_token_id", None)
    holds = None if mask is None else next((one for one in samples if bool((one.ids == mask).any())), None)
    if holds is not None:
        say(
            f"warning: head.mask_token_id is {mask}, which texts have ({holds.sample_id} for one): the head takes it there for a "
            "token that is still to be drafted; name one that no text has."
        )
    if warm is not None:
        return restart(warm, session.head_options, session.target, session.recipe.method)
    method = session.recipe.method
    head = find_method(method).build(session.recipe.head, session.target, draft_vocab)
    if head.method != method:
        raise UserError(
            f"method is {method!r}, but the package that adds it makes heads of the method {head.method!r}: the entry point in its "
            "pyproject.toml and `method` of its heads must be one name."
        )
    return head
