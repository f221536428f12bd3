"""What can be refused before hours of work are spent on it."""

import torch

from draftsmith.baselines import check_path
from draftsmith.errors import UserError
from draftsmith.evaluation import evaluation_conversations, longest_text, make_requests
from draftsmith.exporting import export_options
from draftsmith.heads.export import convert_head
from draftsmith.heads.registry import METHODS
from draftsmith.heads.vocab import choose_draft_vocab
from draftsmith.lineup import beside_folder, load_beside, make_lineup
from draftsmith.session import Session
from draftsmith.train.parallel import check_launch


def preflight(session: Session, command: str) -> list[str]:
    """Find mistakes in a recipe before `draftsmith COMMAND` spends hours of work on it.

    Builds an untrained head, which checks its layers and draft vocabulary, and holds what is stored and
    exported against it; where it evaluates also checks that the prompts can be read, that the drafts fit the heads and
    the baselines the target, and returns the drafters' names. What takes no target is checked before it is loaded: the
    launch file, the prompts, heads and trees of the evaluation, and the data.
    """
    recipe = session.recipe
    check_launch(recipe.train)
    learning, evaluating = command in ("run", "train"), command in ("run", "evaluate")
    count = len(session.conversations) if learning or command == "extract" else 0
    if learning and recipe.answers.regenerate and recipe.data.heldout >= count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout} but there are only {count} conversations: lower it or add data."
        )
    if evaluating:
        evaluation_conversations(session)
        for name, folder in recipe.evaluate.beside.items():
            beside_folder(session, name, folder)
        for draft in recipe.evaluate.drafts:
            draft.load()
        for baseline in recipe.evaluate.baselines:
            if baseline.path is not None:
                check_path(baseline.path)
    target = session.target
    size = getattr(recipe.head, "draft_vocab_size", None)
    vocab = None if size is None else choose_draft_vocab(torch.zeros(target.vocab_size, dtype=torch.int64), size)
    head = METHODS[recipe.method].build(recipe.head, target, vocab)
    stored = recipe.features.layer_ids
    if stored is not None and (missing := sorted(set(head.layer_ids) - set(stored))):
        raise UserError(
            f"features.layer_ids {stored} lacks {missing}, which head.layer_ids reads: add them, or leave features.layer_ids out."
        )
    convert_head(head, target, **export_options(recipe, recipe.method))
    if evaluating:
        heads = {head.method: head} | load_beside(session, target, head.method)
        longest = longest_text(make_requests(session, target)[0]) if recipe.evaluate.baselines else 0
        lineup = make_lineup(session, heads, target, longest)
        return [contender.name for contender in lineup]
    return []
