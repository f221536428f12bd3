"""The figures of a plan: one formula per property, over a recipe, a target's dimensions, and assumptions or measured rates.

Symbols: S conversations, p and a tokens of a prompt and of an answer, H target hidden, A aux layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftsmith.data.answers.generate import BATCHES_PER_CHUNK
from draftsmith.data.batch import CHUNK_BATCHES
from draftsmith.data.features.index import DTYPES
from draftsmith.data.features.store import estimate_bytes
from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost, TextCost
from draftsmith.heads.registry import find_method
from draftsmith.machine import Clocks, available_memory, memory_of
from draftsmith.recipe.schema import CHECKPOINTS, Recipe
from draftsmith.target.shape import TargetShape

BANDWIDTH_SHARE = 0.6
"""Share of the memory bandwidth that a decoding pass reaches, kernel launches included."""
ANSWER_BYTES = 11
"""Bytes on disk per token of an answers file: its id in decimals, and its text."""


@dataclass(frozen=True)
class Rates:
    """FLOP/s that a machine reached in this recipe's own work, FLOPs counted as in this file. forward: in passes over whole texts.
    passes: in a decoding pass, by the tokens that it reads, ascending. train: in a training pass. clocks: during the measurement."""

    forward: float
    passes: tuple[tuple[int, float], ...]
    train: float
    clocks: Clocks

    def of_pass(self, tokens: float) -> float:
        """Return the FLOP/s of a pass that reads so many tokens: a straight line over their logarithm between those measured."""
        sizes, rates = zip(*self.passes, strict=True)
        return float(np.interp(math.log(tokens), np.log(sizes), rates))


@dataclass(frozen=True)
class Device:
    """name: as on the command line. flops: bf16 tensor-core FLOP/s. bandwidth: memory bytes/s. memory: bytes, free
    ones of a machine that is measured. rates: as they were measured, None for a device of the table."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    rates: Rates | None = None

    @property
    def measured(self) -> bool:
        """Whether it is not of the table: its rates are measured, or are to be."""
        return self.name not in DEVICES


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (  # peaks from the makers' data sheets, dense, without sparsity
        Device("a100", 312e12, 2.04e12, 80e9),
        Device("h100", 989e12, 3.35e12, 80e9),
        Device("h200", 989e12, 4.8e12, 141e9),
        Device("b200", 2250e12, 8.0e12, 180e9),
        Device("l40s", 362e12, 0.864e12, 48e9),
        Device("rtx4090", 165e12, 1.008e12, 24e9),
        Device("mi300x", 1307e12, 5.3e12, 192e9),
    )
}


def find_device(name: str) -> Device:
    """Return the device of that name. Raises UserError for one that is not in the table."""
    if name.lower() not in DEVICES:
        raise UserError(f"--device {name!r} is not in the table: choose cpu, or one of {', '.join(DEVICES)}.")
    return DEVICES[name.lower()]


def device_here(device: str) -> Device:
    """Return the row of the table for torch's device, a GPU by the name that it gives itself, else a device to be measured."""
    if device != "cpu":
        calls_itself = torch.cuda.get_device_name(device).lower().replace(" ", "")
        row = next((row for name, row in DEVICES.items() if name in calls_itself), None)
        # A part of one, or one for laptops, is slower than its name says.
        if row is not None and not any(part in calls_itself for part in ("mig", "laptop")):
            return replace(row, memory=min(row.memory, float(memory_of(device))))
    return Device(device, 0.0, 0.0, float(available_memory(torch.device(device))))


@dataclass(frozen=True)
class Assumptions:
    """What a plan assumes about hardware and texts. gpus: of answers, hidden states and training; other stages use one. utilisation: share of the peak FLOP/s
    that training and prefill reach, of a device that was not measured. prompt, answer: mean tokens per text. evaluated: of an
    answer of the evaluation, which may be as long as its own section says. texts: to learn from of a conversation, one for each answer
    where the chat template renders earlier turns otherwise."""

    device: Device
    gpus: int
    utilisation: float
    prompt: int
    answer: int
    evaluated: int
    texts: float = 1.0


@dataclass(frozen=True)
class PlannedTarget:
    """A target's config, its dimensions, and the dtype that the recipe runs it in."""

    config: Any
    shape: TargetShape
    dtype: str


@dataclass(frozen=True)
class Estimate:
    """The figures of a recipe. Times in seconds, sizes in bytes. prompts: of the evaluation, by slice."""

    recipe: Recipe
    target: TargetShape
    head: HeadCost
    samples: int
    given: Assumptions
    prompts: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """Tokens of all conversations, S * (p + a)."""
        return self.samples * (self.given.prompt + self.given.answer)

    def pass_seconds(self, texts: float, tokens: float, context: float, itemsize: int | None = None) -> float:
        """Seconds of a decoding pass that reads so many tokens of each of `texts` texts, behind `context` tokens: as measured; else
        bound by FLOPs or by reading weights, keys and values. itemsize: bytes per number where these are not the target's."""
        device, target = self.given.device, self.target
        size = 1.0 if itemsize is None else itemsize / target.itemsize
        flops = texts * tokens * target.step_flops(context)
        if device.rates is not None:
            return size * flops / device.rates.of_pass(texts * tokens)
        read = target.touched_bytes(texts * tokens) + texts * context * target.kv_bytes
        return max(size * read / (device.bandwidth * BANDWIDTH_SHARE), self.seconds(flops))

    @property
    def context(self) -> float:
        """Tokens before the middle token of an answer, p + a/2."""
        return self.given.prompt + self.given.answer / 2

    @property
    def answer_seconds(self) -> float:
        """Seconds of prefill, bound by FLOPs, and of decoding, shared out by chunks.

        A chunk has c * b prompts, of which b are answered at a time. Where an answer ends, a waiting prompt takes its row: none waits
        after (c - 1) * a passes. The longest answer ends max_new_tokens passes later. Servers take none of this machine's time.
        """
        spec, given = self.recipe.answers, self.given
        if spec.servers:
            return 0.0
        chunk = min(self.samples, spec.batch * BATCHES_PER_CHUNK)
        passes = max(0.0, chunk / spec.batch - 1) * given.answer + spec.max_new_tokens
        rows = max(1.0, min(spec.batch, chunk * given.answer / passes))
        prefill = self.seconds(self.samples * self.target.forward_flops(given.prompt))
        return (prefill + self.samples / chunk * passes * self.pass_seconds(rows, 1, self.context)) / self.given.gpus

    @property
    def target_bytes(self) -> float:
        """Memory of the target's weights on a GPU. Processes that split its layers have its embeddings and output projection whole, too."""
        spec = self.recipe.target
        whole = self.target.end_bytes if spec.tensor_parallel > 1 else 0
        return self.target.weight_bytes / (spec.gpus * spec.tensor_parallel) + whole

    @property
    def answer_bytes(self) -> float:
        """Memory of answering: the weights, and keys and values for the longest row of a batch in every row."""
        longest = 0 if self.recipe.answers.servers else min(self.recipe.data.max_length, self.target.context)
        cached = self.recipe.answers.batch * longest * self.target.kv_bytes
        spec = self.recipe.target
        return self.target_bytes + cached / (spec.gpus * spec.tensor_parallel)

    @property
    def answer_file_bytes(self) -> int:
        """Bytes on disk of the answers."""
        return ANSWER_BYTES * self.tokens

    @property
    def store_bytes(self) -> int:
        """Bytes on disk: per token (A+1)*H states and 13 bytes for id, mask, top1 and logsumexp (see `estimate_bytes`)."""
        named, stored = self.recipe.features.dtype, self.recipe.features.layer_ids
        dtype = next(n for n, d in DTYPES.items() if d.itemsize == self.target.itemsize) if named == "auto" else named
        layers = self.head.aux_layers if stored is None else len(stored)
        return estimate_bytes(self.tokens, self.target.hidden, layers, dtype)

    @property
    def feature_flops(self) -> float:
        """FLOPs of one pass of the target over every text, logits included."""
        return self.samples * self.target.forward_flops(self.given.prompt + self.given.answer)

    @property
    def feature_seconds(self) -> float:
        """Seconds of extraction, which every GPU takes its share of."""
        return self.seconds(self.feature_flops) / self.given.gpus

    @property
    def feature_bytes(self) -> float:
        """Memory of extraction: the weights, and the states of a chunk of passes."""
        states = CHUNK_BATCHES * self.recipe.features.batch_tokens * self.store_bytes / self.tokens
        return self.target_bytes + states

    @property
    def text(self) -> TextCost:
        """What a training pass takes for one text."""
        return self.head.of_text(self.given.prompt, self.given.answer, self.recipe.train.loss)

    @property
    def steps(self) -> int:
        """Optimizer steps: per epoch, the training tokens over rows * row_tokens * accumulation * GPUs."""
        spec = self.recipe.train
        share = 1 - min(1.0, self.recipe.data.heldout / self.samples)
        window = spec.rows * spec.row_tokens * spec.accumulation * self.given.gpus
        steps = spec.epochs * math.ceil(self.tokens * share / window)
        return min(steps, spec.max_steps or steps)

    @property
    def train_flops(self) -> float:
        """FLOPs of the head's forward and backward passes over all micro-batches."""
        return self.seen_tokens / (self.given.prompt + self.given.answer) * self.text.flops

    @property
    def seen_tokens(self) -> int:
        """Tokens that training reads, over all epochs and GPUs."""
        spec = self.recipe.train
        return self.steps * spec.accumulation * self.given.gpus * spec.rows * spec.row_tokens

    @property
    def read_rate(self) -> float:
        """Bytes per second that a store must deliver to all GPUs together, so that training does not wait for it."""
        stored = self.store_bytes / self.tokens * self.seen_tokens
        return stored * self.given.gpus / self.train_pass_seconds(self.train_flops)

    @property
    def online_flops(self) -> float:
        """FLOPs of the target where nothing is stored: a pass over every text in every epoch."""
        return self.feature_flops / self.tokens * self.seen_tokens

    @property
    def train_seconds(self) -> float:
        """Seconds of training and of the evaluations on the held-out answers, which all GPUs share: forward passes alone take a third of
        the FLOPs."""
        spec, data = self.recipe.train, self.recipe.data
        looks = min(spec.evaluations, self.steps)
        looked_at = looks * data.heldout * (self.given.prompt + self.given.answer) / self.seen_tokens
        own = self.train_pass_seconds(self.train_flops * (1 + looked_at / 3) / self.given.gpus)
        online = self.online_flops * (1 + looked_at) if self.recipe.features.source == "online" else 0.0
        return own + self.seconds(online) / self.given.gpus

    def train_pass_seconds(self, flops: float) -> float:
        """Return the time that so many FLOPs of the head take on one GPU."""
        rates = self.given.device.rates
        return self.seconds(flops) if rates is None else flops / rates.train

    @property
    def train_file_bytes(self) -> float:
        """Bytes on disk of training: the best head, an adapter for itself, and the checkpoints with their optimizer states, of which one
        more than are kept is there while it is written."""
        head, muon = self.head, self.recipe.train.optimizer == "muon"
        adapter = 0 if head.rank is None else 4 * head.parameters
        checkpoint = 4 * head.weights + adapter + 8 * head.parameters - (4 * head.matrices if muon else 0)
        return 4 * head.weights + adapter + (CHECKPOINTS + 1) * checkpoint

    @property
    def export_bytes(self) -> float:
        """Bytes on disk of the exported head, and of the merged model where the target is tuned."""
        dtype = self.recipe.export.dtype
        size = self.target.itemsize if dtype == "auto" else DTYPES[dtype].itemsize
        tuned = self.head.tuned_parameters
        merged = self.target.parameters if tuned and self.recipe.export.adapter != "keep" else tuned
        embeddings = self.recipe.export.include_embeddings * self.target.vocab * self.target.hidden
        return float(size * (self.head.weights + merged + embeddings))

    @property
    def train_bytes(self) -> float:
        """Memory per GPU: what is loaded of the target, the head with its optimizer, one training pass, and the batches at hand."""
        return self.train_target_bytes + self.head_bytes + self.pass_bytes + self.batch_bytes

    @property
    def train_target_bytes(self) -> float:
        """Memory of the target on the first GPU of a process that trains. Those that are started for a finished store have its embeddings
        and output projection alone."""
        needed = find_method(self.recipe.method).needs_layers(self.recipe.head)
        if self.recipe.features.source == "store" and self.given.gpus > 1 and not needed:
            return self.target.end_bytes
        return self.target_bytes

    @property
    def head_bytes(self) -> float:
        """Weights, gradients and optimizer state of the head."""
        return parameter_bytes(self.head, self.recipe.train.optimizer)

    @property
    def pass_bytes(self) -> float:
        """Activations of one micro-batch, and a piece of its loss."""
        spec = self.recipe.train
        texts = spec.rows * spec.row_tokens / (self.given.prompt + self.given.answer)
        return self.text.memory(texts, self.given.device.name)

    @property
    def batch_bytes(self) -> float:
        """Hidden states and tokens of the micro-batches at hand: on a GPU of the one in work and of the copy of the next, where they are
        computed online of one alone; on a CPU of the feed's whole ring."""
        spec, features = self.recipe.train, self.recipe.features
        size = self.store_bytes / self.tokens * spec.rows * spec.row_tokens
        if features.source == "online":
            return size
        return size * (spec.accumulation + spec.workers if self.given.device.name == "cpu" else 2)

    @property
    def evaluate_bytes(self) -> float:
        """Memory of the target and of a tuned target's own weights. Where greedy texts are compared in float32, copies of both in
        float32 are loaded too."""
        exact = self.recipe.evaluate.lossless and 0 in self.recipe.evaluate.temperatures
        size = self.target.itemsize
        tuned = self.head.tuned_parameters * size / self.recipe.target.gpus
        return (self.target_bytes + tuned) * (1 + 4 / size if exact and size < 4 else 1)

    def seconds(self, flops: float) -> float:
        """Return the time that so many FLOPs of the target take on one GPU, in passes over whole texts."""
        rates = self.given.device.rates
        return flops / (self.given.device.flops * self.given.utilisation if rates is None else rates.forward)


def parameter_bytes(cost: HeadCost, optimizer: str) -> float:
    """Return the bytes of weights, gradients, optimizer state and copies of all trained parameters, per GPU.

    Per parameter: fp32 weight 4, gradient 4 (with several processes in DDP's buckets), AdamW's two moments 8 (Muon's one 4, for the
    matrices inside the head), autocast's bf16 copy 2. Where an adapter is trained, the head's own weights are there besides; of those
    that it changes their sum with it 4, its gradient 4 and its copy 2, of the others two copies at a time, as autocast keeps none.
    """
    frozen = 0 if cost.rank is None else 8 * cost.weights + 6 * cost.adapted
    return cost.parameters * 18 + frozen - cost.matrices * (4 if optimizer == "muon" else 0)
