"""`draftsmith plan`: plans of a recipe and of its variants, from the target's config and what is at hand.

    draftsmith plan --recipe R                         # for this machine, whose rates are measured once
    draftsmith plan --recipe R --device h100 --gpus 8

No weights are loaded.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from draftsmith.data.conversations.left_out import Refusals
from draftsmith.data.conversations.load import Conversation, load_conversations, local_files
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.conversations.templates import load_tokenizer, prepare_prompts
from draftsmith.data.embedded import SHIPPED, ensure_embedded
from draftsmith.data.features.index import DTYPES
from draftsmith.errors import UserError, one_line
from draftsmith.estimate.counting import HeadCost
from draftsmith.estimate.figures import Assumptions, Device, Estimate, PlannedTarget
from draftsmith.estimate.rates import measure_device
from draftsmith.eval.training.history import read_stage
from draftsmith.heads.base import draft_vocab_size_of
from draftsmith.heads.formats.layout import find_layout
from draftsmith.heads.formats.recognise import refuse_head
from draftsmith.recipe.schema import Recipe
from draftsmith.target.config import check_causal, check_quantization, read_model_config
from draftsmith.target.pretrained import load_config
from draftsmith.target.shape import TargetShape, shape_of

UNCOUNTED = {"": 100}
"""The prompts that a plan counts with where they are not at hand."""
_SAMPLED = 200
"""Conversations whose prompts are measured."""


@dataclass(frozen=True)
class Estimator:
    """What plans are made of. samples: conversations at hand; prompts: of the evaluation, by slice. asked: fields of Assumptions that
    the user gave, or that the data tell. head: its costs, once they are counted."""

    target: PlannedTarget
    device: Device
    samples: int
    prompts: Mapping[str, int]
    asked: Mapping[str, Any]
    head: HeadCost | None = None

    @classmethod
    def of(cls, recipe: Recipe, device: Device, asked: Mapping[str, Any]) -> "Estimator":
        """Read the target's config, count what is at hand, and measure a device that is not of the table.

        Raises UserError for a recipe that cannot be planned, before anything is measured, and for assumptions about GPUs where this
        machine is measured.
        """
        data = recipe.data
        # A plan could do without the template, but a run cannot.
        if data.chat_template is not None and not os.path.isfile(os.path.expanduser(data.chat_template)):
            raise UserError(
                f"data.chat_template is {one_line(data.chat_template)}, but there is no such file: check the path."
            )
        target, sources, conversations = read_target(recipe), _local(recipe, "data.sources", data.sources), None
        if sources is not None:
            conversations = load_conversations(sources, split=data.split, slice=data.slice, limit=data.limit)
        samples = data.limit if conversations is None else len(conversations)
        if samples is None:
            raise UserError(
                "data.limit is null and the data are not local files, so nobody knows how many conversations there are: add "
                "--data.limit N."
            )
        if data.heldout >= samples:
            raise UserError(
                f"data.heldout is {data.heldout} but there are only {samples} conversations: lower it or add data."
            )
        if not {"prompt", "answer"} <= asked.keys():
            asked = lengths_at_hand(recipe, target.shape, conversations) | {**asked}
        prompts: Mapping[str, int] = UNCOUNTED
        if (sources := _local(recipe, "evaluate.prompts", recipe.evaluate.prompts)) is not None:
            prompts = Counter(conversation.slice for conversation in load_conversations(sources))
        found = cls(target, device, samples, prompts, asked)
        estimate = found.estimate(recipe)
        found = replace(found, head=estimate.head)
        if not device.measured:
            return found
        if option := next((name for name in ("gpus", "utilisation") if name in asked), None):
            raise UserError(
                f"--{option} is {asked[option]:g}, but this machine is measured as it is: leave --{option} out, or name GPUs of the "
                "table with --device."
            )
        return replace(found, device=measure_device(recipe, target, estimate))

    def estimate(self, recipe: Recipe) -> Estimate:
        """Return the plan of the recipe, or of one that asks for less."""
        given = replace(assume(recipe, self.target.shape, self.device), **self.asked)
        # What cuts the answers that a head learns from does not cut those that it is measured on.
        given = replace(given, evaluated=self.asked.get("answer", given.evaluated))
        if recipe.answers.regenerate:
            given = replace(given, answer=min(given.answer, recipe.answers.max_new_tokens))
        samples, most = min(self.samples, recipe.data.limit or self.samples), recipe.evaluate.per_slice
        prompts = {name: min(count, most or count) for name, count in self.prompts.items()}
        return make_estimate(recipe, self.target.shape, round(samples * given.texts), given, prompts, self.head)


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
    head = head or HeadCost(recipe.method, recipe.head, target, recipe.target.path, recipe.train.lora_rank)
    return Estimate(recipe, target, head, samples, given, prompts)


def assume(recipe: Recipe, target: TargetShape, device: Device) -> Assumptions:
    """Assume answers of half of answers.max_new_tokens after prompts of a quarter of data.max_length, at 40% of the peak, and in the
    evaluation of half of its own max_new_tokens."""
    longest = _longest(recipe, target)
    answer = min(recipe.answers.max_new_tokens // 2, longest // 2)
    return Assumptions(device, 1, 0.4, longest // 4, answer, max(1, recipe.evaluate.max_new_tokens // 2))


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


def lengths_at_hand(
    recipe: Recipe, target: TargetShape, conversations: Sequence[Conversation] | None
) -> dict[str, Any]:
    """Return the mean tokens of some prompts of all the data, as far as they fit beside an answer, and of the answers, by the names of Assumptions:
    those in the data where the target does not answer, else those of the run where it has, and the texts of a conversation. What is not known is left out."""
    spec, longest, found = recipe.data, _longest(recipe, target), dict[str, int]()
    path = recipe.data_path / "run.json"
    if recipe.answers.regenerate and path.exists():
        inputs, facts = read_stage(path, "answers")
        count, tokens = facts.get("answers"), facts.get("output_tokens")
        alike = inputs.get("answers.max_new_tokens") == recipe.answers.max_new_tokens
        if alike and type(count) is type(tokens) is int and count > 0:
            found["answer"] = min(max(1, round(tokens / count)), longest - longest // 4)
    if conversations is None:
        return found
    some = conversations[
        :: -(-len(conversations) // _SAMPLED)
    ]  # of every source, which may be read one after the other
    try:
        tokenizer = load_tokenizer(_at_hand(recipe), recipe.target.trust_remote_code, spec.chat_template)
        if recipe.answers.regenerate:
            prompts = prepare_prompts(
                tokenizer,
                some,
                max_new_tokens=lambda slice_name: recipe.answers.max_new_tokens,
                max_length=longest,
                template=spec.template,
                refusals=Refusals(spec.on_refused),
                warn=lambda text: None,
            )
            least = found.get("answer", min(recipe.answers.max_new_tokens // 2, longest // 2))
            return found | {"prompt": min(round(mean(len(prompt.ids) for prompt in prompts)), longest - least)}
        samples = tokenize_all(
            tokenizer,
            some,
            max_length=longest,
            on_too_long=spec.on_too_long,
            on_refused=spec.on_refused,
            template_kwargs=spec.template,
            warn=lambda text: None,
        ).samples
    except UserError:  # which the run will say; a plan needs the config alone
        return found
    answer = max(1, round(mean(int(sample.mask.sum()) for sample in samples)))
    prompt = max(1, round(mean(len(sample.ids) for sample in samples)) - answer)
    # Conversations that are too long are counted as others are.
    return {"answer": answer, "prompt": prompt, "texts": max(1.0, len(samples) / len(some))}


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
