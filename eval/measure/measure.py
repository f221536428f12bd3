"""Evaluate at one sampling setting: simulate the texts that were decoded in turns, and summarize both.

Shapes: K speculative tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from draftsmith.decoder.answers import Decoded, Generation, Tally, tally_generation, total
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.turns import Repeats
from draftsmith.eval.drafters.generate_baseline import Timed
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.quality import Judge, compare_targets, judged_shares, perplexities
from draftsmith.eval.results.bootstrap import Text, bootstrap_tau, is_looping, mean_tau, sampling_error
from draftsmith.eval.results.conditions import acceptance_by_condition
from draftsmith.eval.results.result import (
    Costs,
    DrafterResult,
    Lossless,
    Measures,
    MsPerRound,
    Percentiles,
    Pick,
    PromptSums,
    SweepPoint,
)
from draftsmith.eval.simulate.texts import Simulation
from draftsmith.target.target import Target

_DECODE_PARTS = ("draft", "verify", "commit", "other")


@dataclass(frozen=True)
class Texts:
    """The answers that acceptance is counted on; off_text: see `simulate.Acceptance`.

    changed: of texts that do not follow the target's distribution, see `measure_change`.
    """

    texts: list[Text]
    off_text: int = 0
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def collect_texts(
    target: Target,
    system: SystemUnderTest,
    timings: Mapping[str, Repeats],
    sampling: Sampling,
    judge: Judge = lambda generation: {},
) -> Texts:
    """Return the distinct answers of a drafter, counted and, where that is possible, simulated by the target that
    verifies them; those that do not follow the distribution of `target` are read by it as well, and judged."""
    generations = _distinct(timings[system.name], sampling)
    simulation = Simulation([[] for _ in generations], off_text=0)
    if system.simulate is not None:
        simulation = system.simulate(system.verified_by(target), generations, sampling, system.max_k)
    texts = [
        Text(generation, tally_generation(generation, system.num_speculative_tokens), simulated)
        for generation, simulated in zip(generations, simulation.tallies, strict=True)
    ]
    changed = {}
    if system.verifier is not None or not system.lossless:
        changed = measure_change(target, system, generations, _distinct(timings[""], sampling), judge)
    return Texts(texts, simulation.off_text, changed)


def measure_change(
    target: Target,
    system: SystemUnderTest,
    generations: Sequence[Generation],
    originals: Sequence[Generation],
    judge: Judge,
) -> dict[str, dict[str, float]]:
    """Return what `target`, whose own texts are `originals`, makes of the texts of a drafter that changes them: fields of
    `Measures`, per slice and as "overall"."""
    own, theirs = perplexities(target, originals), perplexities(target, generations)
    found = {key: {"perplexity": theirs[key], "perplexity_baseline": own[key]} for key in own}
    if system.verifier is not None:
        change = compare_targets(target, system.verifier, originals)
        found = {key: {**found[key], **asdict(change[key])} for key in found}
    judged = judged_shares(generations, originals, judge)
    return {key: {**values, **judged.get(key, {})} for key, values in found.items()}


def _distinct(repeats: Repeats, sampling: Sampling) -> list[Generation]:
    """One repeat's answers when greedy (all repeats are alike), else those of all repeats."""
    return [g for repeat in repeats[: 1 if sampling.greedy else None] for d in repeat for g in d.generations]


def of_slice(repeats: Repeats, slice_name: str | None) -> Repeats:
    """Return each repeat's groups of one slice (None: of all)."""
    return [[d for d in repeat if slice_name in (None, d.generations[0].request.slice)] for repeat in repeats]


def summarize(
    system: SystemUnderTest,
    found: Texts,
    timings: Mapping[str, Repeats],
    costs: Costs,
    lossless: Mapping[str, Lossless],
    lossless_timed: Mapping[str, Lossless],
    generate: Sequence[Sequence[Timed]],
    thought_of: Callable[[Generation], int] = lambda generation: 0,
) -> DrafterResult:
    """Return one drafter's measures over everything and per slice. thought_of: the tokens of an answer that are thought."""

    k = system.num_speculative_tokens
    prompts = sum_prompts((t.generation, t.decoded, t.simulated[k - 1] if t.simulated else None) for t in found.texts)

    def scope(slice_name: str | None) -> Measures:
        key = slice_name or "overall"
        chosen = [t for t in found.texts if slice_name in (None, t.generation.request.slice)]
        drafted, alone = (of_slice(timings[name], slice_name) for name in (system.name, ""))
        timed = [[g for g in repeat if slice_name in (None, g.request.slice)] for repeat in generate]
        some = [p for p in prompts.values() if slice_name in (None, p.slice)]
        measures = _measures(system, chosen, some, drafted, alone, costs, timed, thought_of)
        return replace(
            measures, lossless=lossless.get(key), lossless_timed=lossless_timed.get(key), **found.changed.get(key, {})
        )

    slices = dict.fromkeys(t.generation.request.slice for t in found.texts)
    return DrafterResult(scope(None), {slice_name: scope(slice_name) for slice_name in slices}, system.info, prompts)


def sum_prompts(answers: Iterable[tuple[Generation, Tally | None, Tally | None]]) -> dict[str, PromptSums]:
    """Return what each prompt adds to tau, by its id. answers: with their tallies, decoded and simulated."""
    found: dict[str, PromptSums] = {}
    for generation, decoded, simulated in answers:
        request, tally = generation.request, decoded or simulated
        assert tally is not None
        so_far = found.get(request.sample_id, PromptSums(request.slice, 0.0, 0.0, 0.0))
        found[request.sample_id] = PromptSums(
            request.slice,
            so_far.tokens + tally.tokens,
            None if decoded is None or so_far.rounds is None else so_far.rounds + decoded.rounds,
            None
            if simulated is None or so_far.rounds_simulated is None
            else so_far.rounds_simulated + simulated.rounds,
        )
    return found


def pairs_of(prompts: Iterable[PromptSums], *, simulated: bool) -> list[tuple[float, float]]:
    """Return tokens and rounds of each prompt, as `bootstrap_tau` takes them; 0 rounds where nothing was counted."""
    return [(p.tokens, (p.rounds_simulated if simulated else p.rounds) or 0.0) for p in prompts]


def _measures(
    system: SystemUnderTest,
    texts: Sequence[Text],
    prompts: Sequence[PromptSums],
    repeats: Repeats,
    baseline: Repeats,
    costs: Costs,
    generate: Sequence[Sequence[Timed]],
    thought_of: Callable[[Generation], int],
) -> Measures:
    name, k = system.name, system.num_speculative_tokens
    decoded = total((t.decoded for t in texts), k)
    # Where nothing is simulated an empty tally gives nulls.
    simulated = total((t.simulated[k - 1] for t in texts if t.simulated), k)
    pairs = [(a, b) for a, b in zip(map(_tok_s, repeats), map(_tok_s, baseline), strict=True) if a and b]
    speeds, base_speeds = [a for a, _ in pairs], [b for _, b in pairs]
    ratios = [a / b for a, b in pairs]
    groups, base_groups = ([d for repeat in of for d in repeat] for of in (repeats, baseline))
    single = all(len(d.generations) == 1 for d in groups)
    tau = decoded.tau
    counted = [(t.generation, t.decoded) for t in texts]
    expected = [(t.generation, t.simulated[k - 1]) for t in texts if t.simulated]
    return Measures(
        prompts=len(prompts),
        tokens=int(decoded.tokens),
        rounds=int(decoded.rounds),
        tau=tau,
        tau_mean_over_prompts=mean_tau(pairs_of(prompts, simulated=False)),
        tau_interval=bootstrap_tau(pairs_of(prompts, simulated=False)),
        tau_simulated=simulated.tau,
        tau_simulated_interval=bootstrap_tau(pairs_of(prompts, simulated=True)),
        tau_difference_se=sampling_error(texts, k) if system.simulate is not None else None,
        acceptance_rate=decoded.acceptance_rate,
        acceptance_at=tuple(decoded.acceptance_at),
        alpha_at=tuple(decoded.alpha_at),
        acceptance_at_simulated=tuple(simulated.acceptance_at) if simulated.rounds else None,
        alpha_at_simulated=tuple(simulated.alpha_at) if simulated.rounds else None,
        **acceptance_by_condition(system.trained_length, thought_of, counted, expected),
        k_sweep=_sweep(system, texts, costs) or None,
        decode_tok_s=_median(speeds),
        decode_tok_s_spread=_spread(speeds),
        baseline_tok_s=_median(base_speeds),
        baseline_tok_s_spread=_spread(base_speeds),
        speedup=_median(ratios),
        speedup_spread=_spread(ratios),
        speedup_vs_generate=_over_generate(repeats, generate),
        baseline_vs_generate=_over_generate(baseline, generate),
        ttft_s=median(g.ttft_s for d in groups for g in d.generations),
        ttft_baseline_s=median(g.ttft_s for d in base_groups for g in d.generations),
        latency_s=_latency(groups),
        latency_baseline_s=_latency(base_groups),
        token_wait_s=_token_wait(groups),
        token_wait_baseline_s=_token_wait(base_groups),
        ms_per_round=_ms_per_round(groups),
        # A batch's rounds are those of its slowest row, which tau does not tell.
        ideal_speedup=costs.speedup(name, k, tau) if tau and single and system.fixed_length else None,
        peak_memory_bytes=_peak(groups),
        peak_memory_baseline_bytes=_peak(base_groups),
        looping=sum(is_looping(t.generation.output_ids) for t in texts) / len(texts) if texts else None,
    )


def _peak(groups: Sequence[Decoded]) -> int | None:
    return max((d.peak_bytes for d in groups if d.peak_bytes is not None), default=None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Sequence[float]) -> "tuple[float, float] | None":
    return (min(values), max(values)) if values else None


def _over_generate(repeats: Repeats, generate: Sequence[Sequence[Timed]]) -> float | None:
    """Decode tok/s over generate's in the same repeat, both on generate's prompts: the median over repeats."""
    ratios = []
    for ours, theirs in zip(repeats, generate, strict=False):
        answered = [g for g in theirs if g.tokens > 0 and g.decode_s > 0]
        names = {g.request.sample_id for g in answered}
        speed = _tok_s([d for d in ours if d.generations[0].request.sample_id in names])
        if speed:
            ratios.append(speed * sum(g.decode_s for g in answered) / sum(g.tokens for g in answered))
    return _median(ratios)


def measure_pick(
    target: Target,
    system: SystemUnderTest,
    drafter: str,
    timings: Mapping[str, Repeats],
    sampling: Sampling,
    beside: str | None = None,
) -> Pick:
    """Return what a draft that took only some turns reached on its prompts; drafter: the name it has in the plan. beside: for a draft
    that took all turns, the name of one that did not: what it reached on the prompts of that one."""
    k, some = system.num_speculative_tokens, timings[system.name if beside is None else beside]
    among = {d.generations[0].request.sample_id for r in some for d in r}
    repeats, alone = (
        [[d for d in r if d.generations[0].request.sample_id in among] for r in timings[name]]
        for name in (system.name, "")
    )
    found = collect_texts(target, system, {**timings, system.name: repeats}, sampling)
    names = {t.generation.request.sample_id for t in found.texts}
    ratios = [a / b for a, b in zip(map(_tok_s, repeats), map(_tok_s, alone), strict=True) if a and b]
    tau = total((t.simulated[k - 1] for t in found.texts if t.simulated), k).tau
    return Pick(drafter, k, len(names), tau, _median(ratios), _spread(ratios))


def _tok_s(batches: Sequence[Decoded]) -> float:
    """Tokens after the first over decode seconds; 0 where nothing was decoded."""
    tokens = sum(len(g.output_ids) - 1 for d in batches for g in d.generations)
    seconds = sum(d.seconds[part] for d in batches for part in _DECODE_PARTS)
    return tokens / seconds if seconds else 0.0


def _ms_per_round(groups: Sequence[Decoded]) -> MsPerRound | None:
    """Mean milliseconds per target pass (all rows of a batch share it)."""
    passes = sum(d.passes for d in groups)
    if not passes:
        return None
    return MsPerRound(**{part: 1000 * sum(d.seconds[part] for d in groups) / passes for part in _DECODE_PARTS})


def _latency(groups: Sequence[Decoded]) -> Percentiles | None:
    """Seconds per request; None in a batch, where a request's own end is not on the clock."""
    if any(len(d.generations) > 1 for d in groups):
        return None
    return _percentiles([sum(d.seconds.values()) for d in groups])


def _token_wait(groups: Sequence[Decoded]) -> Percentiles | None:
    """Seconds per token, as somebody sees them who reads along."""
    return _percentiles([wait for d in groups for g in d.generations for wait in g.waits])


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    return Percentiles(*map(float, np.percentile(values, (50, 95)))) if values else None


def _sweep(system: SystemUnderTest, texts: Sequence[Text], costs: Costs) -> tuple[SweepPoint, ...]:
    points = []
    for k in range(1, min((len(t.simulated) for t in texts), default=0) + 1):
        tally = total((t.simulated[k - 1] for t in texts), k)
        speedup = costs.speedup(system.name, k, tally.tau) if tally.tau and system.fixed_length else None
        points.append(sweep_point(system, k, tally, speedup))
    return tuple(points)


def sweep_point(system: SystemUnderTest, k: int, tally: Tally, speedup: float | None = None) -> SweepPoint:
    """Return what a simulation says of the draft length k."""
    return SweepPoint(k, tally.tau, tally.acceptance_rate if system.counts_drafts else None, speedup)
