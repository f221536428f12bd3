"""Check greedy losslessness: the same ids with and without a draft, and the same tau decoded and simulated."""

from collections.abc import Sequence

import torch

from draftsmith.decoder.answers import Generation, Request, Tally, tally_generation, total
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling, penalize
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.eval.simulate.answers import answer_in_parts
from draftsmith.foreign.journal import Journal
from draftsmith.progress import Bar
from draftsmith.target.target import Target

GREEDY = Sampling()


def check_lossless(
    target: Target,
    systems: Sequence[SystemUnderTest],
    requests: Sequence[Request],
    greedy: Sampling = GREEDY,
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
            drafted = answer(own, c.name, c.make(k))
            simulation = c.simulate(own, drafted, greedy, k) if c.simulate is not None else None
            simulated = [by_k[k - 1] for by_k in simulation.tallies] if simulation is not None else None
            tallies = [tally_generation(g, k) for g in drafted]
            compared[c.name] = compare_texts(own, alone[own], drafted, tallies, simulated, k, greedy)
    return compared


def compare_texts(
    target: Target,
    alone: Sequence[Generation],
    drafted: Sequence[Generation],
    decoded: Sequence[Tally],
    simulated: Sequence[Tally] | None,
    num_speculative_tokens: int,
    greedy: Sampling = GREEDY,
) -> dict[str, Lossless]:
    """Compare answers to the same requests at `greedy`, per slice and as "overall". simulated: None where not known."""
    penalty, k = greedy.repetition_penalty, num_speculative_tokens
    divergences = [_first_divergence(target, a, b, penalty) for a, b in zip(alone, drafted, strict=True)]
    scopes = {"overall": list(range(len(alone)))}
    for i, generation in enumerate(alone):
        scopes.setdefault(generation.request.slice, []).append(i)
    compared = {}
    for name, indices in scopes.items():
        apart = tuple(d for i in indices if (d := divergences[i]) is not None)
        tau, tau_simulated = (
            None if tallies is None else total((tallies[i] for i in indices), k).tau for tallies in (decoded, simulated)
        )
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
