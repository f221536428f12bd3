"""`draftsmith search-tree`: the static tree that suits a trained head, its traffic and this machine.

    draftsmith search-tree --recipe R --output tree.json

How many tokens each tree gets accepted is measured on answers held out of training: the run's own, or for other sampling
settings new ones to the same prompts. What a tree costs is timed: target passes and drafts. Evaluation prompts play no part.
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
from draftsmith.eval.decode.answers import Request
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.trees import PUBLISHED, read_origin, save_tree
from draftsmith.eval.measure.machine import environment
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.eval.tree_search.budget import Budget, TreeCosts, fastest, measure_tree_costs, sizes_up_to
from draftsmith.eval.tree_search.ranks import TextRanks, read_ranks
from draftsmith.eval.tree_search.search import FoundTree, find_trees, measure_tree
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import find_method
from draftsmith.heads.target.target import Target
from draftsmith.stages.answers import answer_inputs, answers_file, load_samples
from draftsmith.stages.drafters import load_fitting
from draftsmith.stages.heads import find_head, head_digest
from draftsmith.stages.options import TreeOptions
from draftsmith.stages.session import Session, say
from draftsmith.stages.training import split_samples

NEW_ANSWERS = 300
"""Answers made for sampling settings that the run has none of."""
AUTO_NODES = 127
"""Drafted tokens of the largest tree without --nodes: with the root a target pass over 128 tokens."""
FEW = 50
"""Fewer answers than this give a warning."""
_SHOWN = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 39, 47, 63, 79, 95, 127, 159, 191, 255)


@dataclass(frozen=True)
class Calibration:
    """The answers that a tree is searched on. samples: answers that the head was not trained on. sampling: the settings
    they were drawn with. source: where they come from, for messages."""

    samples: list[Tokenized]
    sampling: Sampling
    source: str


@dataclass(frozen=True)
class _Search:
    """What a search works with. texts: the head's ranks of the answers' tokens. nodes: of the largest tree."""

    target: Target
    head: DraftHead
    answers: Calibration
    texts: TextRanks
    nodes: int


def search_tree(session: Session, options: TreeOptions) -> Path:
    """Find the tree, save it, print a table of the trees by size, and return the file.

    Raises UserError for a head, a size or a file with which that cannot be done.
    """
    path = options.output or session.recipe.run_dir / "tree.json"
    _check_output(path)
    search = _prepare(session, options)
    found = find_trees(search.texts, sizes_up_to(search.nodes))
    if options.nodes is not None and len(found[-1].tree.choices) < options.nodes:
        raise UserError(
            f"--nodes is {options.nodes}, but {search.texts.depth} drafted tokens of {search.texts.most} words make no tree of more "
            f"than {len(found[-1].tree.choices)}: ask for fewer."
        )
    say("search-tree: timing target passes and drafts")
    context_ids = _typical_context(search.answers.samples, search.target.context_length - search.nodes - 2)
    rows = session.recipe.evaluate.batch
    costs = measure_tree_costs(search.target, search.head, found, context_ids, search.answers.sampling, rows=rows)
    budgets = [costs.budget(one) for one in found]
    if options.nodes is None:
        budgets = _of_any_depth(search.texts, budgets, costs)
    chosen = fastest(budgets) if options.nodes is None else budgets[-1]
    published = _published(search, costs)
    origin = {
        "head": {"method": search.head.method, "digest": head_digest(session.recipe, options.head)},
        **_describe(search),
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


def _prepare(session: Session, options: TreeOptions) -> _Search:
    folder = find_head(session.recipe, options.head)
    original = session.target_in(session.recipe.evaluate.dtype)
    head = load_fitting(session, original, options.head).deployed(original).to(original.dtype)
    target = head.verifier(original)  # for a tuned one, the original's answers serve as its own
    if "static" not in find_method(head.method).trees:
        raise UserError(
            f"The head in {folder} is of {head.method}, which drafts no static trees: there is none to search."
        )
    nodes = _most_nodes(options.nodes, target)
    answers = calibration_answers(session, target, options)
    texts = read_ranks(target, head, answers.samples, *_limits(session, head, target, nodes))
    say(f"search-tree: {answers.source}: {texts.answers}, with {texts.places} places where a round may begin")
    if texts.answers < FEW:
        say(
            f"warning: {texts.answers} answers are few to search a tree on: a larger data.heldout in training leaves more."
        )
    return _Search(target, head, answers, texts, nodes)


def _check_output(path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for --output {path}: make it, or choose another file.")
    if path.is_dir() or (path.exists() and read_origin(path) is None):
        raise UserError(f"{path} exists and is no tree that search-tree wrote: choose another --output, or remove it.")


def _most_nodes(wanted: int | None, target: Target) -> int:
    """Return the size of the largest tree. Raises UserError where it and a text of its length exceed the context."""
    most = target.context_length // 2 - 2
    if wanted is not None and wanted > most:
        raise UserError(f"--nodes is {wanted}: the target's context of {target.context_length} has room for {most}.")
    return min(AUTO_NODES, most) if wanted is None else wanted


def _limits(session: Session, head: DraftHead, target: Target, nodes: int) -> tuple[int, int]:
    """Return how many steps and how many ranks a tree may use."""
    vocab_size = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    return head.clamp_draft_length(session.recipe.evaluate.max_k), min(nodes, vocab_size)


def _describe(search: _Search) -> dict[str, Any]:
    target, answers, texts = search.target, search.answers, search.texts
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


def _published(search: _Search, costs: TreeCosts) -> dict[str, Budget]:
    """Return the published trees that the head can draft and whose size was timed, for comparison."""
    texts, budgets = search.texts, {}
    for name, tree in PUBLISHED.items():
        if len(tree.choices) <= search.nodes and tree.depth <= texts.depth and tree.ranks <= texts.most:
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


def calibration_answers(session: Session, target: Target, options: TreeOptions) -> Calibration:
    """Return the run's held-out answers, or for another temperature new answers of `target` to some of their prompts.

    Raises UserError where the run has no answers, or where the head may have been trained on them.
    """
    own = session.recipe.answers.sampling
    sampling = own if options.temperature is None else session.recipe.evaluate.sampling(options.temperature)
    heldout = _held_out(session, options)
    if sampling == own:
        where = answers_file(session) if session.recipe.answers.regenerate else "the data"
        return Calibration(heldout, sampling, f"held-out answers of {where}")
    # Evenly over the data, so that every slice has its share.
    count = min(NEW_ANSWERS, len(heldout))
    prompts = [heldout[i * len(heldout) // count] for i in range(count)]
    say(
        f"search-tree: the run has no answers for these settings; the target answers {count} of its held-out prompts at "
        f"temperature {sampling.temperature:g}"
    )
    return Calibration(_answer(session, target, prompts, sampling), sampling, "new answers to held-out prompts")


def _held_out(session: Session, options: TreeOptions) -> list[Tokenized]:
    recipe = session.recipe
    answers = None
    if recipe.answers.regenerate:
        # Only looked up: making them takes as long as a training.
        inputs, answers = answer_inputs(session), answers_file(session)
        session.data.check_unchanged("answers", inputs)
        if not session.data.holds("answers", inputs):
            raise UserError(
                f"There are no finished answers in {recipe.data_path} to search a tree on: run `draftsmith train` or "
                "`draftsmith regenerate` with this recipe first."
            )
    trained = session.run.record("train") if options.head is None else None
    count = trained.inputs.get("data.heldout", recipe.data.heldout) if trained else recipe.data.heldout
    if recipe.data.heldout > count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout}, but the head was trained with {count}, so it has seen some of these answers: "
            f"set it to {count}."
        )
    samples = load_samples(session, answers)
    return [samples[i] for i in split_samples(session, samples)[1]]


def _answer(session: Session, target: Target, samples: Sequence[Tokenized], sampling: Sampling) -> list[Tokenized]:
    """Let the target alone answer the prompt of each sample's last answer."""
    recipe, requests = session.recipe, []
    longest = min(recipe.data.max_length, target.context_length)
    for sample in samples:
        prompt = sample.ids[: answer_start(sample)].tolist()
        limit = min(recipe.answers.max_new_tokens, longest - len(prompt))
        requests.append(Request.seeded(sample.sample_id, sample.slice, prompt, limit, recipe.seed))
    requests.sort(key=lambda request: len(request.prompt_ids))
    decoded = decode_batch(target, TargetAlone(), requests, sampling, rows=recipe.answers.batch)
    return [to_sample(generation) for generation in decoded.generations]


def answer_start(sample: Tokenized) -> int:
    """Return where the last answer of a sample begins."""
    learnt = sample.mask.nonzero().flatten()
    breaks = (learnt.diff() > 1).nonzero().flatten()
    return int(learnt[int(breaks[-1]) + 1 if len(breaks) else 0])
