"""Time transformers' own decoding on the same prompts: reported besides our baseline, never instead of it.

`generate` alone, with an assistant model, and with prompt lookup. A streamer notes when tokens come, so that the prefill
needs no call of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from draftsmith.decoder.answers import Decoded, Generation, Request
from draftsmith.decoder.loop import Stopwatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.target.target import Target

GENERATE = "transformers: generate"
"""The name of `generate` alone among the systems of a run."""


@dataclass(frozen=True)
class GenerateSystem:
    """A way to decode with `target.model.generate`, one request at a time.

    options: further arguments of `generate`. assistant: a smaller model that drafts `num_speculative_tokens` tokens per
    round, or fewer once its probability of a token falls below `confidence`.
    """

    name: str
    target: Target
    options: Mapping[str, object] = field(default_factory=dict)
    assistant: Target | None = None
    num_speculative_tokens: int = 0
    confidence: float = 0.0

    def way(self, target: Target) -> "GenerateSystem":
        """Return what decodes in an evaluation of `target`, its own."""
        return self

    @torch.no_grad()
    def decode(self, requests: Sequence[Request], sampling: Sampling, rows: int = 1) -> Decoded:
        """Answer requests one after the other, whatever `rows` is. Sampled texts come from torch's generator, so they differ from ours.

        Returned are texts and seconds: ttft, until the first tokens came (one, or with an assistant those of its first round, its own
        prefill included, which favours it a little), and decode.
        """
        options = _sampling_options(self.target, sampling) | dict(self.options)
        if self.assistant is not None:
            # Read from the assistant alone: what `generate` is given for it is ignored.
            config = self.assistant.model.generation_config
            config.num_assistant_tokens = self.num_speculative_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = self.confidence
            options["assistant_model"] = self.assistant.model
        answers, seconds, early = [], Counter[str](), 0
        for request in requests:
            ids = torch.tensor([request.prompt_ids], device=self.target.device)
            clock = _Arrivals(self.target.device)
            output = self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                streamer=clock,
                **options,
            )
            clock.watch.lap("decode")
            answers.append(Generation(request, output[0, ids.shape[1] :].tolist(), ttft_s=clock.watch.seconds["ttft"]))
            seconds.update(clock.watch.seconds)
            early += clock.first - 1
        return Decoded(answers, dict(seconds), early=early)


class _Arrivals(BaseStreamer):
    """Books the time up to the first tokens; `generate` hands over the prompt, then tokens as they come."""

    def __init__(self, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self.first = 0
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, or new tokens."""
        if self._prompt:
            self._prompt = False
        elif not self.first:
            self.first = value.numel()
            self.watch.lap("ttft")

    def end(self) -> None:
        """The last token has come; what follows is no more than a return."""


def plain(target: Target) -> GenerateSystem:
    """Return `generate` alone."""
    return GenerateSystem(GENERATE, target)


def assisted(target: Target, draft: Target, num_speculative_tokens: int, *, confidence: float = 0.0) -> GenerateSystem:
    """Return assisted generation with drafts of `num_speculative_tokens`; transformers' own default is to stop a draft
    at the first token below a confidence of 0.4."""
    name = f"{GENERATE}, assisted" + (f" at confidence {confidence:g}" if confidence else "")
    return GenerateSystem(name, target, {}, draft, num_speculative_tokens, confidence)


def looked_up(target: Target, num_speculative_tokens: int) -> GenerateSystem:
    """Return `generate` with prompt lookup."""
    options = {"prompt_lookup_num_tokens": num_speculative_tokens, "max_matching_ngram_size": 3}
    return GenerateSystem(f"{GENERATE}, prompt lookup", target, options)


def _sampling_options(target: Target, sampling: Sampling) -> dict[str, object]:
    """Set everything that changes the text as our own decoder has it, whatever the model's generation config says."""
    options: dict[str, object] = {
        "do_sample": not sampling.greedy,
        "num_beams": 1,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": list(target.eos_ids) or None,
        "pad_token_id": (target.eos_ids or (0,))[0],
    }
    if not sampling.greedy:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        # At 0 it changes nothing but costs a pass over the logits.
        if sampling.min_p or getattr(target.model.generation_config, "min_p", None):
            options["min_p"] = sampling.min_p
    return options
