"""The texts of a drafter: counted and simulated, compared with the target's own, and judged where a lossy decoder or a tuned
target changes them.

Shapes: B rows, L tokens, R answer tokens, V target vocab.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from math import exp
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.answers import Generation, Request, Tally, tally_generation, total
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling, penalize
from draftsmith.errors import UserError
from draftsmith.eval.clocks.turns import Repeats
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.eval.simulate.answers import answer_in_parts
from draftsmith.eval.simulate.texts import Simulation, target_passes, to_sample
from draftsmith.foreign.records import Journal
from draftsmith.foreign.text import parse_json
from draftsmith.progress import Bar
from draftsmith.target.target import Target

Judge = Callable[[Generation], Mapping[str, bool]]
"""What can be told of an answer: see `judge_answer`."""

_PIECE = 1024
"""Tokens whose logits are there at once."""
_COUNTS = {"exact_match": "referenced", "valid_json": "json_answers"}
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)

Fields = Mapping[str, Mapping[str, Any]]
"""Fields of `Measures` per slice and as "overall"."""


@dataclass(frozen=True)
class Text:
    """An answer with its decoded tally, None where it was only simulated, and its simulated tallies for K = 1, 2, ..., and for the
    `budgets` of its drafter."""

    generation: Generation
    decoded: Tally | None
    simulated: Sequence[Tally]
    by_budget: Sequence[Tally] = ()


@dataclass(frozen=True)
class Texts:
    """The answers that acceptance is counted on; off_text: see `simulate.Acceptance`. fields: what else was measured of them."""

    texts: list[Text]
    off_text: int = 0
    fields: Fields = field(default_factory=dict)

    def with_fields(self, more: Fields) -> "Texts":
        """Return the same with more fields."""
        scopes = dict.fromkeys((*self.fields, *more))
        return replace(self, fields={name: {**self.fields.get(name, {}), **more.get(name, {})} for name in scopes})


def collect_texts(
    target: Target,
    system: SystemUnderTest,
    timings: Mapping[str, Repeats],
    sampling: Sampling,
    originals: "Originals | None" = None,
) -> Texts:
    """Return the distinct answers of a drafter, counted and, where that is possible, simulated by the target that
    verifies them. originals: what those that do not follow the distribution of `target` are held against."""
    generations = distinct(timings[system.name], sampling)
    texts = count_texts(system.verified_by(target), system, generations, sampling, system.max_k)
    if originals is None or (system.verifier is None and system.lossless):
        return texts
    return texts.with_fields(originals.changed_by(system, generations))


def count_texts(
    own: Target, system: SystemUnderTest, generations: Sequence[Generation], sampling: Sampling, max_k: int
) -> Texts:
    """Count a drafter's answers, and simulate them up to `max_k` where that is possible. own: the target that verifies its drafts."""
    nothing: list[list[Tally]] = [[]] * len(generations)
    found = Simulation(nothing, 0, nothing)
    if system.simulate is not None:
        found = system.simulate(own, generations, sampling, max_k)
    decoded = (tally_generation(generation, system.num_speculative_tokens) for generation in generations)
    parts = zip(generations, decoded, found.tallies, found.by_budget, strict=True)
    return Texts([Text(*one) for one in parts], found.off_text)


@dataclass(frozen=True)
class Originals:
    """The target's own texts, against which those of drafters that change them are held. judge: see `judge_answer`."""

    target: Target
    generations: Sequence[Generation]
    judge: Judge

    @cached_property
    def perplexity(self) -> dict[str, float]:
        """That of the texts under the target, per slice and as "overall"."""
        return perplexities(self.target, self.generations)

    def changed_by(self, system: SystemUnderTest, generations: Sequence[Generation]) -> Fields:
        """Return what the target makes of the texts of a drafter."""
        own, theirs = self.perplexity, perplexities(self.target, generations)
        fields = {key: {"perplexity": theirs[key], "perplexity_baseline": own[key]} for key in own}
        if system.verifier is not None:
            change = compare_targets(self.target, system.verifier, self.generations)
            fields = {key: {**fields[key], **change[key]} for key in fields}
        judged = judged_shares(generations, self.generations, self.judge)
        return {key: {**values, **judged.get(key, {})} for key, values in fields.items()}


def distinct(repeats: Repeats, sampling: Sampling) -> list[Generation]:
    """One repeat's answers when greedy (all repeats are alike), else those of all repeats."""
    return [g for repeat in repeats[: 1 if sampling.greedy else None] for d in repeat for g in d.generations]


def check_lossless(
    target: Target,
    systems: Sequence[SystemUnderTest],
    requests: Sequence[Request],
    greedy: Sampling,
    journal: Journal | None = None,
) -> dict[str, dict[str, Lossless]]:
    """Decode every request greedily with and without each draft, by the target that verifies it; return by name what
    `compare_texts` does.

    Run it with target and head in float32: there every token must agree. greedy: a setting of temperature 0, as its
    repetition penalty counts there too. journal: the answers of an interrupted check. Shows a bar.
    """
    journal = journal or Journal()
    count = len(requests) * (len(systems) + len({c.verified_by(target) for c in systems}))
    with Bar(total=count, desc="greedy equality in float32", unit="answer") as bar:

        def answer(own: Target, name: str, drafter: Drafter) -> list[Generation]:
            part = f"equality in {own.dtype_name}/{own.fingerprint}/{name}"
            return answer_in_parts(own, drafter, requests, greedy, journal, part, rows=1, size=1, bar=bar)

        alone: dict[Target, Sequence[Generation]] = {}
        compared = {}
        for c in systems:
            k, own = c.num_speculative_tokens, c.verified_by(target)
            if own not in alone:
                alone[own] = answer(own, "", TargetAlone())
            texts = count_texts(own, c, answer(own, c.name, c.make(k)), greedy, k).texts
            compared[c.name] = compare_texts(own, alone[own], texts, k, greedy)
    return compared


def compare_texts(
    target: Target, alone: Sequence[Generation], texts: Sequence[Text], num_speculative_tokens: int, greedy: Sampling
) -> dict[str, Lossless]:
    """Compare a drafter's greedy answers with those of the target alone to the same requests, per slice and as "overall"."""
    penalty, k = greedy.repetition_penalty, num_speculative_tokens
    divergences = [_first_divergence(target, a, t.generation, penalty) for a, t in zip(alone, texts, strict=True)]
    scopes = {"overall": list(range(len(alone)))}
    for i, generation in enumerate(alone):
        scopes.setdefault(generation.request.slice, []).append(i)
    compared = {}
    for name, indices in scopes.items():
        apart = tuple(d for i in indices if (d := divergences[i]) is not None)
        some = [texts[i] for i in indices]
        # Where nothing was simulated an empty tally gives None.
        tau = total((t.decoded for t in some if t.decoded is not None), k).tau
        tau_simulated = total((t.simulated[k - 1] for t in some if t.simulated), k).tau
        equal = len(indices) - len(apart)
        compared[name] = Lossless(target.dtype_name, len(indices), equal, apart, tau, tau_simulated)
    return compared


def _first_divergence(
    target: Target, expected: Generation, got: Generation, repetition_penalty: float
) -> Divergence | None:
    """Return where two answers part, with the gap there of the target's logits, penalised as they were compared."""
    if expected.output_ids == got.output_ids:
        return None
    pairs = zip(expected.output_ids, got.output_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert position is not None, "two answers can only differ in length where they differ in a token"
    prefix = [*expected.request.prompt_ids, *expected.output_ids[:position]]
    ids = torch.tensor([prefix], device=target.device)
    logits_V = target.head.logits(target.forward(ids).last[0, -1])
    seen_V = torch.zeros_like(logits_V, dtype=torch.bool).index_fill_(0, ids[0], True)
    logits_V = penalize(logits_V, seen_V, repetition_penalty)
    a, b = expected.output_ids[position], got.output_ids[position]
    request = expected.request
    return Divergence(request.sample_id, request.slice, position, a, b, float(logits_V[a] - logits_V[b]))


def perplexities(target: Target, generations: Sequence[Generation]) -> dict[str, float]:
    """Return exp of the mean -log p per answer token, per slice and as "overall"; p is the target's distribution at temperature 1.

    A repetitive text has a low perplexity too: compare with the target's own texts at the same sampling setting.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for generation, ids_R, logits_RV in _answer_logits(target, generations):
        losses_R = torch.nn.functional.cross_entropy(logits_RV, ids_R, reduction="none")
        _add(sums, generation, [float(losses_R.double().sum()), len(ids_R)])
    return {scope: exp(total / count) for scope, (total, count) in sums.items() if count}


def compare_targets(original: Target, tuned: Target, generations: Sequence[Generation]) -> Fields:
    """Let two targets read the same answers; return how their distributions differ, per slice and as "overall".

    agreement: the share of tokens where the likeliest choice of both is the same. kl: the mean KL(original || tuned), in nats.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    pairs = zip(_answer_logits(original, generations), _answer_logits(tuned, generations), strict=True)
    for (generation, _, ours_RV), (*_, theirs_RV) in pairs:
        log_p_RV, log_q_RV = ours_RV.double().log_softmax(-1), theirs_RV.double().log_softmax(-1)
        apart_R = (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)
        same = (ours_RV.argmax(-1) == theirs_RV.argmax(-1)).sum()
        _add(sums, generation, [float(same), float(apart_R.sum()), len(apart_R)])
    counted = {scope: values for scope, values in sums.items() if values[2]}
    return {scope: {"agreement": same / n, "kl": apart / n} for scope, (same, apart, n) in counted.items()}


def _add(sums: dict[str, list[float]], generation: Generation, values: Sequence[float]) -> None:
    """Add an answer's values to its slice's and to those of all."""
    for scope in ("overall", generation.request.slice):
        sums[scope] = [a + b for a, b in zip(sums[scope], values, strict=True)]


@torch.no_grad()
def _answer_logits(target: Target, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Tensor, Tensor]]:
    """Yield the answers, shortest first, in pieces: each with R of its ids [R] and the logits [R, V] from which the target would have
    chosen them."""
    order = sorted(generations, key=lambda g: len(g.output_ids))
    for indices, batch in target_passes(target, [to_sample(g) for g in order]):
        for row, index in enumerate(indices):
            first = len(order[index].request.prompt_ids)
            last = first + len(order[index].output_ids) - 1
            ids, states = batch.ids[row, first : last + 1], batch.last[row, first - 1 : last]
            for ids_R, states_RD in zip(ids.split(_PIECE), states.split(_PIECE), strict=True):
                yield order[index], ids_R, target.head.logits(states_RD)


def judge_answer(answer: str, slice_name: str, reference: Any = None) -> dict[str, bool]:
    """Return what can be told of an answer, without its thought, by the name of the measure.

    exact_match: whether it is the reference, where there is one: its last number is that number, its JSON that object or list, or
    else the whole text is the same, whatever its case and white space. valid_json: whether it is an object or a list in JSON, in
    whole or in its last code block; of slices with the word json in their name.
    """
    judged = {} if reference is None else {"exact_match": _is_right(answer, reference)}
    if "json" in re.split("[^a-z]+", slice_name.casefold()):
        judged["valid_json"] = isinstance(_json_of(answer), dict | list)
    return judged


def _is_right(answer: str, reference: Any) -> bool:
    if isinstance(reference, dict | list):
        return _json_of(answer) == reference
    text = str(reference).strip()
    if _NUMBER.fullmatch(text):
        numbers = [Decimal(number.replace(",", "")) for number in (*_NUMBER.findall(answer)[-1:], text)]
        return len(numbers) == 2 and numbers[0] == numbers[1]
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


def _json_of(answer: str) -> Any:
    """Return the JSON in an answer, which may stand in a code block; None where there is none."""
    fenced = _FENCE.findall(answer)
    try:
        return parse_json((fenced[-1] if fenced else answer).strip(), "the answer", "")
    except UserError:
        return None
