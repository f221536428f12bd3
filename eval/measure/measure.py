"""Evaluate at one sampling setting: decode prompts with and without drafts, simulate the same texts, summarize both.

Systems are interleaved group by group within every repeat, and groups hold one slice, so that seconds
belong to a slice. Shapes: K speculative tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from draftsmith.eval.decode.answers import Decoded, Generation, Request, Tally, tally_generation, total
from draftsmith.eval.decode.clock import peak_memory
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import Drafter, TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.verify import Typical
from draftsmith.eval.drafters.contender import Contender
from draftsmith.eval.measure.bootstrap import Text, bootstrap_tau, is_looping, mean_tau, sampling_error
from draftsmith.eval.measure.generate_baseline import Timed
from draftsmith.eval.measure.quality import compare_targets, perplexities
from draftsmith.eval.measure.result import Costs, DrafterResult, Lossless, Measures, MsPerRound, Percentiles, SweepPoint
from draftsmith.heads.target.target import Target

_DECODE_PARTS = ("draft", "verify", "commit", "other")

_WAITING = 3
"""Groups are this many batches longer than the batch, so that rows which finish early are taken over."""


@dataclass
class Timings:
    """Groups of requests that one system decoded: per repeat, slice by slice."""

    batches: list[list[Decoded]] = field(default_factory=list)

    def of(self, slice_name: str | None) -> list[list[Decoded]]:
        """Return each repeat's groups of one slice (None: of all)."""
        return [
            [d for d in repeat if slice_name is None or d.generations[0].request.slice == slice_name]
            for repeat in self.batches
        ]


def run_systems(
    target: Target,
    contenders: Sequence[Contender],
    requests_by_repeat: Sequence[Sequence[Request]],
    sampling: Sampling,
    *,
    batch: int,
    on_batch: Callable[[int], None] = lambda requests: None,
) -> dict[str, Timings]:
    """Decode every repeat's requests with the target alone ("") and with every drafter, interleaved; one with a target of
    its own is verified by that one.

    batch: requests decoded at once. A batch is continuous, as in serving engines: a request that is done makes room for
    the next of its group.
    """
    systems: dict[str, tuple[Target, Drafter, Typical | None]] = {"": (target, TargetAlone(), None)}
    systems |= {c.name: (c.verified_by(target), c.make(c.num_speculative_tokens), c.typical) for c in contenders}
    timings = {name: Timings() for name in systems}
    warm_up = [
        Request(r.sample_id, r.slice, r.prompt_ids, min(16, r.max_new_tokens)) for r in requests_by_repeat[0][:1]
    ]
    for own, drafter, typical in systems.values():
        decode_batch(own, drafter, warm_up, sampling, typical)
    for requests in requests_by_repeat:
        for timing in timings.values():
            timing.batches.append([])
        for group in _groups(requests, batch if batch == 1 else (1 + _WAITING) * batch):
            for name, (own, drafter, typical) in systems.items():
                with peak_memory(target.device) as peak:
                    decoded = decode_batch(own, drafter, group, sampling, typical, rows=batch)
                timings[name].batches[-1].append(replace(decoded, peak_bytes=peak.bytes))
            on_batch(len(group))
    return timings


def _groups(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Split requests by slice, then into groups of at most `size`."""
    by_slice: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_slice[request.slice].append(request)
    return [group[i : i + size] for group in by_slice.values() for i in range(0, len(group), size)]


@dataclass(frozen=True)
class Texts:
    """The answers that acceptance is counted on; off_text: see `simulate.Acceptance`.

    judged: of texts that do not follow the target's distribution, see `judge`.
    """

    texts: list[Text]
    off_text: int = 0
    judged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def collect_texts(target: Target, contender: Contender, timings: Mapping[str, Timings], sampling: Sampling) -> Texts:
    """Return the distinct answers of a drafter, counted and, where that is possible, simulated by the target that
    verifies them; those that do not follow the distribution of `target` are judged by it as well."""
    c = contender
    generations = _distinct(timings[c.name], sampling)
    tallies = [tally_generation(g, c.num_speculative_tokens) for g in generations]
    simulated: list[list[Tally]] = [[] for _ in generations]
    off_text = 0
    if c.simulate is not None:
        simulation = c.simulate(c.verified_by(target), generations, sampling, c.max_k)
        simulated, off_text = simulation.tallies, simulation.off_text
    texts = Texts([Text(*found) for found in zip(generations, tallies, simulated, strict=True)], off_text)
    if c.lossless and c.verifier is None:
        return texts
    return replace(texts, judged=judge(target, c, generations, _distinct(timings[""], sampling)))


def judge(
    target: Target, contender: Contender, generations: Sequence[Generation], originals: Sequence[Generation]
) -> dict[str, dict[str, float]]:
    """Return what `target`, whose own texts are `originals`, makes of the texts of a drafter that changes them: fields of
    `Measures`, per slice and as "overall"."""
    own, theirs = perplexities(target, originals), perplexities(target, generations)
    found = {key: {"perplexity": theirs[key], "perplexity_baseline": own[key]} for key in own}
    if contender.verifier is not None:
        change = compare_targets(target, contender.verifier, originals)
        found = {key: {**found[key], **asdict(change[key])} for key in found}
    return found


def _distinct(timing: Timings, sampling: Sampling) -> list[Generation]:
    """One repeat's answers when greedy (all repeats are alike), else those of all repeats."""
    repeats = timing.batches[:1] if sampling.greedy else timing.batches
    return [g for repeat in repeats for decoded in repeat for g in decoded.generations]


def summarize(
    contender: Contender,
    found: Texts,
    timings: Mapping[str, Timings],
    costs: Costs,
    lossless: Mapping[str, Lossless],
    lossless_timed: Mapping[str, Lossless],
    generate: Sequence[Timed],
) -> DrafterResult:
    """Return one drafter's measures over everything and per slice."""

    def scope(slice_name: str | None) -> Measures:
        key = slice_name or "overall"
        chosen = [t for t in found.texts if slice_name in (None, t.generation.request.slice)]
        measures = _measures(
            contender,
            chosen,
            timings[contender.name].of(slice_name),
            timings[""].of(slice_name),
            costs,
            [g for g in generate if slice_name in (None, g.request.slice)],
        )
        return replace(
            measures, lossless=lossless.get(key), lossless_timed=lossless_timed.get(key), **found.judged.get(key, {})
        )

    slices = dict.fromkeys(t.generation.request.slice for t in found.texts)
    return DrafterResult(scope(None), {slice_name: scope(slice_name) for slice_name in slices}, contender.info)


def _measures(
    contender: Contender,
    texts: Sequence[Text],
    repeats: list[list[Decoded]],
    baseline: list[list[Decoded]],
    costs: Costs,
    generate: Sequence[Timed],
) -> Measures:
    name, k = contender.name, contender.num_speculative_tokens
    decoded = total((t.decoded for t in texts), k)
    # Where nothing is simulated an empty tally gives nulls.
    simulated = total((t.simulated[k - 1] for t in texts if t.simulated), k)
    pairs = [(a, b) for a, b in zip(map(_tok_s, repeats), map(_tok_s, baseline), strict=True) if a and b]
    speeds, base_speeds = [a for a, _ in pairs], [b for _, b in pairs]
    ratios = [a / b for a, b in pairs]
    single = all(len(d.generations) == 1 for r in repeats for d in r)
    tau = decoded.tau
    return Measures(
        prompts=len({t.generation.request.sample_id for t in texts}),
        tokens=int(decoded.tokens),
        rounds=int(decoded.rounds),
        tau=tau,
        tau_mean_over_prompts=mean_tau(texts),
        tau_interval=bootstrap_tau(texts),
        tau_simulated=simulated.tau,
        tau_difference_se=sampling_error(texts, k) if contender.simulate is not None else None,
        acceptance_rate=decoded.acceptance_rate,
        acceptance_at=tuple(decoded.acceptance_at),
        alpha_at=tuple(decoded.alpha_at),
        acceptance_at_simulated=tuple(simulated.acceptance_at) if simulated.rounds else None,
        alpha_at_simulated=tuple(simulated.alpha_at) if simulated.rounds else None,
        k_sweep=_sweep(contender, texts, costs) or None,
        decode_tok_s=_median(speeds),
        decode_tok_s_spread=_spread(speeds),
        baseline_tok_s=_median(base_speeds),
        baseline_tok_s_spread=_spread(base_speeds),
        speedup=_median(ratios),
        speedup_spread=_spread(ratios),
        speedup_vs_generate=_over_generate(repeats, generate),
        baseline_vs_generate=_over_generate(baseline, generate),
        ttft_s=median(g.ttft_s for r in repeats for d in r for g in d.generations),
        ttft_baseline_s=median(g.ttft_s for r in baseline for d in r for g in d.generations),
        # In a batch a request's own end is not on the clock.
        latency_s=_latency(repeats) if single else None,
        latency_baseline_s=_latency(baseline) if single else None,
        ms_per_round=_ms_per_round(repeats),
        # A batch's rounds are those of its slowest row, which tau does not tell.
        ideal_speedup=costs.speedup(name, k, tau) if tau and single and contender.fixed_length else None,
        peak_memory_bytes=_peak(repeats),
        peak_memory_baseline_bytes=_peak(baseline),
        looping=sum(is_looping(t.generation.output_ids) for t in texts) / len(texts) if texts else None,
    )


def _peak(repeats: Sequence[Sequence[Decoded]]) -> int | None:
    return max((d.peak_bytes for repeat in repeats for d in repeat if d.peak_bytes is not None), default=None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Sequence[float]) -> "tuple[float, float] | None":
    return (min(values), max(values)) if values else None


def _over_generate(repeats: Sequence[Sequence[Decoded]], generate: Sequence[Timed]) -> float | None:
    """Decode tok/s over generate's, both on generate's prompts."""
    names = {g.request.sample_id for g in generate}
    same = [[d for d in r if d.generations[0].request.sample_id in names] for r in repeats]
    ours = _median([speed for r in same if (speed := _tok_s(r))])
    theirs = sum(g.tokens for g in generate) / sum(g.decode_s for g in generate) if generate else None
    return ours / theirs if ours and theirs else None


def _tok_s(batches: Sequence[Decoded]) -> float:
    """Tokens after the first over decode seconds; 0 where nothing was decoded."""
    tokens = sum(len(g.output_ids) - 1 for d in batches for g in d.generations)
    seconds = sum(d.seconds[part] for d in batches for part in _DECODE_PARTS)
    return tokens / seconds if seconds else 0.0


def _ms_per_round(repeats: Sequence[Sequence[Decoded]]) -> MsPerRound | None:
    """Mean milliseconds per target pass (all rows of a batch share it)."""
    groups = [d for repeat in repeats for d in repeat]
    passes = sum(d.passes for d in groups)
    if not passes:
        return None
    return MsPerRound(**{part: 1000 * sum(d.seconds[part] for d in groups) / passes for part in _DECODE_PARTS})


def _latency(repeats: Sequence[Sequence[Decoded]]) -> Percentiles:
    seconds = [sum(d.seconds.values()) for repeat in repeats for d in repeat for _ in d.generations]
    return Percentiles(float(np.percentile(seconds, 50)), float(np.percentile(seconds, 95)))


def _sweep(contender: Contender, texts: Sequence[Text], costs: Costs) -> tuple[SweepPoint, ...]:
    points = []
    for k in range(1, min((len(t.simulated) for t in texts), default=0) + 1):
        tally = total((t.simulated[k - 1] for t in texts), k)
        speedup = costs.speedup(contender.name, k, tally.tau) if tally.tau and contender.fixed_length else None
        points.append(sweep_point(contender, k, tally, speedup))
    return tuple(points)


def sweep_point(contender: Contender, k: int, tally: Tally, speedup: float | None = None) -> SweepPoint:
    """Return what a simulation says of the draft length k."""
    return SweepPoint(k, tally.tau, tally.acceptance_rate if contender.counts_drafts else None, speedup)
