"""Measure a drafter on the texts of an evaluation at one sampling setting: what was accepted, what the clocks said.

A number of `Measures` comes from here, or from a step of its own that returns `Fields`. Shapes: K speculative tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from draftsmith.decoder.answers import Decoded, Generation, Tally, total
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.turns import Repeats, Turns
from draftsmith.eval.drafters.baselines import GENERATE
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.texts import Text, Texts, count_texts, distinct
from draftsmith.eval.results.conditions import acceptance_by_condition
from draftsmith.eval.results.intervals import Interval, bootstrap_tau, mean_tau
from draftsmith.eval.results.result import (
    Costs,
    DrafterResult,
    Measures,
    MsPerRound,
    Percentiles,
    Pick,
    PromptSums,
    SweepPoint,
)
from draftsmith.target.target import Target

_DECODE_PARTS = ("draft", "verify", "commit", "other")


def of_slice(repeats: Repeats, slice_name: str | None) -> Repeats:
    """Return each repeat's groups of one slice (None: of all)."""
    return [[d for d in repeat if slice_name in (None, d.generations[0].request.slice)] for repeat in repeats]


def summarize(
    system: SystemUnderTest,
    answers: Texts,
    turns: Turns | None = None,
    costs: Costs | None = None,
    thought_of: Callable[[Generation], int] = lambda generation: 0,
) -> DrafterResult:
    """Return one drafter's measures over everything and per slice.

    turns: that its answers were decoded in, and those of the target alone; None where they were simulated. costs: of single steps.
    thought_of: the tokens of an answer that are thought.
    """
    k = system.num_speculative_tokens
    prompts = sum_prompts((t.generation, t.decoded, t.simulated[k - 1] if t.simulated else None) for t in answers.texts)

    def scope(slice_name: str | None) -> Measures:
        texts = [t for t in answers.texts if slice_name in (None, t.generation.request.slice)]
        some = [p for p in prompts.values() if slice_name in (None, p.slice)]
        fields = _acceptance(system, texts, some, costs, thought_of)
        if turns is not None:
            drafted, alone = (of_slice(turns.by_name[name], slice_name) for name in (system.name, ""))
            generate = of_slice(turns.by_name.get(GENERATE, []), slice_name)
            fields |= _speeds(drafted, alone, generate)
            # A batch's rounds are those of its slowest row, which tau does not tell.
            single = all(len(d.generations) == 1 for repeat in drafted for d in repeat)
            fields["ideal_speedup"] = _predicted(system, costs, k, fields["tau"]) if single else None
        return Measures(**fields, **answers.fields.get(slice_name or "overall", {}))

    slices = dict.fromkeys(t.generation.request.slice for t in answers.texts)
    return DrafterResult(scope(None), {slice_name: scope(slice_name) for slice_name in slices}, system.info, prompts)


def sum_prompts(answers: Iterable[tuple[Generation, Tally | None, Tally | None]]) -> dict[str, PromptSums]:
    """Return what each prompt adds to tau, by its id. answers: with their tallies, decoded and simulated."""
    sums: dict[str, PromptSums] = {}

    def added(before: float | None, tally: Tally | None) -> float | None:
        return None if tally is None or before is None else before + tally.rounds

    for generation, decoded, simulated in answers:
        request, tally = generation.request, decoded or simulated
        assert tally is not None
        so_far = sums.get(request.sample_id, PromptSums(request.slice, 0.0, 0.0, 0.0))
        rounds, expected = added(so_far.rounds, decoded), added(so_far.rounds_simulated, simulated)
        sums[request.sample_id] = PromptSums(request.slice, so_far.tokens + tally.tokens, rounds, expected)
    return sums


def _pairs(prompts: Iterable[PromptSums], *, simulated: bool) -> list[tuple[float, float]]:
    """Return tokens and rounds of each prompt, as `bootstrap_tau` takes them; 0 rounds where nothing was counted."""
    return [(p.tokens, (p.rounds_simulated if simulated else p.rounds) or 0.0) for p in prompts]


def _acceptance(
    system: SystemUnderTest,
    texts: Sequence[Text],
    prompts: Sequence[PromptSums],
    costs: Costs | None,
    thought_of: Callable[[Generation], int],
) -> dict[str, Any]:
    """Return the fields of `Measures` that the texts tell, without a clock."""
    k = system.num_speculative_tokens
    counted = [(t.generation, t.decoded) for t in texts if t.decoded is not None]
    expected = [(t.generation, t.simulated[k - 1]) for t in texts if t.simulated]
    # Where nothing is decoded, or simulated, an empty tally gives nulls.
    decoded, simulated = (total((tally for _, tally in of), k) for of in (counted, expected))
    drafts, shown = _pairs(prompts, simulated=False), decoded if counted else simulated
    budgets = [str(budget) for budget in system.budgets]
    by_budget = {name: total((t.by_budget[i] for t in texts), k).tau for i, name in enumerate(budgets)}
    points = []
    for length in range(1, min((len(t.simulated) for t in texts), default=0) + 1):
        tally = total((t.simulated[length - 1] for t in texts), length)
        rate = tally.acceptance_rate if system.counts_drafts else None
        points.append(SweepPoint(length, tally.tau, rate, _predicted(system, costs, length, tally.tau)))
    return {
        "prompts": len(prompts),
        "tokens": int(shown.tokens),
        "rounds": int(decoded.rounds) if counted else None,
        "tau": decoded.tau,
        "tau_mean_over_prompts": mean_tau(drafts),
        "tau_interval": bootstrap_tau(drafts),
        "tau_simulated": simulated.tau,
        "tau_simulated_interval": bootstrap_tau(_pairs(prompts, simulated=True)),
        "tau_difference_se": sampling_error(texts, k),
        "acceptance_rate": shown.acceptance_rate if counted or system.counts_drafts else None,
        "acceptance_at": tuple(decoded.acceptance_at) if counted else None,
        "alpha_at": tuple(decoded.alpha_at) if counted else None,
        "acceptance_at_simulated": tuple(simulated.acceptance_at) if simulated.rounds else None,
        "alpha_at_simulated": tuple(simulated.alpha_at) if simulated.rounds else None,
        **acceptance_by_condition(system.trained_length, thought_of, counted, expected),
        "k_sweep": tuple(points) or None,
        "budget_sweep": by_budget or None,
        "looping": sum(is_looping(t.generation.output_ids) for t in texts) / len(texts) if texts else None,
    }


def _speeds(repeats: Repeats, baseline: Repeats, generate: Repeats) -> dict[str, Any]:
    """Return the fields of `Measures` that the clocks tell, of a drafter and of the target alone on the same prompts."""
    pairs = _paired_speeds(repeats, baseline)
    fields: dict[str, Any] = {
        "speedup_vs_generate": _over_generate(repeats, generate),
        "baseline_vs_generate": _over_generate(baseline, generate),
    }
    ours, alone, ratios = ([a for a, _ in pairs], [b for _, b in pairs], [a / b for a, b in pairs])
    for name, values in (("decode_tok_s", ours), ("baseline_tok_s", alone), ("speedup", ratios)):
        fields |= {name: _median(values), f"{name}_spread": _spread(values)}
    groups, base_groups = ([d for repeat in of for d in repeat] for of in (repeats, baseline))
    for middle, of in (("", groups), ("_baseline", base_groups)):
        fields[f"ttft{middle}_s"] = median(g.ttft_s for d in of for g in d.generations)
        # In a batch a request's own end is not on the clock.
        single = all(len(d.generations) == 1 for d in of)
        fields[f"latency{middle}_s"] = Percentiles.of([sum(d.seconds.values()) for d in of]) if single else None
        fields[f"token_wait{middle}_s"] = Percentiles.of([wait for d in of for g in d.generations for wait in g.waits])
        peaks = [d.peak_bytes for d in of if d.peak_bytes is not None]
        fields[f"peak_memory{middle}_bytes"] = max(peaks, default=None)
    return {**fields, "ms_per_round": ms_per_round(groups)}


def _paired_speeds(repeats: Repeats, baseline: Repeats) -> list[tuple[float, float]]:
    """Return tokens per second of both in each repeat in which both decoded something."""
    both = zip(map(tok_s, repeats), map(tok_s, baseline), strict=True)
    return [(speed, alone) for speed, alone in both if speed and alone]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Sequence[float]) -> Interval | None:
    return (min(values), max(values)) if values else None


def _over_generate(repeats: Repeats, generate: Repeats) -> float | None:
    """Decode tok/s over generate's in the same repeat, both on generate's prompts: the median over repeats."""
    ratios = []
    for ours, theirs in zip(repeats, generate, strict=False):
        answered = [d for d in theirs if d.timed_tokens > 0 and d.decode_s > 0]
        names = {d.generations[0].request.sample_id for d in answered}
        if speed := tok_s([d for d in ours if d.generations[0].request.sample_id in names]):
            ratios.append(speed / tok_s(answered))
    return _median(ratios)


def measure_pick(
    target: Target,
    system: SystemUnderTest,
    drafter: str,
    timings: Mapping[str, Repeats],
    sampling: Sampling,
    beside: str | None = None,
) -> Pick:
    """Return what a draft reached on the prompts of a draft that took only some turns.

    Args:
        drafter: The name that the system has in the plan.
        beside: The draft whose prompts count, by its system's name; None for the system's own.
    """
    k, some = system.num_speculative_tokens, timings[system.name if beside is None else beside]
    among = {d.generations[0].request.sample_id for r in some for d in r}
    repeats, alone = (
        [[d for d in r if d.generations[0].request.sample_id in among] for r in timings[name]]
        for name in (system.name, "")
    )
    texts = count_texts(system.verified_by(target), system, distinct(repeats, sampling), sampling, k).texts
    names = {t.generation.request.sample_id for t in texts}
    ratios = [speed / base for speed, base in _paired_speeds(repeats, alone)]
    tau = total((t.simulated[k - 1] for t in texts if t.simulated), k).tau
    return Pick(drafter, k, len(names), tau, _median(ratios), _spread(ratios))


def tok_s(batches: Sequence[Decoded]) -> float:
    """Tokens after the first over decode seconds; 0 where nothing was decoded."""
    seconds = sum(d.decode_s for d in batches)
    return sum(d.timed_tokens for d in batches) / seconds if seconds else 0.0


def ms_per_round(groups: Sequence[Decoded]) -> MsPerRound | None:
    """Mean milliseconds per target pass (all rows of a batch share it)."""
    passes = sum(d.passes for d in groups)
    if not passes:
        return None
    return MsPerRound(**{part: 1000 * sum(d.seconds[part] for d in groups) / passes for part in _DECODE_PARTS})


def _predicted(system: SystemUnderTest, costs: Costs | None, k: int, tau: float | None) -> float | None:
    """Return the speedup that costs and an accepted length give; None where a draft of K tokens has no one cost."""
    return costs.speedup(system.name, k, tau) if costs is not None and tau and system.fixed_length else None


def sampling_error(texts: Sequence[Text], k: int) -> float | None:
    """Return the standard error of decoded tau around simulated tau on the same texts: the sampling error of acceptance."""
    pairs = [(t.decoded, t.simulated[k - 1]) for t in texts if t.decoded is not None and t.simulated]
    rounds = sum(decoded.rounds for decoded, _ in pairs)
    if not rounds:
        return None
    variance = sum((decoded.rounds - simulated.rounds) ** 2 for decoded, simulated in pairs)
    return float(sum(decoded.tokens for decoded, _ in pairs) / rounds**2 * variance**0.5)


def is_looping(ids: Sequence[int] | Sequence[str], length: int = 6, times: int = 4) -> bool:
    """Return whether some `length`-gram occurs at least `times` times."""
    grams = Counter(tuple(ids[i : i + length]) for i in range(len(ids) - length + 1))
    return max(grams.values(), default=0) >= times
