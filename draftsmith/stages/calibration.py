"""The answers that a static tree is searched on: the run's own held-out ones, or new ones to the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.eval.decode.answers import Request
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.heads.target.target import Target
from draftsmith.stages.options import TreeOptions
from draftsmith.stages.session import Session, say
from draftsmith.stages.stages import load_samples, split_samples

NEW_ANSWERS = 300
"""Answers made for sampling settings that the run has none of."""


@dataclass(frozen=True)
class Calibration:
    """samples: answers that the head was not trained on. sampling: the settings they follow. source: where they come from,
    in words."""

    samples: list[Tokenized]
    sampling: Sampling
    source: str


def calibrate(session: Session, target: Target, asked: TreeOptions) -> Calibration:
    """Return the run's held-out answers, or for another temperature new ones by `target` to some of their prompts.

    Raises UserError where the run has no answers, or where the head may have been trained on them.
    """
    own = session.recipe.answers.sampling
    sampling = own if asked.temperature is None else session.recipe.evaluate.sampling(asked.temperature)
    heldout = _held_out(session, asked)
    if sampling == own:
        where = session.recipe.data_path / "answers.jsonl" if session.recipe.answers.regenerate else "the data"
        return Calibration(heldout, sampling, f"held-out answers of {where}")
    # Evenly over the data, so that every slice has its share.
    count = min(NEW_ANSWERS, len(heldout))
    prompts = [heldout[i * len(heldout) // count] for i in range(count)]
    say(
        f"search-tree: the run has no answers for these settings; the target answers {count} of its held-out prompts at "
        f"temperature {sampling.temperature:g}"
    )
    return Calibration(_answer(session, target, prompts, sampling), sampling, "new answers to held-out prompts")


def _held_out(session: Session, asked: TreeOptions) -> list[Tokenized]:
    recipe = session.recipe
    if recipe.answers.regenerate:
        # Here the answers are looked up, never made: that takes as long as a training.
        record = session.directory("answers").record("answers")
        if record is None or record.state != "done":
            raise UserError(
                f"There are no finished answers in {recipe.data_path} to search a tree on: run `draftsmith train` or "
                "`draftsmith regenerate` with this recipe first."
            )
    trained = session.run.record("train") if asked.head is None else None
    count = trained.inputs.get("data.heldout", recipe.data.heldout) if trained else recipe.data.heldout
    if recipe.data.heldout > count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout}, but the head was trained with {count}, so it has seen some of these answers: "
            f"set it to {count}."
        )
    samples = load_samples(session).samples
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
