"""What a GPU does with a target of 8 billion parameters, made of random numbers where it runs: no weights are read.

Each part yields facts for gpu_check.json: milliseconds (`ms`), bytes, tokens per second, and what they are next to the
machine's own floor. Acceptance is known or zero here, since random weights can be drafted by nobody; see the embedded
target's part of the check for a trained head.
"""

import json
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import OnlineSource, compute_features, extract
from draftsmith.decoder.answers import Decoded, Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.loop import Stopwatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.costs import measure_table
from draftsmith.eval.drafters.baselines import plain
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.results.result import TargetInfo
from draftsmith.heads.base import DraftHead
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.layers.compiled import compiling
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.machine import read_bandwidth
from draftsmith.recipe.schema import Recipe, TrainSpec
from draftsmith.target.kernels import fuse_norms, pack_linears
from draftsmith.target.target import Target
from draftsmith.train.feed import plan_batch
from draftsmith.train.loop import train
from draftsmith.train.schedule import TrainData, build_optimizers

ALPHA, K = 0.8, 4
STEPS = 7
"""Draft steps of the head's training."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of what is asked of it; tokens are counted, the rest are widths."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    groups: int
    vocab: int
    draft_vocab: int
    contexts: tuple[int, ...]
    answer: int
    row: int
    long: int


EIGHT_BILLION = Shape(4096, 32, 14336, 32, 8, 128256, 32000, (512, 8192), 128, 2048, 32768)
"""Llama-3.1-8B."""
SMALL = Shape(64, 8, 96, 4, 2, 512, 128, (32, 64), 8, 64, 128)
"""To try the parts anywhere."""


Facts = Iterator[tuple[str, Any]]
"""The pieces of a part, each as soon as it is known."""


def machine_limits(device: torch.device, shape: Shape) -> Facts:
    """Measure what the device can do at best: products, memory, copies."""
    yield "bf16_flops", _product_flops(device, shape)
    yield "read_bandwidth", read_bandwidth(device)
    size = 2**28 if shape is EIGHT_BILLION else 2**16
    there = torch.empty(size, dtype=torch.uint8, device=device)
    for name in ("pageable", *(["pinned"] if device.type == "cuda" else [])):
        here = torch.empty(size, dtype=torch.uint8, pin_memory=name == "pinned")
        yield f"to_device_{name}", size / (_best(device, partial(there.copy_, here)) / 1e3)
        yield f"to_host_{name}", size / (_best(device, partial(here.copy_, there)) / 1e3)


def _product_flops(device: torch.device, shape: Shape) -> float:
    n = 8192 if shape is EIGHT_BILLION else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / (_best(device, lambda: a @ b) / 1e3)


def decoding(device: torch.device, shape: Shape) -> Facts:
    """Time answers of the target alone, with drafts of known acceptance and with an untrained head, beside transformers'
    `generate`; then target passes and drafts by batch and context."""
    target = make_target(device, shape)
    yield "weights_bytes", target.weight_bytes
    # Of the embedding a pass reads a row.
    yield "floor_ms", 1e3 * (target.weight_bytes - target.embedding.nbytes) / read_bandwidth(device)
    system = head_system("eagle3", make_head(target, shape).to(target.dtype).eval(), K, K)
    ids = [7 + i % 400 for i in range(shape.contexts[0])]
    request = Request("p", "random", tuple(ids), shape.answer, ignore_eos=True)
    (alone,) = _answer(target, TargetAlone, request).generations
    known = {tuple(ids): alone.output_ids}
    few = replace(request, max_new_tokens=shape.answer // 8)
    drafters: dict[str, Callable[[], Drafter]] = {
        "alone": TargetAlone,
        "known": lambda: KnownAcceptance(known, ALPHA, K, target.vocab_size),
        "eagle3": lambda: system.make(K),
    }
    for name, make in drafters.items():
        answer = partial(_answer, target, make)
        answer(few)
        done, seconds = _timed(device, partial(answer, request))
        (found,) = done.generations
        facts = {
            "tokens_per_second": len(found.output_ids) / seconds,
            "rounds": len(found.rounds),
            "seconds": dict(done.seconds),
            "same_text": found.output_ids == alone.output_ids,
        }
        yield name, facts | {"waits_by_line": waits_of(device, partial(answer, few))}
    target.model.generation_config.eos_token_id = None
    generate = plain(target)
    generate.decode([few], Sampling())
    timed = generate.decode([request], Sampling())
    yield "generate", {"tokens_per_second": len(timed.generations[0].output_ids) / sum(timed.seconds.values())}
    yield "profile", _profile(device, partial(_answer, target, TargetAlone, few))
    info = TargetInfo("random", "0")
    for context, rows in product(shape.contexts, (1, 8)):
        places = {(rows, context)}
        table = measure_table(
            target, info, [system], ids, [Sampling()], places=places, command="gpu_check", seconds=0.5
        )
        yield f"batch {rows}, context {context}", asdict(table.points[0]) if table.points else "out of memory"


def training(device: torch.device, shape: Shape) -> Facts:
    """Time a training step of an EAGLE-3 head on a batch that is at hand, with its FLOPs, its waits and its peak of memory."""
    target, most = make_target(device, replace(shape, layers=8)), _product_flops(device, shape)
    for rows in (2, 8):
        with _until_memory_ends() as facts:
            batch = make_batch(target, rows, shape.row)
            facts |= time_step(target, make_head(target, shape).to(device), batch)
            facts["share_of_products"] = facts["flops_per_second"] / most
        yield f"{rows} x {shape.row}", facts


def sources(device: torch.device, shape: Shape) -> Facts:
    """Train from states computed online and from a store, through the whole training loop; time the extraction too."""
    target = make_target(device, shape)
    length = shape.row // 2
    samples = make_samples(target, 66, length)
    layers = target.default_layer_ids()
    spec = TrainSpec(epochs=1, row_tokens=shape.row, rows=4, precision="bf16", evaluations=1, loss=LossSpec(decay=0.8))
    with tempfile.TemporaryDirectory() as folder:
        tokens = 4 * shape.row
        store, seconds = _timed(
            device, lambda: extract(target, samples, Path(folder) / "features", layer_ids=layers, batch_tokens=tokens)
        )
        yield "extract", {"tokens_per_second": len(samples) * length / seconds, "seconds": seconds}
        online = OnlineSource(target, samples, layers, batch_tokens=tokens)
        # The first training of a process compiles, which belongs to none of the three.
        first = TrainData(store, list(range(64)), [64, 65])
        train(Recipe(train=replace(spec, max_steps=1)), target, make_head(target, shape), first, Path(folder) / "first")
        for name, source in (("online", online), ("store", store), ("store again", store)):
            data, where = TrainData(source, list(range(64)), [64, 65]), Path(folder) / name
            head = make_head(target, shape)
            _, seconds = _timed(device, partial(train, Recipe(train=spec), target, head, data, where))
            summary = json.loads((where / "summary.json").read_text(encoding="utf-8"))
            kept = {key: summary[key] for key in ("tokens", "train_seconds", "tokens_per_second")}
            yield name, kept | {"seconds_with_evaluation_and_checkpoints": seconds}


def long_document(device: torch.device, shape: Shape) -> Facts:
    """Take one long document through extraction, through the reading of a prompt and through a training step."""
    target = make_target(device, replace(shape, layers=8))
    (sample,) = make_samples(target, 1, shape.long)
    with _until_memory_ends() as facts:
        layers = target.default_layer_ids()
        facts["ms"] = _best(device, lambda: compute_features(target, [sample], layers, target.dtype), 2)
    yield "extraction", facts
    with _until_memory_ends() as facts:
        request = Request("long", "random", tuple(sample.ids.tolist()), 4, ignore_eos=True)
        facts["ms"] = _best(device, partial(_answer, target, TargetAlone, request), 2)
    yield "prompt", facts
    with _until_memory_ends() as facts:
        batch = make_batch(target, 1, shape.long)
        facts |= time_step(target, make_head(target, shape).to(device), batch)
    yield "training step", facts


def _answer(target: Target, make: Callable[[], Drafter], request: Request) -> Decoded:
    return decode_batch(target, make(), [request], Sampling())


def make_target(device: torch.device, shape: Shape) -> Target:
    """Return a random Llama in bf16, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=2 * max(shape.long, *shape.contexts),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    target = Target(model, path="random", fingerprint="0")
    pack_linears(target.model)
    fuse_norms(target.model)
    return target


def make_head(target: Target, shape: Shape) -> DraftHead:
    """Return an untrained EAGLE-3 head in fp32 with a draft vocabulary."""
    vocab = torch.arange(shape.draft_vocab, device=target.device) * (target.vocab_size // shape.draft_vocab)
    return methods()["eagle3"].build(Eagle3Options(ttt_steps=STEPS, draft_vocab_size=shape.draft_vocab), target, vocab)


def make_samples(target: Target, count: int, length: int) -> list[Tokenized]:
    """Return random texts whose second half is to be learned."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (count, length), generator=generator)
    return [Tokenized(ids[i], torch.arange(length) >= length // 2, f"s{i}", "random") for i in range(count)]


def make_batch(target: Target, rows: int, length: int) -> TrainBatch:
    """Return packed rows of two documents each, all of whose tokens but the first half of a document are learned."""
    samples = make_samples(target, 2 * rows, length // 2)
    features = compute_features(target, samples, target.default_layer_ids(), target.dtype)
    return collate([features[2 * i : 2 * i + 2] for i in range(rows)], length)


def time_step(target: Target, head: DraftHead, batch: TrainBatch) -> dict[str, Any]:
    """Return what forward, loss, backward and optimizer take for a batch that is planned and brought to the device before."""
    device, spec = target.device, TrainSpec(precision="bf16", loss=LossSpec(decay=0.8))
    optimizers = build_optimizers(head.train(), spec)
    batch = plan_batch(batch, head, spec.loss, device).batch.to(device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            output = head(batch, STEPS)
        loss = head_loss(output, batch, target.head, head.draft_vocab, spec.loss)
        (loss.loss_sum / loss.rows).backward()
        nn.utils.clip_grad_norm_(head.parameters(), spec.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with compiling(None, device):  # as training does
        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = _best(device, step, 5)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        seen = {"waits_by_line": waits_of(device, step), "profile": _profile(device, step)}
    # Without attention over packed documents, whose operation torch does not count; a small part at these lengths.
    packed = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    with FlopCounterMode(display=False, custom_mapping={name: lambda *_, **__: 0 for name in packed}) as counter:
        step()
    flops = counter.get_total_flops()
    tokens = int((batch.document >= 0).sum())
    return {"ms": ms, "tokens_per_second": 1e3 * tokens / ms, "flops": flops, "flops_per_second": flops / ms * 1e3} | {
        "peak_memory_bytes": peak,
        **seen,
    }


def waits_of(device: torch.device, job: Callable[[], object]) -> dict[str, int]:
    """Run a job and return how often each line of ours, or of transformers, waited for the GPU."""
    if device.type != "cuda":
        return {}
    counts: Counter[str] = Counter()

    def note(*_arguments: object, **_options: object) -> None:
        known = ("draftsmith", "transformers")
        ours = [frame for frame in traceback.extract_stack() if any(name in frame.filename for name in known)]
        counts[f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}" if ours else "elsewhere"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            job()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(counts.most_common())


def _profile(device: torch.device, job: Callable[[], object]) -> dict[str, Any]:
    """Return a job's kernels: how many, their time in all, and those that take most."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        job()
        torch.cuda.synchronize(device)
    kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    rows = sorted(kernels, key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in kernels),
        "ms": sum(event.self_device_time_total for event in kernels) / 1e3,
        "most": [{"name": e.key[:100], "count": e.count, "ms": e.self_device_time_total / 1e3} for e in rows[:20]],
    }


def _timed(device: torch.device, job: Callable[[], Any]) -> tuple[Any, float]:
    """Run a job once; return its value and its seconds."""
    watch = Stopwatch(device)
    value = job()
    watch.lap("job")
    return value, watch.last


def _best(device: torch.device, job: Callable[[], object], repeats: int = 5) -> float:
    """Return the milliseconds of the fastest of a few runs, after one that warms up."""
    return min(1e3 * _timed(device, job)[1] for _ in range(repeats + 1))


@contextmanager
def _until_memory_ends() -> Iterator[dict[str, Any]]:
    """Yield the facts of a piece of a part; where it takes more memory than there is, they say so, and the part goes on."""
    facts: dict[str, Any] = {}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield facts
    except torch.OutOfMemoryError as error:
        facts["out_of_memory"] = str(error).split(".")[0]
    if torch.cuda.is_available():
        facts.setdefault("peak_memory_bytes", torch.cuda.max_memory_allocated())


PARTS = {
    "limits": machine_limits,
    "decoding": decoding,
    "training": training,
    "sources": sources,
    "long": long_document,
}
