"""Taking the MTP layer that a target's own files hold as a head, with what it reads measured on texts of the user.

Nothing in the files says whether the layer reads the target's states behind its final norm or before it, and sources disagree;
the wrong ones give drafts that look right and are accepted less.
"""

from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import target_passes
from draftsmith.heads.base import DraftHead, drafting, shift_left
from draftsmith.heads.checkpoint import CONFIG, WEIGHTS, check_replaceable, save_head
from draftsmith.heads.mtp.formats import load_native
from draftsmith.progress import say
from draftsmith.stages.data import samples_at_hand
from draftsmith.stages.session import Session
from draftsmith.storage import write_json
from draftsmith.target.target import Target

IMPORTED = "import.json"
"""What was measured, in the folder of the head."""
_CONVERSATIONS, _ROWS = 32, 2048
"""The most conversations, and about the most drafts, that are measured."""
STATES = {
    "after_norm": "behind the target's final norm",
    "before_norm": "before it",
    "vllm": "as vLLM feeds it",
}


def import_layer(session: Session, folder: Path | None = None) -> Path:
    """Write the target's own MTP layer as a head to a folder, by default one beside the run directory, and return the folder.

    Both states are measured on the recipe's conversations, or its answers where these are finished; the one with more first drafts
    that are the target's choice is kept; of a recipe that names one (`head.target_state`) this one alone. Raises UserError for a target
    without such a layer, or with one that is not computed here.
    """
    run_dir, target = session.recipe.run_dir, session.target
    folder = folder or run_dir.with_name(f"{run_dir.name}-import")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / IMPORTED).is_file():
        raise UserError(
            f"{folder} holds files but no {IMPORTED}, so no import wrote it: name another folder as --output."
        )
    check_replaceable(folder, (CONFIG, WEIGHTS, IMPORTED))
    if target.directory is None:
        raise UserError(
            f"The target {target.path} lies in no folder whose files could hold an MTP layer: give one that does."
        )
    named = getattr(session.recipe.head, "target_state", None)
    heads = {named or "after_norm": load_native(target.directory, target, named or "after_norm")}
    if named is None:
        try:
            heads["before_norm"] = load_native(target.directory, target, "before_norm")
        except UserError as error:
            say(f"import: states behind the final norm alone are measured ({error})")
    samples = samples_at_hand(session, _CONVERSATIONS)
    before = accumulate((len(sample.ids) for sample in samples), initial=0)
    samples = [sample for sample, tokens in zip(samples, before, strict=False) if tokens < _ROWS]
    rights = {state: first_drafts(head, target, samples) for state, head in heads.items()}
    shares = {state: float(right.double().mean()) for state, right in rights.items()}
    rows = len(next(iter(rights.values())))
    best = max(shares, key=lambda state: shares[state])  # the first of equals, which engines read
    measured = ", ".join(f"{share:.1%} with states {STATES[state]}" for state, share in shares.items())
    say(f"import: first drafts are the target's choice at {measured} ({rows} positions): the head reads {best}")
    if len(rights) == 2 and is_unsettled(*rights.values()):
        session.warn(
            f"import: {rows} positions do not tell the two states apart ({measured}), so {best} may be the wrong one: name more "
            "conversations in data.sources, and import again."
        )
    save_head(heads[best], folder, target)
    write_json(folder / IMPORTED, {"target": target.path, "target_state": best, "positions": rows, "agreement": shares})
    return folder


def is_unsettled(one: Tensor, other: Tensor) -> bool:
    """Return whether two drafters, right or not [n] at the same positions, are right equally often up to two standard errors."""
    better, worse = int((one & ~other).sum()), int((other & ~one).sum())
    return bool(abs(better - worse) <= 2 * (better + worse) ** 0.5)


@torch.no_grad()
def first_drafts(head: DraftHead, target: Target, samples: list[Tokenized]) -> Tensor:
    """Return whether the head's first draft is what the target finds likeliest there, at each of the texts' n supervised positions [n].

    Raises UserError where there is none.
    """
    rights = []
    for _, batch in target_passes(target, samples):
        with drafting(head):
            (step,) = head(batch, 1).steps
        chosen = shift_left(batch.top1, 1, -1).flatten()[step.rows]
        rights.append(step.logits.argmax(-1) == chosen)
    right = torch.cat(rights) if rights else torch.empty(0)
    if not len(right):
        raise UserError(
            "The conversations of data.sources have no answer of three tokens to measure a head on: name others."
        )
    return right
