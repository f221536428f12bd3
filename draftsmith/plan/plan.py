"""`draftsmith plan`: the time, disk and memory of a recipe, from it and the target's config alone; no weights are loaded.

    draftsmith plan --recipe R --device h100 --gpus 8

Every figure is a formula over dimensions. Lengths of texts and the share of its peak that a GPU reaches are assumptions,
which the plan states.
"""

import textwrap
from pathlib import Path

from draftsmith.data.features.store import DTYPES, readable_bytes
from draftsmith.errors import UserError, shown_path
from draftsmith.eval.measure.forecast import FEWEST
from draftsmith.eval.measure.history import read_history
from draftsmith.heads.base import draft_vocab_size_of
from draftsmith.heads.block.options import check_block
from draftsmith.heads.cost import head_cost
from draftsmith.heads.formats.layout import find_layout
from draftsmith.heads.formats.recognise import refuse_head
from draftsmith.heads.target.pretrained import load_config
from draftsmith.heads.target.shape import TargetShape, shape_of
from draftsmith.heads.target.target import check_layer_ids
from draftsmith.heads.target.tokens import check_mask_token
from draftsmith.plan.figures import BANDWIDTH_SHARE, Assumptions, Device, Plan
from draftsmith.recipe.schema import Recipe


def make_plan(recipe: Recipe, target: TargetShape, samples: int, given: Assumptions) -> Plan:
    """Return the plan of a recipe. Raises UserError for lengths that do not fit it."""
    longest = _longest(recipe, target)
    if given.prompt + given.answer > longest:
        raise UserError(
            f"{given.prompt} prompt and {given.answer} answer tokens do not fit the {longest} that data.max_length, "
            "train.row_tokens and the target allow: give other --prompt-tokens and --answer-tokens."
        )
    _check_head(recipe, target)
    return Plan(recipe, target, head_cost(recipe.method, recipe.head, target), samples, given)


def _check_head(recipe: Recipe, target: TargetShape) -> None:
    """Raise UserError for options that cannot fit the target or the method, as far as its config shows; training checks the rest."""
    if (layers := getattr(recipe.head, "layer_ids", None)) is not None:
        check_layer_ids(layers, target.layers, recipe.target.path)
    if (size := draft_vocab_size_of(recipe.head)) is not None and size > target.vocab:
        raise UserError(
            f"head.draft_vocab_size is {size}, but the target has {target.vocab} tokens: choose a smaller one, or null."
        )
    if (mask := getattr(recipe.head, "mask_token_id", None)) is not None:
        check_mask_token(mask, target.vocab, recipe.target.path)
    if (block := getattr(recipe.head, "block_size", None)) is not None:
        check_block(block, target.context, recipe.target.path)
    if recipe.export.layout is not None:
        find_layout(recipe.export.layout, recipe.method)


def describe(plan: Plan) -> list[str]:
    """Return the plan as lines of text, for the terminal and for the comment that opens a recipe."""
    recipe, given, target = plan.recipe, plan.given, plan.target
    device, gpus = given.device, f"{given.gpus} {given.device.name}" if given.gpus > 1 else given.device.name
    spec, online = recipe.train, plan.seconds(plan.online_flops) / given.gpus
    active = f", {_count(target.active)} of them multiplied per token" if target.experts else ""
    lines = [
        f"target: {_count(target.parameters)} parameters{active}, {_size(target.weight_bytes)} in memory",
        f"assumed: {plan.samples} conversations of {given.prompt} prompt and {given.answer} answer tokens; {gpus}, which "
        f"reach {given.utilisation:.0%} of {device.flops / 1e12:.0f} TFLOP/s and {BANDWIDTH_SHARE:.0%} of "
        f"{device.bandwidth / 1e12:.3g} TB/s",
    ]
    if recipe.answers.regenerate:
        lines.append(
            f"answers: {_count(plan.samples * given.answer)} tokens, {plan.answer_flops:.2g} FLOP, {_time(plan.answer_seconds)} on one "
            f"GPU, {_size(plan.answer_bytes)} in memory"
        )
    stored = f"{_size(plan.store_bytes)} on disk, {_time(plan.seconds(plan.feature_flops))} on one GPU, then read at "
    stored += f"{_size(plan.read_rate)}/s while training"
    used, other = (f"stored: {stored}", f"online: {_time(online)} more training")
    used, other = (other, used) if recipe.features.source == "online" else (used, other)
    trained = _count(plan.head.matrices + plan.head.others)
    lines += [
        f"hidden states {used}; if {other}",
        f"training: {plan.steps} steps, {plan.train_flops:.2g} FLOP of the head, {_time(plan.train_seconds)} on {gpus}",
        f"memory per GPU while training: {_size(plan.train_bytes)} of {_size(device.memory)} (target "
        f"{_size(target.weight_bytes)}; {trained} trained parameters with {spec.optimizer} {_size(plan.head_bytes)}; "
        f"activations and logits {_size(plan.pass_bytes)})",
        f"evaluation: at most {_time(100 * plan.evaluate_seconds)} per 100 prompts and temperature on one GPU, "
        f"{_size(plan.evaluate_bytes)} in memory",
    ]
    return lines


def foresee(plan: Plan, pilot: Path | None) -> list[str]:
    """Return in a line the held-out tau that the recipe's data would bring, forecast from the run in the folder `pilot`.

    pilot: None takes the recipe's own run, and returns no line where that was not trained. Raises UserError for a folder without
    a training, and for one of another method.
    """
    folder, recipe = pilot or plan.recipe.run_dir, plan.recipe
    past = read_history(folder)
    if past is None:
        if pilot is None:
            return []
        raise UserError(f"--pilot: {shown_path(pilot)} has no evaluation of a training: name the folder of a run.")
    if past.method not in (None, recipe.method):
        raise UserError(
            f"--pilot: {folder} trained {past.method}, and the recipe {recipe.method}: name a run of the same method."
        )
    found = past.at(plan.seen_tokens)
    seen = f"{len(past.points)} evaluations of {folder}, the last at {_count(past.tokens)} tokens with {past.points[-1].tau:.2f}"
    if found is None:
        return [
            f"held-out tau: no forecast from the {seen}: at least {FEWEST} in the first half of its steps are needed"
        ]
    return [f"held-out tau: about {found} at {_count(found.tokens)} tokens, forecast from the {seen}"]


def comment(plan: Plan, width: int = 116) -> str:
    """Return `describe` as a YAML comment, each line wrapped to `width`."""
    wrapped = [textwrap.wrap(line, width - 4, subsequent_indent="  ") for line in describe(plan)]
    return "\n".join(f"#   {line}" for lines in wrapped for line in lines)


def assume(recipe: Recipe, target: TargetShape, device: Device, gpus: int = 1) -> Assumptions:
    """Assume answers of half of answers.max_new_tokens after prompts of a quarter of data.max_length (less where the
    context is short), at 40% of the peak."""
    longest = _longest(recipe, target)
    return Assumptions(device, gpus, 0.4, longest // 4, min(recipe.answers.max_new_tokens // 2, longest // 2))


def _longest(recipe: Recipe, target: TargetShape) -> int:
    return min(recipe.data.max_length, recipe.train.row_tokens, target.context)


def target_shape(recipe: Recipe) -> TargetShape:
    """Return the dimensions of the recipe's target from its config."""
    spec = recipe.target
    if spec.path == "embedded":
        raise UserError(
            "The embedded default needs no plan, it takes minutes on a CPU: name a target with --target.path."
        )
    refuse_head(spec.path)
    config = load_config(spec.path, spec.trust_remote_code)
    named = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = named if spec.dtype == "auto" else spec.dtype
    return shape_of(config, DTYPES[dtype].itemsize if dtype in DTYPES else 2)


def count_conversations(recipe: Recipe) -> int:
    """Return data.limit; without one, count the rows of local files. Raises UserError for a Hub data set without one."""
    from draftsmith.data.conversations.load import load_conversations

    spec = recipe.data
    if spec.limit is not None:
        return spec.limit
    if not spec.sources or not all(Path(source).expanduser().exists() for source in spec.sources):
        raise UserError(
            "data.limit is null and the data are not local files, so nobody knows how many conversations there are: add "
            "--data.limit N."
        )
    return len(load_conversations(spec.sources, split=spec.split, slice=spec.slice))


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _size(size: float) -> str:
    return readable_bytes(round(size))


def _time(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.2g} min" if seconds >= 90 else f"{seconds:.2g} s"
