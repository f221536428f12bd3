"""`draftsmith search-tree`: the static tree that suits a trained head, its traffic and this machine.

    draftsmith search-tree --recipe R --output tree.json

The head's held-out answers say how many tokens each tree gets accepted; timed target passes and drafts say what it costs.
Evaluation prompts play no part.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.eval.decode.trees import PUBLISHED, read_origin, save_tree
from draftsmith.eval.measure.machine import environment
from draftsmith.eval.tree_search.budget import Budget, TreeCosts, fastest, measure_tree_costs, sizes_up_to
from draftsmith.eval.tree_search.ranks import TextRanks, read_ranks
from draftsmith.eval.tree_search.search import FoundTree, find_trees, measure_tree
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import find_method
from draftsmith.heads.target.target import Target
from draftsmith.stages.calibration import Calibration, answer_start, calibrate
from draftsmith.stages.lineup import load_fitting
from draftsmith.stages.options import TreeOptions
from draftsmith.stages.session import Session, say
from draftsmith.stages.stages import find_head, head_digest

AUTO_NODES = 127
"""Drafted tokens of the largest tree that is tried where none is asked for: with the root a pass over 128."""
FEW = 50
"""Fewer answers than this are warned about."""
_SHOWN = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 39, 47, 63, 79, 95, 127, 159, 191, 255)


@dataclass(frozen=True)
class _Ground:
    """What a search stands on."""

    target: Target
    head: DraftHead
    answers: Calibration
    texts: TextRanks
    nodes: int


def search_tree(session: Session, asked: TreeOptions) -> Path:
    """Search, time, save and show; return the file. Raises UserError for what cannot be searched or saved."""
    path = asked.output or session.recipe.run_dir / "tree.json"
    _check_output(path)
    ground = _prepare(session, asked)
    found = find_trees(ground.texts, sizes_up_to(ground.nodes))
    if asked.nodes is not None and len(found[-1].tree.choices) < asked.nodes:
        raise UserError(
            f"--nodes is {asked.nodes}, but {ground.texts.depth} drafted tokens of {ground.texts.most} words make no tree of more "
            f"than {len(found[-1].tree.choices)}: ask for fewer."
        )
    say("search-tree: timing target passes and drafts")
    context_ids = _typical_context(ground.answers.samples, ground.target.context_length - ground.nodes - 2)
    rows = session.recipe.evaluate.batch
    costs = measure_tree_costs(ground.target, ground.head, found, context_ids, ground.answers.sampling, rows=rows)
    budgets = [costs.budget(one) for one in found]
    if asked.nodes is None:
        budgets = _of_any_depth(ground.texts, budgets, costs)
    chosen = fastest(budgets) if asked.nodes is None else budgets[-1]
    published = _published(ground, costs)
    origin = {
        "head": {"method": ground.head.method, "digest": head_digest(session, asked.head)},
        **_describe(ground),
        "chosen": _facts(chosen),
        "sizes": [_facts(budget) for budget in budgets],
        "published": {name: _facts(budget) for name, budget in published.items()},
        "costs": {"batch": rows, "context": len(context_ids), **costs.facts},
    }
    save_tree(path, chosen.found.tree, origin | _machine())
    Console().print(_table(budgets, chosen, published))
    if chosen.speedup < 1:
        say(f"warning: with this tree the target is slower than alone ({chosen.speedup:.2f}x) on this machine.")
    return path


def _prepare(session: Session, asked: TreeOptions) -> _Ground:
    folder = find_head(session, asked.head)
    original = session.target_in(session.recipe.evaluate.dtype)
    head = load_fitting(session, original, asked.head).deployed(original).to(original.dtype)
    target = head.verifier(original)  # where that is a tuned one, the original's answers stand for its own
    if "static" not in find_method(head.method).trees:
        raise UserError(
            f"The head in {folder} is of {head.method}, which drafts no static trees: there is none to search."
        )
    nodes = _most_nodes(asked.nodes, target)
    answers = calibrate(session, target, asked)
    texts = read_ranks(target, head, answers.samples, *_reach(session, head, target, nodes))
    say(f"search-tree: {answers.source}: {texts.answers}, with {texts.places} places where a round may begin")
    if texts.answers < FEW:
        say(
            f"warning: {texts.answers} answers are few to search a tree on: a larger data.heldout in training leaves more."
        )
    return _Ground(target, head, answers, texts, nodes)


def _check_output(path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for --output {path}: make it, or choose another file.")
    if path.is_dir() or (path.exists() and read_origin(path) is None):
        raise UserError(f"{path} exists and is no tree that search-tree wrote: choose another --output, or remove it.")


def _most_nodes(asked: int | None, target: Target) -> int:
    """Return the size of the largest tree. Raises UserError where it and a text of its length exceed the context."""
    room = target.context_length // 2 - 2
    if asked is not None and asked > room:
        raise UserError(f"--nodes is {asked}: the target's context of {target.context_length} has room for {room}.")
    return min(AUTO_NODES, room) if asked is None else asked


def _reach(session: Session, head: DraftHead, target: Target, nodes: int) -> tuple[int, int]:
    """Return how many steps and how many ranks a tree may use."""
    vocab_size = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    return head.within_reach(session.recipe.evaluate.max_k), min(nodes, vocab_size)


def _describe(ground: _Ground) -> dict[str, Any]:
    target, answers, texts = ground.target, ground.answers, ground.texts
    return {
        "target": {"path": target.path, "fingerprint": target.fingerprint, "dtype": target.dtype_name},
        "sampling": asdict(answers.sampling),
        "calibration": {"source": answers.source, "answers": texts.answers, "places": texts.places},
    }


def _machine() -> dict[str, Any]:
    known = environment()
    return {"command": shlex.join(["draftsmith", *sys.argv[1:]]), **known, "hardware": asdict(known["hardware"])}


def _typical_context(samples: Sequence[Tokenized], room: int) -> list[int]:
    """Return the text of median length up to the middle of its last answer."""
    sample = sorted(samples, key=lambda one: len(one.ids))[len(samples) // 2]
    start = answer_start(sample)
    return sample.ids[: min(start + (len(sample.ids) - start) // 2, room)].tolist()


def _of_any_depth(texts: TextRanks, deepest: Sequence[Budget], costs: TreeCosts) -> list[Budget]:
    """Return the fastest tree of every size, where a shallower one may be: every step of a draft costs time."""
    best = {budget.nodes: budget for budget in deepest}
    for depth in range(1, max(budget.found.tree.depth for budget in deepest)):
        for found in find_trees(texts.cut(depth), list(best)):
            budget = costs.budget(found)
            best[budget.nodes] = fastest([best[budget.nodes], budget])
    return list(best.values())


def _published(ground: _Ground, costs: TreeCosts) -> dict[str, Budget]:
    """Return the published trees that the head can draft and whose size was timed, for comparison."""
    texts, budgets = ground.texts, {}
    for name, tree in PUBLISHED.items():
        if len(tree.choices) <= ground.nodes and tree.depth <= texts.depth and tree.ranks <= texts.most:
            tau = measure_tree(tree, texts)
            budgets[name] = costs.budget(FoundTree(tree, tau, tau))
    return budgets


def _facts(budget: Budget) -> dict[str, Any]:
    tree = budget.found.tree
    return {
        "nodes": budget.nodes,
        "levels": list(tree.levels),
        "tau": round(budget.found.tau, 6),
        "tau_held_back": round(budget.found.tau_held_back, 6),
        "verify_ms": round(budget.verify_ms, 4),
        "draft_ms": round(budget.draft_ms, 4),
        "speedup": round(budget.speedup, 4),
    }


def _table(budgets: Sequence[Budget], chosen: Budget, published: dict[str, Budget]) -> Table:
    """What trees cost and bring: the largest one, some of the others, and those that are marked."""
    table = Table(title="Trees by size: accepted length, ms per round, and speedup", title_justify="left")
    for place, name in enumerate(("", "nodes", "depth", "τ", "held back", "verify", "draft", "speedup")):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    marks = {fastest(budgets).nodes: "fastest"} | {chosen.nodes: "saved"}
    for budget in budgets:
        if budget.nodes in marks or budget.nodes in _SHOWN or budget is budgets[-1]:
            style = "bold" if budget is chosen else None
            table.add_row(marks.get(budget.nodes, ""), *_cells(budget), style=style)
    table.add_section()
    for name, budget in published.items():
        table.add_row(name, *_cells(budget))
    return table


def _cells(budget: Budget) -> list[str]:
    numbers = [budget.found.tau, budget.found.tau_held_back, budget.verify_ms, budget.draft_ms, budget.speedup]
    return [str(budget.nodes), str(budget.found.tree.depth), *(f"{number:.3g}" for number in numbers)]
