"""`draftsmith search-tree`: the static tree that suits a trained head, its traffic and this machine, or where its chains should end.

    draftsmith search-tree --recipe R --output tree.json
    draftsmith search-tree --recipe R --chain

How many tokens each tree gets accepted is measured on answers held out of training: the run's own, or for other sampling
settings new ones to the same prompts. What a tree costs is timed: target passes and drafts. Evaluation prompts play no part.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import PUBLISHED, read_origin, save_found
from draftsmith.errors import UserError
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.answers import answer_alone
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.eval.tree_search.lengths import Spent, find_floors, fixed, read_chances
from draftsmith.eval.tree_search.search import (
    Budget,
    FoundTree,
    TextRanks,
    TreeCosts,
    fastest,
    find_trees,
    measure_tree,
    measure_tree_costs,
    read_ranks,
    sizes_up_to,
)
from draftsmith.foreign.records import Journal
from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.recognise import head_digest
from draftsmith.heads.registry import find_method
from draftsmith.machine import command_line, environment
from draftsmith.progress import say
from draftsmith.recipe.record import differing, flat_inputs, tell_changes
from draftsmith.stages.data import answer_inputs, answers_file, load_samples
from draftsmith.stages.drafters import load_fitting
from draftsmith.stages.session import Session
from draftsmith.stages.training import split_samples
from draftsmith.storage import fingerprint
from draftsmith.target.target import Target

NEW_ANSWERS = 300
"""Answers made for sampling settings that the run has none of."""
AUTO_NODES = 127
"""Drafted tokens of the largest tree without --nodes: with the root a target pass over 128 tokens."""
FEW = 50
"""Fewer answers than this give a warning."""
_SHOWN = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 39, 47, 63, 79, 95, 127, 159, 191, 255)


@dataclass(frozen=True)
class _Search:
    """What a search works with. samples: answers that the head was not trained on. sampling: the settings they were drawn
    with. source: where they come from, for messages. texts: the head's ranks of their tokens. nodes: of the largest tree."""

    target: Target
    head: DraftHead
    samples: list[Tokenized]
    sampling: Sampling
    source: str
    texts: TextRanks
    nodes: int


def search_tree(session: Session, nodes: int | None, temperature: float | None, output: Path | None) -> Path:
    """Find the tree, save it, print a table of the trees by size, and return the file.

    nodes: of the tree, None for as many as are fastest. temperature: None for that of the run's answers. output: None for
    tree.json in the run directory. Raises UserError for a head, a size or a file with which that cannot be done.
    """
    path = _free(output or session.recipe.run_dir / "tree.json")
    search = _prepare(session, nodes, temperature)
    target, texts = search.target, search.texts
    searched = find_trees(texts, sizes_up_to(search.nodes))
    if nodes is not None and len(searched[-1].tree.choices) < nodes:
        raise UserError(
            f"--nodes is {nodes}, but {texts.depth} drafted tokens of {texts.most} words make no tree of more than "
            f"{len(searched[-1].tree.choices)}: ask for fewer."
        )
    say("search-tree: timing target passes and drafts")
    context_ids, rows = _typical_context(target, search.samples, search.nodes), session.recipe.evaluate.batch
    costs = measure_tree_costs(target, search.head, searched, context_ids, search.sampling, rows=rows)
    budgets = [costs.budget(one) for one in searched]
    if nodes is None:
        budgets = _of_any_depth(texts, budgets, costs)
    chosen = fastest(budgets) if nodes is None else budgets[-1]
    published = _published(search, costs)
    calibration = {"source": search.source, "answers": texts.answers, "places": texts.places}
    save_found(
        path,
        chosen.found.tree,
        {
            **_origin(session, search.head, target, search.sampling, calibration),
            "chosen": _facts(chosen),
            "sizes": [_facts(budget) for budget in budgets],
            "published": {name: _facts(budget) for name, budget in published.items()},
            "costs": {"batch": rows, "context": len(context_ids), **costs.facts},
        },
    )
    # What trees cost and bring: the largest one, some of the others, and those that are marked.
    table = Table(title="Trees by size: accepted length, ms per round, and speedup", title_justify="left")
    for column, name in enumerate(("", "nodes", "depth", "τ", "held back", "verify", "draft", "speedup")):
        table.add_column(name, justify="left" if column == 0 else "right", no_wrap=True)
    marks = {fastest(budgets).nodes: "fastest"} | {chosen.nodes: "saved"}
    for budget in budgets:
        if budget.nodes in marks or budget.nodes in _SHOWN or budget is budgets[-1]:
            style = "bold" if budget is chosen else None
            table.add_row(marks.get(budget.nodes, ""), *_cells(budget), style=style)
    table.add_section()
    for name, budget in published.items():
        table.add_row(name, *_cells(budget))
    Console().print(table)
    if round(chosen.speedup, 2) < 1:
        say(
            f"warning: with this tree the target is slower than alone ({chosen.speedup:.2f}x) on this machine: train the head for longer, "
            "or leave drafting off here."
        )
    return path


def _free(path: Path) -> Path:
    """Return a file that may be written. Raises UserError where it has no folder, or is none of this command's."""
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for --output {path}: make it, or choose another file.")
    if path.is_dir() or (path.exists() and read_origin(path) is None):
        raise UserError(f"{path} exists and is no tree that search-tree wrote: choose another --output, or remove it.")
    return path


def _origin(
    session: Session, head: DraftHead, target: Target, sampling: Sampling, calibration: dict[str, Any]
) -> dict[str, Any]:
    """Return what a file of this command says of the head, the target, the answers and the machine."""
    machine = environment()
    return {
        "head": {"method": head.method, "digest": head_digest(session.head_folder)},
        "target": {"path": target.path, "fingerprint": target.fingerprint, "dtype": target.dtype_name},
        "sampling": asdict(sampling),
        "calibration": calibration,
        "command": command_line(),
        **machine,
        "hardware": asdict(machine["hardware"]),
    }


def search_chain(session: Session, temperature: float | None, output: Path | None) -> Path:
    """Find where chains should end, save it, print what each slice gains over drafts of one length, and return the file.

    temperature: None for that of the run's answers. output: None for chain.json in the run directory. Raises UserError for a head whose
    chains do not end early, a batch of several rows, whose round takes as long as its longest draft, and a file of something else.
    """
    recipe = session.recipe
    path, batch, most = _free(output or recipe.run_dir / "chain.json"), recipe.evaluate.batch, recipe.evaluate.max_k
    if batch != 1:
        raise UserError(
            f"evaluate.batch is {batch}: a round takes as long as its longest draft there, so set it to 1 for --chain."
        )
    target, head = _head(session)
    method = find_method(head.method)
    if not method.ends_chains:
        raise UserError(
            f"The head in {session.head_folder} is of {head.method}, whose chains have one length: leave --chain out."
        )
    samples, sampling, source = _calibration_answers(session, target, temperature)
    depth = head.clamp_draft_length(most)
    texts = read_chances(target, head, samples, depth, sampling)
    say(f"search-tree: {source}: {len(texts.tokens_S)}; timing target passes and drafts")
    context_ids = _typical_context(target, samples, depth)
    timed = measure_costs(target, [head_system("head", head, depth, depth)], context_ids, sampling)
    draft_ms, verify_ms = next(iter(timed.draft_ms.values())), timed.verify_ms
    # Where all distributions are known at once, or those of another length are others, all tokens are drafted.
    own_pass = head.drafts.own_pass
    whole = own_pass or {"static", "best_first"} <= method.trees_of(head.options)

    def cost(k: int, more: int) -> Callable[[np.ndarray], np.ndarray]:
        """Drafts of at most k tokens, of which so many more are made than kept."""
        ms = [draft_ms[str(k if whole else max(1, min(n + more, k)))] + verify_ms[str(n + 1)] for n in range(k + 1)]
        return lambda drafted: np.array(ms)[drafted]

    ways = {}
    for k in range(1, depth + 1):
        read = read_chances(target, head, samples, k, sampling) if own_pass else texts
        ways[f"{k} tokens"] = read.spent(fixed(k, k if own_pass else depth), cost(k, 0))
    floors, ways["adaptive"] = find_floors(texts, cost(depth, 1))
    found = _by_slice(ways, texts.slices, verify_ms["1"])
    calibration = {"source": source, "answers": len(texts.tokens_S), "places": int(texts.tokens_S.sum())}
    facts = {"ways": found, "costs": {"context": len(context_ids), "draft_ms": draft_ms, "verify_ms": verify_ms}}
    save_found(path, floors, {**_origin(session, head, target, sampling, calibration), **facts})
    table = Table(title="Chains: accepted and drafted length, and speedup by slice", title_justify="left")
    for column, name in enumerate(("", "τ", "drafted", *found["adaptive"]["speedup"])):
        table.add_column(name, justify="left" if column == 0 else "right", no_wrap=True)
    for name, one in found.items():
        numbers = [one["tau"], one["drafted"], *one["speedup"].values()]
        table.add_row(name, *(f"{number:.3g}" for number in numbers), style="bold" if name == "adaptive" else None)
    Console().print(table)
    say(f"evaluate.drafts: [{{tree: chain}}, {{tree: chain, floors: {list(floors)}}}]")
    return path


def _by_slice(ways: dict[str, Spent], slices: Sequence[str], alone_ms: float) -> dict[str, dict[str, Any]]:
    """Return what each way to draft brings, over the target alone overall and on each slice's answers."""
    groups = {"overall": np.ones(len(slices), bool)}
    groups |= {name: np.array([one == name for one in slices]) for name in dict.fromkeys(slices)}
    groups = {
        name: inside_S for name, inside_S in groups.items() if next(iter(ways.values())).some(inside_S).tokens_S.sum()
    }
    return {
        name: {
            "tau": way.tau,
            "drafted": way.drafted,
            "speedup": {group: alone_ms / way.some(inside_S).ms for group, inside_S in groups.items()},
        }
        for name, way in ways.items()
    }


def _prepare(session: Session, asked: int | None, temperature: float | None) -> _Search:
    """Load the head and the answers, and read the head's ranks. Raises UserError for a head that drafts no static trees, and
    where the largest tree and a text of its length exceed the context."""
    recipe, folder = session.recipe, session.head_folder
    target, head = _head(session)
    if "static" not in find_method(head.method).trees_of(head.options):
        raise UserError(
            f"The head in {folder} is of {head.method}, which drafts no static trees: there is none to search."
        )
    most = target.context_length // 2 - 2
    if asked is not None and asked > most:
        raise UserError(f"--nodes is {asked}: the target's context of {target.context_length} has room for {most}.")
    nodes = asked or min(AUTO_NODES, most)
    samples, sampling, source = _calibration_answers(session, target, temperature)
    width = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    texts = read_ranks(target, head, samples, head.clamp_draft_length(recipe.evaluate.max_k), min(nodes, width))
    say(f"search-tree: {source}: {texts.answers}, with {texts.places} places where a round may begin")
    if texts.answers < FEW:
        say(
            f"warning: {texts.answers} answers are few to search a tree on: a larger data.heldout in training leaves more."
        )
    return _Search(target, head, samples, sampling, source, texts, nodes)


def _head(session: Session) -> tuple[Target, DraftHead]:
    """Load the head, and the target that verifies its drafts; for a tuned one, the original's answers serve as its own."""
    original = session.target_in(session.recipe.evaluate.dtype)
    head = load_fitting(session.head_folder, original, session.warn)
    return head.verifier(original), head


def _typical_context(target: Target, samples: Sequence[Tokenized], nodes: int) -> list[int]:
    """Return the text of median length up to the middle of its last answer, with room for the largest draft."""
    sample = sorted(samples, key=lambda one: len(one.ids))[len(samples) // 2]
    start = answer_start(sample)
    longest = target.context_length - nodes - 2
    return sample.ids[: min(start + (len(sample.ids) - start) // 2, longest)].tolist()


def _of_any_depth(texts: TextRanks, deepest: Sequence[Budget], costs: TreeCosts) -> list[Budget]:
    """Return the fastest tree of every size, where a shallower one may be: every step of a draft costs time."""
    best = {budget.nodes: budget for budget in deepest}
    for depth in range(1, max(budget.found.tree.depth for budget in deepest)):
        for searched in find_trees(texts.cut(depth), list(best)):
            budget = costs.budget(searched)
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


def _cells(budget: Budget) -> list[str]:
    numbers = [budget.found.tau, budget.found.tau_held_back, budget.verify_ms, budget.draft_ms, budget.speedup]
    return [str(budget.nodes), str(budget.found.tree.depth), *(f"{number:.3g}" for number in numbers)]


def _calibration_answers(
    session: Session, target: Target, temperature: float | None
) -> tuple[list[Tokenized], Sampling, str]:
    """Return the run's held-out answers, or for another temperature new answers of `target` to some of their prompts; with
    the settings that they were drawn with, and where they come from.

    Raises UserError where the run has no answers, or where the head may have been trained on them.
    """
    own = session.recipe.answers.sampling
    sampling = own if temperature is None else session.recipe.evaluate.sampling(temperature)
    heldout = _held_out(session)
    if sampling == own:
        where = answers_file(session) if session.recipe.answers.regenerate else "the data"
        return heldout, sampling, f"held-out answers of {where}"
    # Evenly over the data, so that every slice has its share.
    count = min(NEW_ANSWERS, len(heldout))
    prompts = [heldout[i * len(heldout) // count] for i in range(count)]
    say(
        f"search-tree: the run has no answers for these settings; the target answers {count} of its held-out prompts at "
        f"temperature {sampling.temperature:g}"
    )
    return _answer(session, target, prompts, sampling), sampling, "new answers to held-out prompts"


def _held_out(session: Session) -> list[Tokenized]:
    recipe, answers = session.recipe, None
    if recipe.answers.regenerate:
        # Only looked up: making them takes as long as a training.
        inputs, answers = answer_inputs(session), answers_file(session)
        session.data.check_unchanged("answers", inputs)
        if not session.data.holds("answers", inputs):
            raise UserError(
                f"There are no finished answers in {recipe.data_path} to search a tree on: run `draftsmith train` or "
                "`draftsmith regenerate` with this recipe first."
            )
    trained = session.run.record("train") if session.named_head is None else None
    count = trained.inputs.get("data.heldout", recipe.data.heldout) if trained else recipe.data.heldout
    if recipe.data.heldout > count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout}, but the head was trained with {count}, so it has seen some of these answers: "
            f"set it to {count}."
        )
    if trained:
        # Of other samples others are held out.
        now = flat_inputs({} if recipe.answers.regenerate else answer_inputs(session))
        now |= {"data.on_too_long": recipe.data.on_too_long, "train.row_tokens": recipe.train.row_tokens}
        was = {key: trained.inputs[key] for key in now if key in trained.inputs}
        now = {key: now[key] for key in was}
        if differing(was, now):
            changes = tell_changes(was, now, trained.recipe, flat_inputs(asdict(recipe)))
            raise UserError(
                f"The head was trained with other data ({changes}), so it may have learned from some of the answers that would be held out: "
                "search with the recipe that it was trained with."
            )
    samples = load_samples(session, answers)
    return [samples[i] for i in split_samples(session, samples)[1]]


def _answer(session: Session, target: Target, samples: Sequence[Tokenized], sampling: Sampling) -> list[Tokenized]:
    """Let the target alone answer the prompt of each sample's last answer. A run keeps the answers, for when the command was interrupted,
    and for another search; a folder that is no run, as with --head, is left as it is."""
    recipe, requests = session.recipe, []
    longest = min(recipe.data.max_length, target.context_length)
    for sample in samples:
        prompt = sample.ids[: answer_start(sample)].tolist()
        limit = min(recipe.answers.max_new_tokens, longest - len(prompt))
        requests.append(Request.seeded(sample.sample_id, sample.slice, prompt, limit, recipe.seed))
    key = fingerprint(
        [target.fingerprint, target.dtype_name, asdict(sampling), [asdict(request) for request in requests]]
    )
    run = recipe.run_dir
    journal = Journal(run / "search.journal" if (run / "run.json").is_file() else None, key)
    answers = answer_alone(target, requests, sampling, journal, recipe.answers.batch)
    turns = {sample.sample_id: sample.conversation for sample in samples}
    return [replace(to_sample(one), conversation=turns[one.request.sample_id]) for one in answers]


def answer_start(sample: Tokenized) -> int:
    """Return where the last answer of a sample begins."""
    learnt = sample.mask.nonzero().flatten()
    breaks = (learnt.diff() > 1).nonzero().flatten()
    return int(learnt[int(breaks[-1]) + 1 if len(breaks) else 0])
