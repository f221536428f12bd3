"""Check greedy losslessness: the same ids with and without a draft, and the same tau decoded and simulated."""

from collections.abc import Sequence

import torch

from draftsmith.decoder.answers import Generation, Request, total
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling, penalize
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.measure import Text, count_texts
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.eval.simulate.answers import answer_in_parts
from draftsmith.foreign.records import Journal
from draftsmith.progress import Bar
from draftsmith.target.target import Target


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
    target: Target,
    alone: Sequence[Generation],
    texts: Sequence[Text],
    num_speculative_tokens: int,
    greedy: Sampling,
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
