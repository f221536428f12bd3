"""The stage that lets the target answer the prompts of the data, and the samples that the head learns from."""

import time
from pathlib import Path
from typing import Any

from draftsmith.data.answers.generate import read_answers, regenerate
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.masks import TokenizedSet, tokenize_all
from draftsmith.data.conversations.prompts import prepare_prompts
from draftsmith.fields import fingerprint_fields
from draftsmith.stages.session import Session, say


def answer_inputs(session: Session) -> dict[str, Any]:
    """Return what the answers depend on, as run.json records it."""
    recipe = session.recipe
    # Sources count by what they say, not by where they lie; the rest matters to later stages only.
    elsewhere = ("sources", "split", "slice", "limit", "heldout", "on_too_long")
    return {
        "conversations": session.conversations_digest,  # first: a wrong path is reported before the target is loaded
        "target": session.target.fingerprint,
        "target.dtype": session.target.dtype_name,
        "eos": list(session.target.eos_ids),
        "tokenizer": session.tokenizer_digest,
        "data": fingerprint_fields(recipe.data, elsewhere),
        "answers": fingerprint_fields(recipe.answers),
        "seed": recipe.seed,
    }


def answers_stage(session: Session) -> Path | None:
    """Let the target answer the prompts and return the file; None where the recipe takes the answers in the data."""
    recipe, spec = session.recipe, session.recipe.answers
    if not spec.regenerate:
        return None
    path = answers_file(session)
    if session.begin("answers", answer_inputs(session)):
        return path
    prompts = prepare_prompts(
        session.tokenizer,
        session.conversations,
        max_new_tokens=lambda slice_name: spec.max_new_tokens,
        max_length=min(recipe.data.max_length, session.target.context_length),
        template=recipe.data.template,
    )
    say(f"answers: {len(prompts)} of {len(session.conversations)} prompts, at temperature {spec.temperature}")
    started = time.perf_counter()
    regenerate(
        session.target,
        session.tokenizer,
        prompts,
        path,
        sampling=spec.sampling,
        seed=recipe.seed,
        batch=spec.batch,
    )
    seconds = time.perf_counter() - started
    facts = _count(read_answers(path).samples) | {"seconds": seconds}
    session.finish("answers", facts)
    say(f"answers: {facts['answers']} answers, {facts['output_tokens']} tokens in {seconds:.0f} s, {path}")
    return path


def answers_file(session: Session) -> Path:
    """Return the file of the target's answers, whether it is there or not."""
    return session.recipe.data_path / "answers.jsonl"


def _count(samples: list[Tokenized]) -> dict[str, Any]:
    """Count answers and tokens, and the share of distinct answers per slice."""
    slices: dict[str, list[tuple[int, ...]]] = {}
    for sample in samples:
        slices.setdefault(sample.slice, []).append(tuple(sample.ids[sample.mask].tolist()))
    return {
        "answers": len(samples),
        "output_tokens": sum(int(s.mask.sum()) for s in samples),
        "distinct_share": {name: len(set(texts)) / len(texts) for name, texts in sorted(slices.items())},
    }


def load_samples(session: Session, answers: Path | None) -> list[Tokenized]:
    """Return the samples that the head learns from, and say what was left out; makes nothing.

    answers: the file that `answers_stage` returned; None tokenizes the conversations of the data as they are.
    """
    data = session.recipe.data
    limit = min(data.max_length, session.target.context_length)
    if answers is None:
        found = _tokenize(session, None, limit)
    else:
        found = read_answers(answers, max_length=limit, on_too_long=data.on_too_long)
    say(f"data: {found.stats}")
    return found.samples


def samples_at_hand(session: Session, count: int) -> list[Tokenized]:
    """Return at most `count` samples to look at, and say what was left out; makes nothing.

    They are the recipe's own answers where these are finished, else the first conversations of the data.
    """
    if session.recipe.answers.regenerate and session.data.holds("answers", answer_inputs(session)):
        return load_samples(session, answers_file(session))[:count]
    found = _tokenize(session, count, session.recipe.data.max_length)
    say(f"data: {found.stats}")
    return found.samples[:count]


def _tokenize(session: Session, count: int | None, limit: int) -> TokenizedSet:
    data = session.recipe.data
    return tokenize_all(
        session.tokenizer,
        session.conversations[:count],
        max_length=limit,
        on_too_long=data.on_too_long,
        template_kwargs=data.template,
    )
