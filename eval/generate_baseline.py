"""transformers' own `generate`, timed on the same prompts: given beside our baseline, never instead of it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.clock import Stopwatch
from draftsmith.eval.decode import Request
from draftsmith.eval.sampling import Sampling
from draftsmith.heads.target import Target


@dataclass(frozen=True)
class GenerateTiming:
    """Decode tokens and seconds of one request, the first token and its time taken off."""

    sample_id: str
    slice: str
    tokens: int
    seconds: float


@torch.no_grad()
def time_generate(
    target: Target, requests: Sequence[Request], sampling: Sampling, *, per_slice: int = 4, seed: int = 0
) -> list[GenerateTiming]:
    """Time `generate` on the first prompts of each slice, one at a time, after a warm-up.

    Settings of the model's generation config that change the text (penalties, min-p) are switched off, as
    our own decoder does not apply them. Sampled texts differ from ours, so speeds are per token.
    """
    options: dict[str, object] = {"do_sample": not sampling.greedy, "repetition_penalty": 1.0, "num_beams": 1}
    if not sampling.greedy:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    options |= {"eos_token_id": list(target.eos_ids) or None, "pad_token_id": (target.eos_ids or (0,))[0]}
    chosen: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        if len(chosen[request.slice]) < per_slice:
            chosen[request.slice].append(request)
    torch.manual_seed(seed)
    timings = []
    for place, request in enumerate([requests[0], *(r for group in chosen.values() for r in group)]):
        ids = torch.tensor([request.prompt_ids], device=target.device)
        mask = torch.ones_like(ids)
        watch = Stopwatch(target.device)
        target.model.generate(ids, attention_mask=mask, max_new_tokens=1, **options)
        watch.lap("first")
        output = target.model.generate(ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options)
        watch.lap("all")
        tokens = output.shape[1] - ids.shape[1] - 1
        seconds = watch.seconds["all"] - watch.seconds["first"]
        if place > 0 and tokens > 0 and seconds > 0:
            timings.append(GenerateTiming(request.sample_id, request.slice, tokens, seconds))
    return timings
