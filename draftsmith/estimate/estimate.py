"""A plan in words: the time, disk and memory of a recipe, what is guessed, and what would make it shorter.

What training a head takes is counted on the head, built without memory (counting.py); other figures are formulas over dimensions.
The plan states what it assumes: the lengths of texts, and the share of its peak that a GPU of the table reaches.
"""

import json
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from draftsmith.data.features.store import readable_bytes
from draftsmith.errors import UserError, one_line
from draftsmith.estimate.estimator import UNCOUNTED
from draftsmith.estimate.evaluation import EvaluationEstimate
from draftsmith.estimate.figures import BANDWIDTH_SHARE, Estimate, PlannedTarget, Rates
from draftsmith.eval.training.history import FEWEST, read_history
from draftsmith.heads.formats.layout import default_layout, engines_notice, find_layout, layouts_of
from draftsmith.machine import emulates_bf16
from draftsmith.recipe.schema import Recipe

LEAST_SHARE, MOST_LINES = 0.05, 5
_FEW_PROMPTS = 10
"""Prompts of a slice that still tell something."""
_BUSY = 0.15
"""Share of the cores that other programs may take, unsaid, while the machine is measured."""


@dataclass(frozen=True)
class Stage:
    """What a stage takes: seconds, and bytes on disk and, at once, in memory."""

    name: str
    seconds: float
    disk: float
    memory: float


def stages_of(estimate: Estimate) -> list[Stage]:
    """Return what each stage of a run takes."""
    recipe = estimate.recipe
    stages = [
        Stage("training", estimate.train_seconds, estimate.train_file_bytes, estimate.train_bytes),
        Stage("evaluation", EvaluationEstimate(estimate).seconds, 0, estimate.evaluate_bytes),
        Stage("export", 0, estimate.export_bytes, 0),
    ]
    if recipe.features.source == "store":
        seconds = estimate.feature_seconds
        stages.insert(0, Stage("hidden states", seconds, estimate.store_bytes, estimate.feature_bytes))
    if recipe.answers.regenerate:
        stages.insert(0, Stage("answers", estimate.answer_seconds, estimate.answer_file_bytes, estimate.answer_bytes))
    return stages


def total_seconds(estimate: Estimate) -> float:
    """Return the seconds of a run."""
    return sum(stage.seconds for stage in stages_of(estimate))


def describe(estimate: Estimate) -> list[str]:
    """Return the plan as lines of text, for the terminal and for the comment that opens a recipe."""
    recipe, given, target = estimate.recipe, estimate.given, estimate.target
    device, gpus = given.device, f"{given.gpus} {given.device.name}" if given.gpus > 1 else given.device.name
    spec, online = recipe.train, estimate.seconds(estimate.online_flops) / given.gpus
    active = f", {_count(target.active)} of them multiplied per token" if target.experts else ""
    one = "" if device.name == "cpu" else " on one GPU"
    shared = one if given.gpus == 1 else f" on {gpus}"
    unit = "conversations" if recipe.answers.regenerate else "texts"  # of which one conversation may be several
    texts = f"{estimate.samples} {unit} of {given.prompt} prompt and {given.answer} answer tokens"
    lines = [f"target: {_count(target.parameters)} parameters{active}, {_size(target.weight_bytes)} in memory"]
    if device.rates is None:
        lines.append(
            f"assumed: {texts}; {gpus}, which reach {given.utilisation:.0%} of {device.flops / 1e12:.0f} TFLOP/s and "
            f"{BANDWIDTH_SHARE:.0%} of {device.bandwidth / 1e12:.3g} TB/s"
        )
    else:
        lines += [f"assumed: {texts}", *_measured(estimate, device.rates)]
    if recipe.answers.regenerate:
        flops = target.forward_flops(given.prompt) + given.answer * target.step_flops(estimate.context)
        here = f"{estimate.samples * flops:.2g} FLOP, {readable_time(estimate.answer_seconds)}{shared}"
        lines.append(
            f"answers: {_count(estimate.samples * given.answer)} tokens, {'by servers, whose time is not planned' if recipe.answers.servers else here}, "
            f"{_size(estimate.answer_file_bytes)} on disk, {_size(estimate.answer_bytes)} in memory"
        )
    stored = f"{_size(estimate.store_bytes)} on disk, {readable_time(estimate.feature_seconds)}{shared}, "
    stored += f"{_size(estimate.feature_bytes)} in memory, then read at {_size(estimate.read_rate)}/s while training"
    used, other = (f"stored: {stored}", f"online: {readable_time(online)} more training")
    used, other = (other, used) if recipe.features.source == "online" else (used, other)
    trained = _count(estimate.head.parameters)
    stages, memory = stages_of(estimate), estimate.given.device.memory
    whole = sum(stage.seconds for stage in stages)
    shares = ", ".join(f"{stage.name} {stage.seconds / whole:.0%}" for stage in stages if stage.seconds)
    disk, most = sum(stage.disk for stage in stages), max(stage.memory for stage in stages)
    return [
        *lines,
        f"hidden states {used}; if {other}",
        f"training: {estimate.steps} steps, {estimate.train_flops:.2g} FLOP of the head, {readable_time(estimate.train_seconds)} on {gpus}, "
        f"{_size(estimate.train_file_bytes)} on disk",
        f"memory {'' if device.name == 'cpu' else 'per GPU '}while training: {_size(estimate.train_bytes)} of {_size(device.memory)} "
        f"(target {_size(estimate.train_target_bytes)}; {trained} trained parameters with {spec.optimizer} {_size(estimate.head_bytes)}; "
        f"activations and logits {_size(estimate.pass_bytes)}; batches at hand {_size(estimate.batch_bytes)})",
        _evaluation(estimate, one),
        f"export: {_size(estimate.export_bytes)} on disk",
        f"total: {readable_time(whole)} ({shares}), {_size(disk)} on disk, {_size(most)} in memory at once",
        *(
            f"does not fit: {stage.name} needs {_size(stage.memory)} of memory, and {estimate.given.device.name} has {_size(memory)}"
            for stage in stages
            if stage.memory > memory
        ),
    ]


def _measured(estimate: Estimate, rates: Rates) -> list[str]:
    """Say what was measured, and what made it slow."""
    device, batch = estimate.given.device, estimate.recipe.answers.batch
    alone, together = (1000 * estimate.pass_seconds(rows, 1, estimate.context) for rows in (1, batch))
    others = rates.clocks.others or 0.0
    lines = [
        f"measured in {readable_time(rates.clocks.wall_s)}: {device.name}, {rates.forward / 1e9:.3g} GFLOP/s over whole texts and "
        f"{rates.train / 1e9:.3g} in training; decoding, {alone:.3g} ms a pass at batch 1 ({_size(device.bandwidth)}/s of "
        f"weights) and {together:.4g} ms at batch {batch}"
    ]
    if others > _BUSY:
        lines.append(
            f"busy: other programs took {others:.0%} of the cores meanwhile; the plan is for a machine without them"
        )
    if estimate.recipe.train.precision == "bf16" and rates.train < rates.forward / 4 and emulates_bf16(device.name):
        lines.append('slow: this CPU emulates bf16, which training computes in: set train.precision to "no"')
    return lines


def _evaluation(estimate: Estimate, one: str) -> str:
    """Say what the evaluation measures, and how long its parts take. one: on what."""
    spec, found = estimate.recipe.evaluate, EvaluationEstimate(estimate)
    counts = found.count, len(spec.temperatures), spec.repeats, len(found.ways)
    many = zip(counts, ("prompt", "temperature", "repeat", "drafter"), strict=True)
    prompts, temperatures, repeats, drafters = (f"{n} {word}{'s' if n > 1 else ''}" for n, word in many)
    parts = ", ".join(f"{name} {readable_time(seconds)}" for name, seconds in found.parts.items())
    uncounted = " (assumed, as they are not on this machine)" if estimate.prompts.keys() == UNCOUNTED.keys() else ""
    return (
        f"evaluation: {prompts}{uncounted}, {temperatures}, {repeats} of the target and {drafters}, "
        f"{readable_time(found.seconds)}{one} ({parts}) if no draft is slower than the target alone, {_size(estimate.evaluate_bytes)} in memory"
    )


def foresee(estimate: Estimate, pilot: Path | None) -> list[str]:
    """Return in a line the held-out tau that the recipe's data would bring, forecast from the run in the folder `pilot`.

    pilot: None takes the recipe's own run, and returns no line where that was not trained. Raises UserError for a folder without
    a training, and for one of another method.
    """
    folder, recipe = pilot or estimate.recipe.run_dir, estimate.recipe
    past = read_history(folder)
    if past is None:
        if pilot is None:
            return []
        raise UserError(f"--pilot: {one_line(pilot)} has no evaluation of a training: name the folder of a run.")
    if past.method not in (None, recipe.method):
        raise UserError(
            f"--pilot: {folder} trained {past.method}, and the recipe {recipe.method}: name a run of the same method."
        )
    found = past.at(estimate.seen_tokens)
    seen = f"{len(past.points)} evaluations of {folder}, the last at {_count(past.tokens)} tokens with {past.points[-1].tau:.2f}"
    if found is None:
        return [
            f"held-out tau: no forecast from the {seen}: at least {FEWEST} in the first half of its steps are needed"
        ]
    return [f"held-out tau: about {found} at {_count(found.tokens)} tokens, forecast from the {seen}"]


def engines(recipe: Recipe, target: PlannedTarget) -> list[str]:
    """Say in a line which engines of the recipe's layout will not draft for the target, where there are such."""
    if not layouts_of(recipe.method):
        return []
    layout = find_layout(recipe.export.layout or default_layout(recipe.method, recipe.target.path), recipe.method)
    notice = engines_notice(layout, recipe.target.path, getattr(target.config, "architectures", None))
    return [f"engines: {notice}"] if notice else []


def comment(estimate: Estimate) -> str:
    """Return `describe` as a YAML comment, wrapped to lines of 116 characters."""
    wrapped = [textwrap.wrap(line, 112, subsequent_indent="  ") for line in describe(estimate)]
    return "\n".join(f"#   {line}" for lines in wrapped for line in lines)


def guesses(estimate: Estimate, known: Collection[str]) -> list[str]:
    """Return lines that say what is guessed, and how to do better. known: the fields of Assumptions that are not."""
    given = estimate.given
    lines = {
        "prompt": f"guessed: prompts of {given.prompt} tokens, a quarter of data.max_length; --prompt-tokens N says better",
        "answer": f"guessed: answers of {given.answer} tokens, half of answers.max_new_tokens; --answer-tokens N says better, or "
        "`draftsmith regenerate --data.limit 50` makes some, which the next plan counts; in the evaluation of "
        f"{given.evaluated}, half of evaluate.max_new_tokens",
        "head": f"guessed: {estimate.head.guessed}",
    }
    return [line for name, line in lines.items() if name not in known and (name != "head" or estimate.head.guessed)]


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _size(size: float) -> str:
    return readable_bytes(round(size))


def readable_time(seconds: float) -> str:
    """Return a time in words, such as "3.2 h"."""
    if seconds >= 5400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.2g} min" if seconds >= 90 else f"{seconds:.2g} s"


def shorter(estimate: Estimate, estimate_of: Callable[[Recipe], Estimate]) -> list[str]:
    """Return lines that name a key, its value and a smaller one, and what that saves, the most first: at least LEAST_SHARE of the
    whole, at most MOST_LINES.

    estimate_of: estimates another recipe on the same device.
    """
    whole = total_seconds(estimate)
    saved = []
    # Keys of the recipe, each with a value that asks for less: half, the least, or none of it.
    recipe, samples, prompts = (
        estimate.recipe,
        int(estimate.samples / estimate.given.texts) // 2,
        max(estimate.prompts.values()),
    )
    answers, epochs, spec = recipe.answers, recipe.train.epochs, recipe.evaluate
    changes = [
        (samples > recipe.data.heldout, "data.limit", samples),
        (answers.regenerate and answers.max_new_tokens >= 4, "answers.max_new_tokens", answers.max_new_tokens // 2),
        (recipe.features.source == "online" and epochs > 1, "features.source", "store"),
        (epochs > 1, "train.epochs", epochs // 2),
        (spec.repeats > 1, "evaluate.repeats", 1),
        (prompts > _FEW_PROMPTS, "evaluate.per_slice", max(_FEW_PROMPTS, prompts // 4)),
        (spec.max_new_tokens >= 4, "evaluate.max_new_tokens", spec.max_new_tokens // 2),
        (len(spec.temperatures) > 1, "evaluate.temperatures", spec.temperatures[:1]),
        (len(spec.plan_batches) > 1, "evaluate.plan_batches", [spec.batch]),
        (spec.lossless and recipe.target.dtype != "float32", "evaluate.dtype", "float32"),
        (spec.generate, "evaluate.generate", False),
    ]
    for applies, key, value in changes:
        if not applies:
            continue
        section, name = key.split(".")
        old = getattr(estimate.recipe, section)
        other = replace(estimate.recipe, **{section: replace(old, **{name: value})})
        seconds = whole - total_seconds(estimate_of(other))
        text = f"{key} {json.dumps(getattr(old, name))} -> {json.dumps(value)}"
        saved.append((seconds, f"shorter by {readable_time(seconds)} ({seconds / whole:.0%}): {text}"))
    saved.sort(key=lambda one: -one[0])
    return [text for seconds, text in saved if seconds >= LEAST_SHARE * whole][:MOST_LINES]
