"""The rates of the machine at hand, measured in seconds by the code that a run uses, on a model of the target's sizes with made-up
weights: nothing is loaded.

A rate is the FLOPs of some work, as the plan counts them, divided by the seconds that it took here. A small model's overheads are
in it. Of a large target only some layers are made.

Shapes: B texts, L tokens of a text, N tokens of a pass, W draft vocab.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from draftsmith.data.batch import Features, Tokenized, collate
from draftsmith.data.features.extract import compute_features
from draftsmith.data.features.index import DTYPES
from draftsmith.decoder.captured import Passes
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.loop import Stopwatch
from draftsmith.decoder.sampling import Noise, NoiseTable
from draftsmith.decoder.verify import verify
from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost
from draftsmith.estimate.figures import Assumptions, Device, Estimate, PlannedTarget, Rates
from draftsmith.foreign.code import foreign_code
from draftsmith.heads.adapter import DraftAdapter, adapt
from draftsmith.heads.base import DraftHead, draft_vocab_size_of
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.registry import find_method
from draftsmith.machine import ClockWatch, available_memory
from draftsmith.progress import Bar
from draftsmith.recipe.schema import Recipe
from draftsmith.target.config import attention_of, opener_of
from draftsmith.target.kernels import pack_linears
from draftsmith.target.shape import TargetShape, shape_of
from draftsmith.target.target import Target
from draftsmith.train.parallel import autocast_of

_LAYERS = 3e8
"""Most parameters of the layers that are made."""
_TOKENS = 256
"""Most tokens of a pass over whole texts, and of a training pass."""
_SECONDS, _REPEATS = 1.5, 9
"""Work is repeated for at most so many seconds and so many times; a first time does not count."""


def measure_device(recipe: Recipe, planned: PlannedTarget, estimate: Estimate) -> Device:
    """Return the device of an estimate, this machine's, with the rates at which it does a recipe's work; shows a bar. Raises
    UserError where not even a part of the target fits in memory."""
    given = estimate.given
    watch = ClockWatch()
    with Bar(total=6, desc="measuring this machine", unit="step") as bar:
        bench = _Bench.make(recipe, planned, estimate)
        bar.update()
        forward = bench.extraction()
        bar.update()
        passes: dict[int, float] = {}
        for texts, tokens in ((1, 1), (1, 1 + recipe.evaluate.num_speculative_tokens), (recipe.answers.batch, 1)):
            passes[texts * tokens] = bench.decoding(texts, tokens)
            bar.update()
        train = bench.training() or forward
        bar.update()
    passes[max(*passes, _TOKENS) + 1] = forward
    read = passes[1] / bench.shape.step_flops(bench.context) * bench.shape.touched_bytes(1)
    rates = Rates(forward, tuple(sorted(passes.items())), train, watch.read())
    return replace(given.device, flops=forward, bandwidth=read, rates=rates)


@dataclass(frozen=True)
class _Bench:
    """What is measured on. shape: of the model as it was made. head, cost: None where the head starts from a model."""

    recipe: Recipe
    target: Target
    shape: TargetShape
    head: DraftHead | None
    cost: HeadCost | None
    given: Assumptions

    @classmethod
    def make(cls, recipe: Recipe, planned: PlannedTarget, estimate: Estimate) -> "_Bench":
        """Make the target, or some of its layers, and the head."""
        aux, given, own = estimate.head.aux_layers, estimate.given, planned.shape
        target = _make_target(recipe, planned, given.device, fewest=max(2, aux))
        options, whole = recipe.head, target.num_layers == own.layers
        if not whole:
            own = shape_of(target.model.config, own.itemsize)
            options = replace(options, layer_ids=list(range(aux))) if hasattr(options, "layer_ids") else options
        started = any(getattr(options, key, None) for key in getattr(options, "MODELS", ()))
        head = cost = None
        if not started and (whole or not getattr(options, "layers_from_target", None)):
            size = draft_vocab_size_of(options)
            vocab = None if size is None or size >= own.vocab else torch.arange(size)
            head = find_method(recipe.method).build(options, target, vocab).to(target.device).train()
            if (rank := recipe.train.lora_rank) is not None:
                adapt(head, DraftAdapter(rank, float(rank), Path(), ""))
            cost = estimate.head if whole else HeadCost(recipe.method, options, own, recipe.target.path, rank)
        return cls(recipe, target, own, head, cost, given)

    @property
    def context(self) -> int:
        """Tokens before the middle token of an answer."""
        return self.given.prompt + self.given.answer // 2

    def extraction(self) -> float:
        """Return the FLOP/s of a pass over whole texts as extraction makes it."""
        texts, length = self._texts(), self._length
        seconds = _time(lambda: self._features(texts), self.target.device)
        return len(texts) * self.shape.forward_flops(length) / seconds

    @property
    def _length(self) -> int:
        """Tokens of a text."""
        return min(self.given.prompt + self.given.answer, _TOKENS)

    def _texts(self) -> list[Tokenized]:
        """Return texts of _TOKENS tokens together, with answers as long, beside their prompts, as those of the plan."""
        length = self._length
        place = torch.arange(length)
        prompt = round(length * self.given.prompt / (self.given.prompt + self.given.answer))
        answer = place >= max(0, min(prompt, length - 3))
        return [Tokenized(place % self.shape.vocab, answer, str(n), "") for n in range(_TOKENS // length)]

    def _features(self, texts: list[Tokenized]) -> list[Features]:
        layers = () if self.head is None else self.head.reads.layer_ids
        return compute_features(self.target, texts, layers, self.target.dtype)

    @torch.no_grad()
    def decoding(self, texts: int, tokens: int) -> float:
        """Return the FLOP/s of a round over `tokens` tokens of each text, up to the verdict; fewer texts where the memory asks."""
        target, slots = self.target, self.context + tokens
        room = available_memory(target.device) / 4 / (slots * self.shape.kv_bytes)
        texts = max(1, min(texts, int(room)))
        passes = Passes.of(target, texts, slots, tokens)
        passes.cache.append(self.context)
        ids_BN = torch.arange(texts * tokens, device=target.device).view(texts, tokens) % self.shape.vocab
        draft, keys_B = Draft.chain(ids_BN[:, 0], ids_BN[:, 1:]), ids_BN[:, 0]
        sampling = replace(self.recipe.answers.sampling, repetition_penalty=1.0)  # there are no texts to look back at

        table = NoiseTable(keys_B.tolist(), [self.context] * texts, target.device)

        def job() -> None:
            logits_BNV = passes(draft, self.context).logits_BNV
            verify(draft, logits_BNV, sampling, Noise(keys_B, passes.cache.lengths_B, table, self.context))

        return texts * tokens * self.shape.step_flops(self.context) / _time(job, target.device)

    def training(self) -> float | None:
        """Return the FLOP/s of the head's forward and backward pass over texts, the loss included; None without a head."""
        if self.head is None or self.cost is None:
            return None
        head, spec, length = self.head, self.recipe.train, self._length
        texts = self._texts()
        # No row is left out for a target's choice that the draft vocabulary lacks.
        known = [replace(one, top1=one.top1 % self.cost.draft_vocab) for one in self._features(texts)]
        batch = collate([[one] for one in known], length, seeds=[[0]] * len(known)).to(self.target.device)

        def job() -> None:
            with autocast_of(self.target.device, spec):
                output = head(batch, head.trains.steps)
            head_loss(output, batch, self.target.head, head.draft_vocab, spec.loss).loss_sum.backward()

        answer = int(texts[0].mask.sum())
        flops = len(known) * self.cost.of_text(length - answer, answer, spec.loss, 1.0).flops
        return flops / _time(job, self.target.device)


def _make_target(recipe: Recipe, planned: PlannedTarget, device: Device, fewest: int) -> Target:
    """Return a target of these sizes, or of as many of its layers as _LAYERS allows, at least `fewest`, with weights that mean
    nothing. Raises UserError where that does not fit in memory."""
    shape, config = planned.shape, copy.deepcopy(planned.config)
    ends = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    of_layer = (shape.parameters - ends) / shape.layers
    layers = min(shape.layers, max(fewest, int(_LAYERS / of_layer)))
    text = config.get_text_config(decoder=True)
    # What a config lists by layer, such as their types.
    listed = [key for key, value in vars(text).items() if isinstance(value, list) and len(value) == shape.layers]
    for key in listed:
        setattr(text, key, getattr(text, key)[:layers])
    text.num_hidden_layers = layers
    if (ends + layers * of_layer) * shape.itemsize > device.memory / 2:
        raise UserError(
            f"This machine has too little free memory to measure even {layers} layers of the target {recipe.target.path}: name a "
            "GPU of the table with --device."
        )
    what, remedy = f"No part of the target {recipe.target.path} can be built", "name a GPU of the table with --device"
    with foreign_code(what, remedy), no_init_weights(), torch.device(device.name):
        model = opener_of(config).from_config(
            config,
            dtype=DTYPES.get(planned.dtype, torch.bfloat16),
            attn_implementation=attention_of(config, recipe.target.attn_implementation),
        )
    model.tie_weights()
    block = torch.randn(2**16, device=device.name) / 50
    if getattr(text, "dtype", None) in (torch.bfloat16, torch.float16):  # whose products may be others in float32, too
        block = block.bfloat16().float()
    for parameter in model.parameters():
        _fill(parameter.data, block)
    target = Target(model, path=recipe.target.path, fingerprint="")
    pack_linears(target.model)
    return target


def _fill(values: Tensor, block: Tensor) -> None:
    """Write a block of numbers over and over: memory that was never written is not read as weights are."""
    flat, size = values.view(-1), len(block)
    whole = len(flat) // size * size
    flat[:whole].view(-1, size).copy_(block)
    flat[whole:].copy_(block[: len(flat) - whole])


def _time(job: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a job, or those of its first run where it is long.

    On a CPU only the time counts in which this process has a core: the plan is for a machine without other programs.
    """
    times: list[float] = []
    first = _seconds(job, device)
    if first > 2 * _SECONDS:
        return first
    while sum(times) < _SECONDS and len(times) < _REPEATS:
        times.append(_seconds(job, device))
    return median(times)


def _seconds(job: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        before = time.thread_time(), time.process_time()
        job()
        # The thread that gives out the work may sleep while others do it.
        return max(time.thread_time() - before[0], (time.process_time() - before[1]) / torch.get_num_threads())
    watch = Stopwatch(device)
    job()
    watch.lap("job")
    return watch.last
