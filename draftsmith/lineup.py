"""Which drafters an evaluation measures: the run's head and those beside it, in every way the recipe names to draft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.contender import Contender, make_contender
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.trees import load_tree
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import METHODS
from draftsmith.heads.target import Target
from draftsmith.session import Session
from draftsmith.stages import find_head, head_digest, load_best


def load_heads(session: Session, target: Target, head_folder: Path | None) -> dict[str, DraftHead]:
    """Return the heads to measure in the dtype of `target`, by name: the run's own first."""
    own = load_best(session, target, head_folder)
    return {own.method: own.to(target.dtype)} | load_beside(session, target, own.method)


def load_beside(session: Session, target: Target, taken: str) -> dict[str, DraftHead]:
    """Return the heads that the recipe measures beside the run's own, whose name is `taken`."""
    heads: dict[str, DraftHead] = {}
    for name, folder in session.recipe.evaluate.beside.items():
        if name == taken or not name.strip():
            raise UserError(f"evaluate.beside names a head {name!r}, the name of the run's own: choose another.")
        heads[name] = load_best(session, target, beside_folder(session, name, folder)).to(target.dtype)
    return heads


def digests(session: Session, head_folder: Path | None) -> dict[str, Any]:
    """Identify the heads and trees of the evaluation."""
    spec = session.recipe.evaluate
    beside = {name: head_digest(session, beside_folder(session, name, folder)) for name, folder in spec.beside.items()}
    trees = {d.tree: tree.choices for d in spec.drafts if (tree := load_tree(d.tree)) is not None}
    return {"head": head_digest(session, head_folder), "beside": beside, "trees": trees}


def make_lineup(session: Session, heads: Mapping[str, DraftHead]) -> list[Contender]:
    """Return a drafter for every head and way to draft that fits it. Raises UserError where a way fits no head, and
    where the first head, the run's own, is left with none."""
    spec = session.recipe.evaluate
    lineup, unused = [], {d.tree for d in spec.drafts}
    own = next(iter(heads))
    for name, head in heads.items():
        for draft in spec.drafts:
            tree = load_tree(draft.tree)
            if tree is None or METHODS[head.method].static_trees:
                lineup.append(
                    make_contender(
                        name, head, spec.num_speculative_tokens, spec.max_k, tree=tree, typical=draft.typical
                    )
                )
                unused.discard(draft.tree)
        if name == own and not lineup:
            raise UserError(f"evaluate.drafts names trees only, and {head.method} heads draft chains: add chain.")
    if unused:
        raise UserError(
            f"evaluate.drafts names the tree {sorted(unused)[0]}, but none of the heads ({', '.join(heads)}) drafts trees: "
            "remove it."
        )
    return lineup


def at_temperature(lineup: list[Contender], sampling: Sampling) -> list[Contender]:
    """Leave out lossy drafters where they would repeat a lossless one: at temperature 0 both accept alike."""
    if not sampling.greedy:
        return lineup
    exact = [(c.head, c.tree) for c in lineup if c.lossless]
    return [c for c in lineup if c.lossless or not any(c.head is h and c.tree == t for h, t in exact)]


def beside_folder(session: Session, name: str, folder: str) -> Path:
    """Accept the folder of a head or of a run. Raises UserError that names the recipe's key."""
    try:
        return find_head(session, Path(folder))
    except UserError as error:
        raise UserError(
            f"evaluate.beside.{name}: there is no trained head in {folder}: train it first, or remove it."
        ) from error
