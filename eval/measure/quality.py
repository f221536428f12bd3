"""Measure how a lossy decoder or a tuned target changes texts: by perplexity, by how far distributions differ, by
references, by whether JSON is valid.

Shapes: B rows, L tokens, R answer tokens, V target vocab.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import exp
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.answers import Generation
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import target_passes, to_sample
from draftsmith.foreign.text import parse_json
from draftsmith.target.target import Target

Judge = Callable[[Generation], Mapping[str, bool]]
"""What can be told of an answer: see `judge_answer`."""

_COUNTS = {"exact_match": "referenced", "valid_json": "json_answers"}

_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Change:
    """agreement: share of answer tokens where two targets' likeliest choice is the same. kl: mean KL(one || other), in nats."""

    agreement: float
    kl: float


def perplexities(target: Target, generations: Sequence[Generation]) -> dict[str, float]:
    """Return exp of the mean -log p per answer token, per slice and as "overall"; p is the target's distribution at temperature 1.

    A repetitive text has a low perplexity too: compare with the target's own texts at the same sampling setting.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for generation, logits_RV in _answer_logits(target, generations):
        ids_R = torch.tensor(generation.output_ids, device=logits_RV.device)
        losses_R = torch.nn.functional.cross_entropy(logits_RV, ids_R, reduction="none")
        _add(sums, generation, [float(losses_R.double().sum()), len(ids_R)])
    return {scope: exp(total / count) for scope, (total, count) in sums.items() if count}


def compare_targets(original: Target, tuned: Target, generations: Sequence[Generation]) -> dict[str, Change]:
    """Let two targets read the same answers; return how their distributions differ, per slice and as "overall"."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    pairs = zip(_answer_logits(original, generations), _answer_logits(tuned, generations), strict=True)
    for (generation, ours_RV), (_, theirs_RV) in pairs:
        log_p_RV, log_q_RV = ours_RV.double().log_softmax(-1), theirs_RV.double().log_softmax(-1)
        apart_R = (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)
        same = (ours_RV.argmax(-1) == theirs_RV.argmax(-1)).sum()
        _add(sums, generation, [float(same), float(apart_R.sum()), len(apart_R)])
    return {scope: Change(same / count, apart / count) for scope, (same, apart, count) in sums.items() if count}


def _add(sums: dict[str, list[float]], generation: Generation, values: Sequence[float]) -> None:
    """Add an answer's values to its slice's and to those of all."""
    for scope in ("overall", generation.request.slice):
        sums[scope] = [a + b for a, b in zip(sums[scope], values, strict=True)]


@torch.no_grad()
def _answer_logits(target: Target, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Tensor]]:
    """Yield each answer with the logits [R, V] from which the target would have chosen its tokens, shortest first."""
    order = sorted(generations, key=lambda g: len(g.output_ids))
    for indices, batch in target_passes(target, [to_sample(g) for g in order]):
        for row, index in enumerate(indices):
            first = len(order[index].request.prompt_ids)
            last = first + len(order[index].output_ids) - 1
            yield order[index], target.head.logits(batch.last[row, first - 1 : last])


def judge_answer(answer: str, slice_name: str, reference: Any = None, closes: str = "</think>") -> dict[str, bool]:
    """Return what can be told of an answer, its thought up to the mark that `closes` it left out, by the name of the measure.

    exact_match: whether it is the reference, where there is one: its last number is that number, its JSON that object or list, or
    else the whole text is the same, whatever its case and white space. valid_json: whether it is an object or a list in JSON, in
    whole or in its last code block; of slices with the word json in their name.
    """
    answer = answer.rpartition(closes)[2]
    judged = {} if reference is None else {"exact_match": _is_right(answer, reference)}
    if "json" in re.split("[^a-z]+", slice_name.casefold()):
        judged["valid_json"] = isinstance(_json_of(answer), dict | list)
    return judged


def _is_right(answer: str, reference: Any) -> bool:
    if isinstance(reference, dict | list):
        return _json_of(answer) == reference
    text = str(reference).strip()
    if _NUMBER.fullmatch(text):
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and _value(numbers[-1]) == _value(text)
    return answer.casefold().split() == text.casefold().split()


def judged_shares(
    generations: Sequence[Generation], originals: Sequence[Generation], judge: Judge
) -> dict[str, dict[str, float]]:
    """Return fields of `Measures` per slice and as "overall": for each measure the shares of these generations and of the target's
    own for which it holds, and of how many of the first it can be told."""
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for ending, answers in (("", generations), ("_baseline", originals)):
        judged: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for generation in answers:
            for measure, holds in judge(generation).items():
                for scope in ("overall", generation.request.slice):
                    judged[scope, measure].append(holds)
        for (scope, measure), held in judged.items():
            shares[scope][measure + ending] = sum(held) / len(held)
            if not ending:
                shares[scope][_COUNTS[measure]] = len(held)
    return dict(shares)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _json_of(answer: str) -> Any:
    """Return the JSON in an answer, which may stand in a code block; None where there is none."""
    fenced = _FENCE.findall(answer)
    try:
        return parse_json((fenced[-1] if fenced else answer).strip(), "the answer", "")
    except UserError:
        return None
