"""Trained heads on disk, and the drafters that an evaluation makes of them: the run's head and those of `evaluate.beside`, each in
every way to draft that `evaluate.drafts` names, and the baselines of `evaluate.baselines`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.data.answers.generate import read_answers
from draftsmith.data.conversations.templates import read_tokenizer
from draftsmith.decoder.drafters.draft_model import check_context
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.errors import UserError
from draftsmith.eval.drafters.baselines import BASELINES, Supplies
from draftsmith.eval.drafters.system import SystemUnderTest, check_ranks, head_system, tree_kind
from draftsmith.eval.training.history import trained_length
from draftsmith.heads.base import DraftHead
from draftsmith.heads.export.export import engines_without
from draftsmith.heads.files import weights_file
from draftsmith.heads.formats.recognise import head_digest, load_head, recognise, refuse_head, refuse_other_files
from draftsmith.heads.record import check_made_for
from draftsmith.heads.registry import find_method
from draftsmith.recipe.evaluate import EvaluateSpec
from draftsmith.recipe.record import FILES, FOLLOWERS
from draftsmith.recipe.schema import Recipe
from draftsmith.target.gguf_file import is_gguf
from draftsmith.target.target import Target
from draftsmith.target.tokens import check_same_tokens

Warn = Callable[[str], None]
"""Receives what makes results doubtful."""
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


def load_heads(recipe: Recipe, own_folder: Path, target: Target, warn: Warn) -> dict[str, DraftHead]:
    """Return the heads to measure by name, the run's own in `own_folder` first, as they draft once trained, in the dtype of `target`.

    One made for another target of the same sizes is measured too, with a warning.
    """
    own = load_fitting(own_folder, target, warn)
    return {own.method: own} | load_compared(recipe, target, own.method, warn)


def load_fitting(folder: Path, target: Target, warn: Warn) -> DraftHead:
    """Return the head in a folder as it drafts once trained, in the dtype of `target`, with a warning where it was made for another one.

    Raises UserError where the head tunes its target: its adapter means nothing on other weights, such as those that it
    is merged into.
    """
    warnings: list[str] = []
    head = load_head(folder, target, warn=warnings.append)
    if "tuned" in head.trains.outputs:
        check_made_for(folder, target)
    for text in warnings:
        warn(text)
    return head.deployed(target).to(target.dtype)


def load_compared(recipe: Recipe, target: Target, taken: str, warn: Warn) -> dict[str, DraftHead]:
    """Return the heads of `evaluate.beside`, with which the run's own, of the name `taken`, is compared."""
    folders = _compared_folders(recipe)
    if wrong := [name for name in folders if name == taken or not name.strip()]:
        raise UserError(f"evaluate.beside names a head {wrong[0]!r}, the name of the run's own: choose another.")
    return {name: load_fitting(at, target, warn) for name, at in folders.items()}


def _compared_folders(recipe: Recipe) -> dict[str, Path]:
    """Return the folders of the heads of `evaluate.beside`, given their own or runs'. Raises UserError that names the key."""
    named = recipe.evaluate.beside.items()
    return {name: find_head(recipe, Path(folder), f"evaluate.beside.{name}") for name, folder in named}


def with_records(
    recipe: Recipe, own_folder: Path, heads: Mapping[str, DraftHead], target: Target, drafters: list[SystemUnderTest]
) -> list[SystemUnderTest]:
    """Return the drafters with the length that their heads, of `load_heads`, were trained to, as far as their runs record it, and those of
    the run's own head with the engines that do not compute it."""
    folders = [own_folder, *_compared_folders(recipe).values()]
    lengths = {id(head): trained_length(folder) for head, folder in zip(heads.values(), folders, strict=True)}
    own = next(iter(heads.values()))
    # The README of its export starts a tuned target.
    without = () if "tuned" in own.trains.outputs else engines_without(own, target)
    return [
        replace(c, trained_length=lengths.get(id(c.head)), engines_without=without if c.head is own else ())
        for c in drafters
    ]


def check_named_drafters(recipe: Recipe) -> None:
    """Raise UserError for heads, trees, draft models and outputs of the evaluation that are not there; no target is needed."""
    _compared_folders(recipe)
    for draft in recipe.evaluate.drafts:
        draft.load()
    for baseline in recipe.evaluate.baselines:
        if baseline.path is not None:
            _check_draft_model_path(baseline.path)
        if baseline.outputs is not None and not Path(baseline.outputs).is_file():
            raise UserError(
                f"evaluate.baselines names the outputs {baseline.outputs}, but there is no such file: give an answers.jsonl "
                "of a run, or leave outputs out."
            )


def drafter_digests(recipe: Recipe, own_folder: Path, drafters: list[SystemUnderTest]) -> dict[str, Any]:
    """Identify the heads, trees and baselines of the evaluation, as run.json records them."""
    spec = recipe.evaluate
    beside = {name: head_digest(folder) for name, folder in _compared_folders(recipe).items()}
    trees = {d.tree: t.choices for d in spec.drafts if (t := d.load()) is not None and not isinstance(t, DynamicTree)}
    baselines = {c.name: c.fingerprint for c in drafters if c.head is None}
    digests = {"head": head_digest(own_folder), "beside": beside, "trees": trees}
    return digests | ({"baselines": baselines} if baselines else {})


def select_drafters(
    recipe: Recipe,
    heads: Mapping[str, DraftHead],
    target: Target,
    longest: int,
    tokenizer: Any,
    warn: Warn,
    *,
    compared: bool = False,
) -> list[SystemUnderTest]:
    """Return a drafter for every head and way to draft that fits it, then the baselines.

    longest: tokens of the longest text that will be decoded. tokenizer: the target's, which draft models must share.
    compared: `target` was tuned, and the evaluation compares it with its original. Raises UserError where a way fits no
    head, where the first head, the run's own, is left with none, where the longest text is longer than a drafter reads,
    and where two drafters have the same name.
    """
    spec = recipe.evaluate
    for name, head in heads.items():
        if head.reads.context_length is not None:
            check_context(f"head {name}", head.reads.context_length, longest + spec.longest_chain)
    for draft in spec.drafts:
        if unknown := [name for name in draft.heads if name not in heads]:
            raise UserError(
                f"evaluate.drafts, tree {draft.tree}: heads names {unknown[0]!r}, but the heads measured are "
                f"{', '.join(heads)}: choose among these."
            )
    found = [ways_to_draft(spec, *one, target, warn, compared=compared) for one in heads.items()]
    drafters = [c for of_head in found for c in of_head]
    for draft in spec.drafts:
        if (rule := draft.rule(spec.max_k)) is not None and not any(c.rule == rule for c in drafters):
            key = f"floors {draft.floors}" if draft.floors else f"confidence_threshold {draft.confidence_threshold}"
            raise UserError(
                f"evaluate.drafts has the {key}, but none of the heads ({', '.join(heads)}) ends its chains early: remove it."
            )
        if draft.window is not None and not any(c.window == draft.window for c in drafters):
            raise UserError(
                f"evaluate.drafts has the window {draft.window}, but none of the heads ({', '.join(heads)}) has attention that takes one: "
                "remove it."
            )
    own = next(iter(heads.values()))
    if not any(c.head is own for c in drafters):
        raise UserError(f"evaluate.drafts names only trees that {own.method} heads do not draft: add {{tree: chain}}.")
    for draft in spec.drafts:
        tree = draft.load()
        if tree is not None and not any((c.tree, c.drawn) == (tree, draft.drawn) for c in drafters):
            raise UserError(
                f"evaluate.drafts names the tree {tree.name}, but none of the heads ({', '.join(heads)}) drafts "
                f"{tree_kind(tree, draft.drawn)} trees: remove it."
            )
    drafters += _baselines(recipe, target, longest, tokenizer)
    name, times = Counter(c.name for c in drafters).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"The evaluation would measure two drafters of the name {name!r}: rename a tree file or a folder."
        )
    return drafters


def ways_to_draft(
    spec: EvaluateSpec, name: str, head: DraftHead, target: Target, warn: Warn, *, compared: bool
) -> list[SystemUnderTest]:
    """Return a drafter for every way to draft that fits a head."""
    verifier = head.verifier(target)
    tuned = None if verifier is target and not compared else verifier
    lengths = (spec.num_speculative_tokens, spec.max_k)
    ways = [
        (draft, tree)
        for draft, tree in ((draft, draft.load()) for draft in spec.drafts)
        if (not draft.heads or name in draft.heads)
        and (tree is None or tree_kind(tree, draft.drawn) in find_method(head.method).trees_of(head.options))
        and (draft.rule(1) is None or find_method(head.method).ends_chains)
        and (draft.window is None or head.least_window is not None)
    ]
    most = head.drafts.max_speculative_tokens
    if most is not None and most < spec.num_speculative_tokens and any(tree is None for _, tree in ways):
        warn(
            f"evaluate.num_speculative_tokens is {spec.num_speculative_tokens}, but {name} drafts {most} tokens at most: its chains "
            f"are measured with {most}."
        )
    for _, tree in ways:
        check_ranks(tree, name, head, target)
    return [
        head_system(
            name,
            head,
            *((len(draft.floors),) * 2 if draft.floors else lengths),
            tree=tree,
            drawn=draft.drawn,
            typical=draft.typical,
            verifier=tuned,
            rule=draft.rule(spec.max_k),
            weights=draft.weights,
            window=draft.window,
            budgets=draft.budgets or (),
        )
        for draft, tree in ways
    ]


def at_temperature(drafters: list[SystemUnderTest], sampling: Sampling) -> list[SystemUnderTest]:
    """Leave out, at temperature 0, drafters that would repeat another one.

    Lossy acceptance rules accept like the exact one there, and drawn children are the most likely ones.
    """
    if not sampling.greedy:
        return drafters
    kept, way = list[SystemUnderTest](), attrgetter("tree", "rule", "weights", "window")
    for c in sorted(drafters, key=lambda c: (not c.lossless, c.drawn)):
        if c.head is None or not any((c.head is k.head) and way(c) == way(k) for k in kept):
            kept.append(c)
    return [c for c in drafters if c in kept]


def _baselines(recipe: Recipe, target: Target, longest: int, tokenizer: Any) -> list[SystemUnderTest]:
    """Return the recipe's baselines, draft models in the dtype of `target`.

    longest: tokens of the longest text that will be decoded. Raises UserError for what cannot draft for `target`.
    """
    spec = recipe.evaluate

    def load_model(path: str) -> Target:
        model = _load_draft_model(path, target, tokenizer, recipe.target.attn_implementation)
        check_context(f"draft model {model.path}", model.context_length, longest + spec.max_k)
        return model

    def read_outputs(path: str) -> list[list[int]]:
        return [sample.ids[sample.mask].tolist() for sample in read_answers(Path(path)).samples]

    supplies = Supplies(spec.num_speculative_tokens, spec.max_k, target.vocab_size, load_model, read_outputs)
    baselines = [BASELINES[one.kind](one, supplies) for one in spec.baselines]
    for c in baselines:
        ahead = c.make(c.num_speculative_tokens).num_speculative_tokens
        if target.context_length is not None:
            check_context(f"target beside {c.name}", target.context_length, longest + ahead)
    return baselines


def _load_draft_model(path: str, target: Target, tokenizer: Any, attn_implementation: str) -> Target:
    """Load a draft model and check it as a target is checked, its tokenizer first. Raises UserError."""
    if path == target.path:
        raise UserError(f"evaluate.baselines names the target {path} as its own draft model: take a smaller one.")
    _check_draft_model_path(path)
    try:
        refuse_head(path)  # which has no tokenizer
        check_same_tokens(tokenizer, read_tokenizer(path), path)
        return draftsmith.load_target(
            path, dtype=target.dtype_name, device=str(target.device), attn_implementation=attn_implementation
        )
    except UserError as error:
        raise UserError(f"evaluate.baselines names a draft model that cannot be used: {error}") from error


def _check_draft_model_path(path: str) -> None:
    """Raise UserError for a local folder that is not there, without asking the Hub for it."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(path).is_dir() and not is_gguf(path):
        raise UserError(
            f"evaluate.baselines names the draft model {path}, but there is no such folder: give one, or a Hub name "
            "owner/model."
        )
