"""What a head is compared with: drafters without a head, and transformers' own decoding.

A new drafter without a head is a module, its options in `BaselineSpec`, and an entry of `OPTIONS` and of `BASELINES`; recipe, help,
checks and evaluation read these. `generate` (alone, with an assistant model, with prompt lookup) is reported beside our target alone, never
instead of it; a streamer notes when its tokens come, so that the prefill needs no call of its own.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from draftsmith.decoder.answers import Decoded, Generation, Request
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.drafters.lookahead import Lookahead, most_nodes
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixDecoding, SuffixRules
from draftsmith.decoder.drafters.texts import MAX_NGRAM, PromptLookup
from draftsmith.decoder.loop import Stopwatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.drafters.baseline_spec import BaselineSpec
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.simulate.texts import draft_model_simulator, simulate_prompt_lookup, simulate_suffix_decoding
from draftsmith.storage import fingerprint
from draftsmith.target.target import Target


@dataclass(frozen=True)
class Supplies:
    """What the systems of baselines are made from: draft length and longest one, size of the target's vocabulary, and the
    readers of draft models and of files of answers, which raise UserError."""

    num_speculative_tokens: int
    max_k: int
    vocab_size: int
    load_model: Callable[[str], Target]
    read_outputs: Callable[[str], Sequence[Sequence[int]]]


def _prompt_lookup(spec: BaselineSpec, supplies: Supplies) -> SystemUnderTest:
    ngram = spec.max_ngram or MAX_NGRAM
    return SystemUnderTest(
        "prompt lookup" if ngram == MAX_NGRAM else f"prompt lookup, {ngram}-grams",
        spec.kind,
        partial(PromptLookup, max_ngram=ngram),
        supplies.num_speculative_tokens,
        supplies.max_k,
        simulate=lambda target, generations, sampling, k: simulate_prompt_lookup(generations, k, max_ngram=ngram),
        fixed_length=False,
        parameters=0,
    )


def _suffix(spec: BaselineSpec, supplies: Supplies) -> SystemUnderTest:
    chosen = spec.chosen
    rules = SuffixRules(**{key: chosen[key] for key in SuffixRules.__dataclass_fields__ if key in chosen})
    earlier = [] if spec.outputs is None else supplies.read_outputs(spec.outputs)
    outputs = Outputs(earlier[-(spec.max_cached_requests or 10_000) :])
    said = [
        *(["tree"] if rules.tree else []),
        *(f"{key} {value}" for key, value in chosen.items() if key not in ("tree", "outputs")),
        *([] if spec.outputs is None else [f"after {Path(spec.outputs).name}"]),
    ]
    return SystemUnderTest(
        ", ".join(["suffix decoding", *said]),
        spec.kind,
        lambda k: SuffixDecoding(k, rules, outputs),
        supplies.num_speculative_tokens,
        supplies.max_k,
        simulate=lambda target, generations, sampling, k: simulate_suffix_decoding(generations, k, rules, outputs),
        fixed_length=False,
        parameters=0,
        fingerprint=None if spec.outputs is None else fingerprint(outputs.text_T.tolist()),
        shape="suffix tree" if rules.tree else None,
    )


def _lookahead(spec: BaselineSpec, supplies: Supplies) -> SystemUnderTest:
    W, N, G = spec.W or 15, spec.N or 5, spec.G or 15
    # What it drafts depends on the target's guesses, so that it cannot be simulated.
    return SystemUnderTest(
        "lookahead" if not spec.chosen else f"lookahead, W {W}, N {N}, G {G}",
        spec.kind,
        lambda k: Lookahead(W, k + 1, G),
        N - 1,
        N - 1,
        fixed_length=False,
        parameters=0,
        shape=f"{G} n-grams, window {W}x{N - 1}",
        most_nodes=most_nodes(W, N, G),
    )


def _draft_model(spec: BaselineSpec, supplies: Supplies) -> SystemUnderTest:
    assert spec.path is not None
    model = supplies.load_model(spec.path)
    return SystemUnderTest(
        f"draft model {Path(model.path).name}",
        spec.kind,
        lambda k: DraftModel(model, k, supplies.vocab_size),
        supplies.num_speculative_tokens,
        supplies.max_k,
        simulate=draft_model_simulator(model),
        parameters=sum(p.numel() for p in model.model.parameters()),
        weight_bytes=model.weight_bytes,
        fingerprint=model.fingerprint,
    )


BASELINES: dict[str, Callable[[BaselineSpec, Supplies], SystemUnderTest]] = {
    "prompt_lookup": _prompt_lookup,
    "suffix": _suffix,
    "lookahead": _lookahead,
    "draft_model": _draft_model,
}
"""What makes the system of each kind, and raises UserError for a model or file that cannot be used."""


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
        # Everything that changes the text as our own decoder has it, whatever the model's generation config says.
        eos_ids = self.target.eos_ids
        options: dict[str, object] = {
            "do_sample": not sampling.greedy,
            "num_beams": 1,
            "use_cache": True,
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": list(eos_ids) or None,
            "pad_token_id": (eos_ids or (0,))[0],
        }
        if not sampling.greedy:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            # At 0 it changes nothing but costs a pass over the logits.
            if sampling.min_p or getattr(self.target.model.generation_config, "min_p", None):
                options["min_p"] = sampling.min_p
        options |= dict(self.options)
        if self.assistant is not None:
            # Read from the assistant alone: what `generate` is given for it is ignored.
            config = self.assistant.model.generation_config
            config.use_cache = True
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
