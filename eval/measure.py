"""One evaluation: decode prompts with and without drafts, simulate the same texts, and sum both up.

Systems are interleaved batch by batch within every repeat, and batches hold one slice, so that seconds
belong to a slice. Shapes: K speculative tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from draftsmith.eval.costs import DrafterFactory
from draftsmith.eval.decode import Decoded, Generation, Request, decode_batch
from draftsmith.eval.draft import TargetAlone
from draftsmith.eval.result import Costs, Drafter, Lossless, Measures, MsPerRound, Percentiles, SweepPoint
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tally import Tally, tally_generation, total
from draftsmith.eval.teacher_forced import simulate_generations
from draftsmith.heads.base import DraftHead
from draftsmith.heads.target import Target

_DECODE_PARTS = ("draft", "verify", "commit", "other")


@dataclass
class Timings:
    """Batches that one system decoded: per repeat, slice by slice."""

    batches: list[list[Decoded]] = field(default_factory=list)

    def of(self, slice_name: str | None) -> list[list[Decoded]]:
        """Return each repeat's batches of one slice (None: of all)."""
        return [
            [d for d in repeat if slice_name is None or d.generations[0].request.slice == slice_name]
            for repeat in self.batches
        ]


def run_systems(
    target: Target,
    drafters: Mapping[str, DrafterFactory],
    requests_by_repeat: Sequence[Sequence[Request]],
    sampling: Sampling,
    *,
    num_speculative_tokens: int,
    batch: int,
    on_batch: Callable[[int], None] = lambda requests: None,
) -> dict[str, Timings]:
    """Decode every repeat's requests with the target alone ("") and with every drafter, interleaved."""
    systems = {"": TargetAlone(), **{name: make(num_speculative_tokens) for name, make in drafters.items()}}
    timings = {name: Timings() for name in systems}
    warm_up = [
        Request(r.sample_id, r.slice, r.prompt_ids, min(16, r.max_new_tokens)) for r in requests_by_repeat[0][:1]
    ]
    for drafter in systems.values():
        decode_batch(target, drafter, warm_up, sampling)
    for requests in requests_by_repeat:
        for timing in timings.values():
            timing.batches.append([])
        for group in _batches(requests, batch):
            for name, drafter in systems.items():
                timings[name].batches[-1].append(decode_batch(target, drafter, group, sampling))
            on_batch(len(group))
    return timings


def _batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Group requests by slice, then into batches."""
    by_slice: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_slice[request.slice].append(request)
    return [group[i : i + size] for group in by_slice.values() for i in range(0, len(group), size)]


@dataclass(frozen=True)
class Text:
    """A decoded answer with its decoded tally and its simulated tallies for K = 1, 2, ..."""

    generation: Generation
    decoded: Tally
    simulated: list[Tally]


def collect_texts(
    target: Target, head: DraftHead, timing: Timings, sampling: Sampling, num_speculative_tokens: int, max_k: int
) -> list[Text]:
    """Return the distinct answers of a system: one repeat when greedy (all are alike), else all repeats."""
    repeats = timing.batches[:1] if sampling.greedy else timing.batches
    generations = [g for repeat in repeats for decoded in repeat for g in decoded.generations]
    simulated = simulate_generations(target, head, generations, sampling, max_k)
    return [
        Text(g, tally_generation(g, num_speculative_tokens), s) for g, s in zip(generations, simulated, strict=True)
    ]


def summarize(
    name: str,
    texts: Sequence[Text],
    timings: Mapping[str, Timings],
    costs: Costs,
    lossless: Mapping[str, Lossless],
    generate_tok_s: Mapping[str, float],
    num_speculative_tokens: int,
) -> Drafter:
    """Return one drafter's measures over everything and per slice."""

    def scope(slice_name: str | None) -> Measures:
        key = slice_name or "overall"
        chosen = [t for t in texts if slice_name in (None, t.generation.request.slice)]
        return _measures(
            name,
            chosen,
            timings[name].of(slice_name),
            timings[""].of(slice_name),
            costs,
            lossless.get(key),
            generate_tok_s.get(key),
            num_speculative_tokens,
        )

    slices = dict.fromkeys(t.generation.request.slice for t in texts)
    return Drafter(scope(None), {slice_name: scope(slice_name) for slice_name in slices})


def _measures(
    name: str,
    texts: Sequence[Text],
    repeats: list[list[Decoded]],
    baseline: list[list[Decoded]],
    costs: Costs,
    lossless: Lossless | None,
    generate_tok_s: float | None,
    k: int,
) -> Measures:
    decoded = total((t.decoded for t in texts), k)
    simulated = total((t.simulated[k - 1] for t in texts), k)
    speeds, base_speeds = [_tok_s(r) for r in repeats], [_tok_s(r) for r in baseline]
    ratios = [a / b for a, b in zip(speeds, base_speeds, strict=True) if b]
    tau = decoded.tau
    return Measures(
        prompts=len({t.generation.request.sample_id for t in texts}),
        tokens=int(decoded.tokens),
        rounds=int(decoded.rounds),
        tau=tau,
        tau_mean_over_prompts=_mean_tau(texts),
        tau_interval=_bootstrap_tau(texts),
        tau_simulated=simulated.tau,
        tau_simulated_se=_sampling_error(texts, k),
        acceptance_rate=decoded.acceptance_rate,
        acceptance_at=tuple(decoded.acceptance_at),
        alpha_at=tuple(decoded.alpha_at),
        acceptance_at_simulated=tuple(simulated.acceptance_at),
        alpha_at_simulated=tuple(simulated.alpha_at),
        k_sweep=_sweep(name, texts, costs),
        decode_tok_s=median(speeds),
        decode_tok_s_spread=(min(speeds), max(speeds)),
        baseline_tok_s=median(base_speeds),
        baseline_tok_s_spread=(min(base_speeds), max(base_speeds)),
        speedup=median(ratios) if ratios else None,
        speedup_spread=(min(ratios), max(ratios)) if ratios else None,
        speedup_vs_generate=median(speeds) / generate_tok_s if generate_tok_s else None,
        ttft_s=median(d.seconds["ttft"] for r in repeats for d in r for _ in d.generations),
        ttft_baseline_s=median(d.seconds["ttft"] for r in baseline for d in r for _ in d.generations),
        latency_s=_latency(repeats),
        latency_baseline_s=_latency(baseline),
        ms_per_round=_ms_per_round(repeats),
        ideal_speedup=costs.speedup(name, k, tau) if tau else None,
        lossless=lossless,
        looping=sum(is_looping(t.generation.output_ids) for t in texts) / len(texts) if texts else None,
    )


def _tok_s(batches: Sequence[Decoded]) -> float:
    """Tokens after the first over decode seconds; 0 where nothing was decoded."""
    tokens = sum(len(g.output_ids) - 1 for d in batches for g in d.generations)
    seconds = sum(d.seconds[part] for d in batches for part in _DECODE_PARTS)
    return tokens / seconds if seconds else 0.0


def _ms_per_round(repeats: Sequence[Sequence[Decoded]]) -> MsPerRound | None:
    """Mean milliseconds per round of a batch (all its rows decode in the same round)."""
    batches = [d for repeat in repeats for d in repeat]
    rounds = sum(max(len(g.rounds) for g in d.generations) for d in batches)
    if not rounds:
        return None
    return MsPerRound(**{part: 1000 * sum(d.seconds[part] for d in batches) / rounds for part in _DECODE_PARTS})


def _latency(repeats: Sequence[Sequence[Decoded]]) -> Percentiles:
    seconds = [sum(d.seconds.values()) for repeat in repeats for d in repeat for _ in d.generations]
    return Percentiles(float(np.percentile(seconds, 50)), float(np.percentile(seconds, 95)))


def _mean_tau(texts: Sequence[Text]) -> float | None:
    ratios = [t.decoded.tau for t in texts if t.decoded.tau is not None]
    return sum(ratios) / len(ratios) if ratios else None


def _bootstrap_tau(texts: Sequence[Text], draws: int = 1000) -> "tuple[float, float] | None":
    """95% interval of tau by resampling prompts (all answers to one prompt stay together)."""
    by_prompt: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for text in texts:
        by_prompt[text.generation.request.sample_id] += (text.decoded.tokens, text.decoded.rounds)
    pairs = np.array([pair for pair in by_prompt.values() if pair[1] > 0])
    if len(pairs) < 2:
        return None
    picks = np.random.default_rng(0).integers(0, len(pairs), (draws, len(pairs)))
    sums = pairs[picks].sum(1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return float(low), float(high)


def _sampling_error(texts: Sequence[Text], k: int) -> float | None:
    """Standard error of decoded tau around simulated tau on the same texts: the luck of the accept draws."""
    rounds = sum(t.decoded.rounds for t in texts)
    if not rounds:
        return None
    variance = sum((t.decoded.rounds - t.simulated[k - 1].rounds) ** 2 for t in texts)
    return float(sum(t.decoded.tokens for t in texts) / rounds**2 * variance**0.5)


def _sweep(name: str, texts: Sequence[Text], costs: Costs) -> tuple[SweepPoint, ...]:
    points = []
    for k in range(1, min((len(t.simulated) for t in texts), default=0) + 1):
        tally = total((t.simulated[k - 1] for t in texts), k)
        speedup = costs.speedup(name, k, tally.tau) if tally.tau else None
        points.append(SweepPoint(k, tally.tau, tally.acceptance_rate, speedup))
    return tuple(points)


def is_looping(ids: Sequence[int], length: int = 6, times: int = 4) -> bool:
    """Return whether a `length`-gram stands `times` times in a row."""
    same = 0
    for i in range(length, len(ids)):
        # A run of equal tokens at distance `length` means that a period repeats.
        same = same + 1 if ids[i] == ids[i - length] else 0
        if same >= length * (times - 1):
            return True
    return False


@torch.no_grad()
def time_generate(
    target: Target, requests: Sequence[Request], sampling: Sampling, per_slice: int = 4
) -> dict[str, float]:
    """Return decode tok/s of transformers' `generate`, one prompt at a time, per slice and as "overall".

    The first token's time is measured apart and taken off, as in our own figures.
    """
    from draftsmith.eval.clock import Stopwatch

    options: dict[str, object] = (
        {"do_sample": False}
        if sampling.greedy
        else {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    )
    options |= {"eos_token_id": list(target.eos_ids) or None, "pad_token_id": (target.eos_ids or (0,))[0]}
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    seen: dict[str, int] = defaultdict(int)
    for request in requests:
        if seen[request.slice] == per_slice:
            continue
        seen[request.slice] += 1
        ids = torch.tensor([request.prompt_ids], device=target.device)
        mask = torch.ones_like(ids)
        watch = Stopwatch(target.device)
        target.model.generate(ids, attention_mask=mask, max_new_tokens=1, **options)
        watch.lap("first")
        output = target.model.generate(ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options)
        watch.lap("all")
        pair = (output.shape[1] - ids.shape[1] - 1, watch.seconds["all"] - watch.seconds["first"])
        sums[request.slice] += pair
        sums["overall"] += pair
    return {name: float(tokens / seconds) for name, (tokens, seconds) in sums.items() if seconds > 0 and tokens > 0}
