"""`draftsmith plan`: the time, disk and memory of a recipe, from it and the target's config alone; no weights are loaded.

    draftsmith plan --recipe R                         # for this machine, whose rates are measured
    draftsmith plan --recipe R --device h100 --gpus 8

What training a head takes is counted on the head, built without memory (counting.py); other figures are formulas over dimensions.
The plan states what it assumes: the lengths of texts, and the share of its peak that a GPU of the table reaches.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from draftsmith.data.conversations.load import Conversation, load_conversations, local_files
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.conversations.templates import load_tokenizer, prepare_prompts
from draftsmith.data.embedded import SHIPPED, ensure_embedded
from draftsmith.data.features.store import DTYPES, readable_bytes
from draftsmith.errors import UserError, one_line
from draftsmith.estimate.counting import HeadCost
from draftsmith.estimate.evaluation import EvaluationEstimate
from draftsmith.estimate.figures import BANDWIDTH_SHARE, Assumptions, Device, Estimate, PlannedTarget, Rates
from draftsmith.eval.training.forecast import FEWEST
from draftsmith.eval.training.history import read_history, read_stage
from draftsmith.heads.base import draft_vocab_size_of
from draftsmith.heads.formats.layout import default_layout, engines_notice, find_layout, layouts_of
from draftsmith.heads.formats.recognise import refuse_head
from draftsmith.machine import emulates_bf16
from draftsmith.recipe.schema import Recipe
from draftsmith.target.config import check_causal, check_quantization, read_model_config
from draftsmith.target.pretrained import load_config
from draftsmith.target.shape import TargetShape, shape_of

UNCOUNTED = {"": 100}
"""The prompts that a plan counts with where they are not at hand."""
_SAMPLED = 200
"""Conversations whose prompts are measured."""
_BUSY = 0.15
"""Share of the cores that other programs may take, unsaid, while the machine is measured."""


def make_estimate(
    recipe: Recipe,
    target: TargetShape,
    samples: int,
    given: Assumptions,
    prompts: Mapping[str, int] = UNCOUNTED,
    head: HeadCost | None = None,
) -> Estimate:
    """Return the plan of a recipe. prompts: of the evaluation, by slice. head: its costs, if they are known. Raises UserError for
    lengths and options that do not fit it."""
    longest = _longest(recipe, target)
    if given.prompt + given.answer > longest:
        raise UserError(
            f"{given.prompt} prompt and {given.answer} answer tokens do not fit the {longest} that data.max_length, "
            "train.row_tokens and the target allow: give other --prompt-tokens and --answer-tokens."
        )
    if (size := draft_vocab_size_of(recipe.head)) is not None and size > target.vocab:
        raise UserError(
            f"head.draft_vocab_size is {size}, but the target has {target.vocab} tokens: choose a smaller one, or null."
        )
    if recipe.export.layout is not None:
        find_layout(recipe.export.layout, recipe.method)
    head = head or HeadCost(recipe.method, recipe.head, target, recipe.target.path)
    return Estimate(recipe, target, head, samples, given, prompts)


@dataclass(frozen=True)
class Stage:
    """What a stage takes: seconds, and bytes on disk and, at once, in memory."""

    name: str
    seconds: float
    disk: float
    memory: float


def stages_of(estimate: Estimate) -> list[Stage]:
    """Return what each stage of a run takes."""
    recipe, stored = estimate.recipe, estimate.recipe.features.source == "store"
    stages = [
        Stage("training", estimate.train_seconds, estimate.train_file_bytes, estimate.train_bytes),
        Stage("evaluation", EvaluationEstimate(estimate).seconds, 0, estimate.evaluate_bytes),
        Stage("export", 0, estimate.export_bytes, 0),
    ]
    if stored:
        stages.insert(
            0,
            Stage(
                "hidden states", estimate.seconds(estimate.feature_flops), estimate.store_bytes, estimate.feature_bytes
            ),
        )
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
    texts = f"{estimate.samples} conversations of {given.prompt} prompt and {given.answer} answer tokens"
    lines = [f"target: {_count(target.parameters)} parameters{active}, {_size(target.weight_bytes)} in memory"]
    if device.rates is None:
        lines.append(
            f"assumed: {texts}; {gpus}, which reach {given.utilisation:.0%} of {device.flops / 1e12:.0f} TFLOP/s and "
            f"{BANDWIDTH_SHARE:.0%} of {device.bandwidth / 1e12:.3g} TB/s"
        )
    else:
        lines += [f"assumed: {texts}", *_measured(estimate, device.rates)]
    if recipe.answers.regenerate:
        here = f"{estimate.answer_flops:.2g} FLOP, {readable_time(estimate.answer_seconds)}{one}"
        lines.append(
            f"answers: {_count(estimate.samples * given.answer)} tokens, {'by servers, whose time is not planned' if recipe.answers.servers else here}, "
            f"{_size(estimate.answer_file_bytes)} on disk, {_size(estimate.answer_bytes)} in memory"
        )
    stored = f"{_size(estimate.store_bytes)} on disk, {readable_time(estimate.seconds(estimate.feature_flops))}{one}, "
    stored += f"{_size(estimate.feature_bytes)} in memory, then read at {_size(estimate.read_rate)}/s while training"
    used, other = (f"stored: {stored}", f"online: {readable_time(online)} more training")
    used, other = (other, used) if recipe.features.source == "online" else (used, other)
    trained = _count(estimate.head.parameters)
    return [
        *lines,
        f"hidden states {used}; if {other}",
        f"training: {estimate.steps} steps, {estimate.train_flops:.2g} FLOP of the head, {readable_time(estimate.train_seconds)} on {gpus}, "
        f"{_size(estimate.train_file_bytes)} on disk",
        f"memory {'' if device.name == 'cpu' else 'per GPU '}while training: {_size(estimate.train_bytes)} of {_size(device.memory)} "
        f"(target {_size(target.weight_bytes)}; {trained} trained parameters with {spec.optimizer} {_size(estimate.head_bytes)}; "
        f"activations and logits {_size(estimate.pass_bytes)})",
        _evaluation(estimate, one),
        *_summary(estimate),
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
    many = [
        (found.count, "prompt"),
        (len(spec.temperatures), "temperature"),
        (spec.repeats, "repeat"),
        (len(found.ways), "drafter"),
    ]
    prompts, temperatures, repeats, drafters = (f"{n} {word}{'s' if n > 1 else ''}" for n, word in many)
    parts = ", ".join(f"{name} {readable_time(seconds)}" for name, seconds in found.parts.items())
    uncounted = " (assumed, as they are not on this machine)" if estimate.prompts.keys() == UNCOUNTED.keys() else ""
    return (
        f"evaluation: {prompts}{uncounted}, {temperatures}, {repeats} of the target and {drafters}, "
        f"{readable_time(found.seconds)}{one} ({parts}) if no draft is slower than the target alone, {_size(estimate.evaluate_bytes)} in memory"
    )


def _summary(estimate: Estimate) -> list[str]:
    """Return lines with the size of the export, the whole, and what does not fit in memory."""
    stages, memory = stages_of(estimate), estimate.given.device.memory
    whole = sum(stage.seconds for stage in stages)
    shares = ", ".join(f"{stage.name} {stage.seconds / whole:.0%}" for stage in stages if stage.seconds)
    disk, most = sum(stage.disk for stage in stages), max(stage.memory for stage in stages)
    return [
        f"export: {_size(estimate.export_bytes)} on disk",
        f"total: {readable_time(whole)} ({shares}), {_size(disk)} on disk, {_size(most)} in memory at once",
        *(
            f"does not fit: {stage.name} needs {_size(stage.memory)} of memory, and {estimate.given.device.name} has {_size(memory)}"
            for stage in stages
            if stage.memory > memory
        ),
    ]


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


def assume(recipe: Recipe, target: TargetShape, device: Device) -> Assumptions:
    """Assume answers of half of answers.max_new_tokens after prompts of a quarter of data.max_length (less where the
    context is short), at 40% of the peak, or at the rates that are measured."""
    longest = _longest(recipe, target)
    answer = min(recipe.answers.max_new_tokens // 2, longest // 2)
    return Assumptions(device, 1, 0.4, longest // 4, answer)


def _longest(recipe: Recipe, target: TargetShape) -> int:
    return min(recipe.data.max_length, recipe.train.row_tokens, target.context)


def read_target(recipe: Recipe) -> PlannedTarget:
    """Return what the config of the recipe's target says."""
    spec, path = recipe.target, _at_hand(recipe)
    refuse_head(path)
    if Path(path).is_dir() and not spec.trust_remote_code:
        read_model_config(Path(path), "the target")
    config = load_config(path, spec.trust_remote_code)
    check_causal(spec.path, config, spec.trust_remote_code)
    check_quantization(spec.path, config)
    named = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = named if spec.dtype == "auto" else spec.dtype
    return PlannedTarget(config, shape_of(config, DTYPES[dtype].itemsize if dtype in DTYPES else 2), dtype)


def _at_hand(recipe: Recipe) -> str:
    """Return the path of the recipe's target, that of the embedded default by its name."""
    return str(SHIPPED) if recipe.target.path == "embedded" else recipe.target.path


def check_template(recipe: Recipe) -> None:
    """Raise UserError where the recipe names a chat template that is not there, which a plan could do without."""
    if (named := recipe.data.chat_template) is not None and not os.path.isfile(os.path.expanduser(named)):
        raise UserError(f"data.chat_template is {one_line(named)}, but there is no such file: check the path.")


def local_conversations(recipe: Recipe) -> list[Conversation] | None:
    """Return the conversations to learn from, None where they are not local files."""
    spec, sources = recipe.data, _local(recipe, "data.sources", recipe.data.sources)
    if sources is None:
        return None
    return load_conversations(sources, split=spec.split, slice=spec.slice, limit=spec.limit)


def lengths_at_hand(
    recipe: Recipe, target: TargetShape, conversations: Sequence[Conversation] | None
) -> dict[str, int]:
    """Return the mean tokens of the first prompts, as far as they fit beside an answer, and of the answers, by the names of Assumptions:
    those in the data where the target does not answer, else those of the run where it has. What is not known is left out."""
    spec, longest, found = recipe.data, _longest(recipe, target), dict[str, int]()
    if (answer := _answer_tokens(recipe)) is not None:
        found["answer"] = min(answer, longest - longest // 4)
    if conversations is None:
        return found
    try:
        tokenizer = load_tokenizer(_at_hand(recipe), recipe.target.trust_remote_code, spec.chat_template)
        if recipe.answers.regenerate:
            prompts = prepare_prompts(
                tokenizer,
                conversations[:_SAMPLED],
                max_new_tokens=lambda slice_name: recipe.answers.max_new_tokens,
                max_length=longest,
                template=spec.template,
                warn=lambda text: None,
            )
            least = found.get("answer", min(recipe.answers.max_new_tokens // 2, longest // 2))
            return found | {"prompt": min(round(mean(len(prompt.ids) for prompt in prompts)), longest - least)}
        samples = tokenize_all(
            tokenizer,
            conversations[:_SAMPLED],
            max_length=longest,
            on_too_long=spec.on_too_long,
            template_kwargs=spec.template,
            warn=lambda text: None,
        ).samples
    except UserError:  # which the run will say; a plan needs the config alone
        return found
    answer = max(1, round(mean(int(sample.mask.sum()) for sample in samples)))
    return {"answer": answer, "prompt": max(1, round(mean(len(sample.ids) for sample in samples)) - answer)}


def _answer_tokens(recipe: Recipe) -> int | None:
    """Return the mean tokens of the answers that the run holds, None where it holds none by this target and of this length."""
    path = recipe.data_path / "run.json"
    if not recipe.answers.regenerate or not path.exists():
        return None
    inputs, facts = read_stage(path, "answers")
    count, tokens = facts.get("answers"), facts.get("output_tokens")
    alike = inputs.get("answers.max_new_tokens") == recipe.answers.max_new_tokens
    return max(1, round(tokens / count)) if alike and type(count) is type(tokens) is int and count > 0 else None


def count_prompts(recipe: Recipe) -> Mapping[str, int]:
    """Return how many prompts of each slice the evaluation takes; UNCOUNTED where they are not local files."""
    spec, sources = recipe.evaluate, _local(recipe, "evaluate.prompts", recipe.evaluate.prompts)
    if sources is None:
        return UNCOUNTED
    found = Counter(conversation.slice for conversation in load_conversations(sources))
    return {name: min(count, spec.per_slice or count) for name, count in found.items()}


def _local(recipe: Recipe, key: str, named: Sequence[str]) -> list[str] | None:
    """Return the files that a recipe names under `key`, or the embedded default's; None where some are data sets of the Hub. Raises
    UserError for a file that is not there, and where none is named."""
    if not named and recipe.target.path == "embedded":
        embedded = ensure_embedded()
        return [str(embedded.conversations if key == "data.sources" else embedded.prompts)]
    try:
        return None if None in [local_files(one) for one in named] or not named else [*named]
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def guesses(estimate: Estimate, known: Collection[str]) -> list[str]:
    """Return lines that say what is guessed, and how to do better. known: the fields of Assumptions that are not."""
    given = estimate.given
    lines = {
        "prompt": f"guessed: prompts of {given.prompt} tokens, a quarter of data.max_length; --prompt-tokens N says better",
        "answer": f"guessed: answers of {given.answer} tokens, half of answers.max_new_tokens; --answer-tokens N says better, or "
        "`draftsmith regenerate --data.limit 50` makes some, which the next plan counts",
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
