"""Compare a training step of EAGLE-3 with that of speculators, and with the products in it: python -m scripts.bench.training

Both heads have the same weights and read the same text, a single document of which every token is learned, and their losses are
compared before anything is timed. speculators trains as it does on a CPU: its eager losses and torch's `sdpa` attention, without
torch.compile; it keeps the output projection as it is, and so does our head here. One thread, in turns, in float32 with AdamW.
The command installs speculators into a folder of its own by pip. Its range of transformers may end before the version here.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.machine import keep_freed_memory
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import Target
from draftsmith.train.schedule import build_optimizers
from scripts.bench.commands import facts_of, keep
from scripts.bench.gpu.shapes import SMALL, make_target

RIVAL = ("speculators==0.9.0", "hs-connectors==0.9.0", "openai", "jiter", "distro", "loguru", "sniffio")
"""What its training imports and is not here; it asks for more packages, for servers and other models."""
LAYERS = (1, 2, 4)
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
OPERATIONS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"),
    "attention": (_FLASH, f"{_FLASH}_backward"),
}
"""What a step cannot do without."""


@dataclass(frozen=True)
class Size:
    """A text's tokens, the width of head and target, both vocabularies, and the draft steps."""

    tokens: int
    hidden: int
    vocab: int
    draft_vocab: int
    steps: int


SIZES = {"narrow": Size(2048, 256, 8192, 2048, 7), "wide": Size(1024, 1024, 32768, 8192, 5)}


@dataclass(frozen=True)
class Trainer:
    """A head in training. loss: computes it, with its gradient. optimizer: of its parameters."""

    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Train a step."""
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_ours(size: Size) -> tuple[Eagle3Head, Target, TrainBatch]:
    """Return a head for a random target, and a text with random states."""
    heads = size.hidden // 64, size.hidden // 128
    shape = SMALL.__class__(size.hidden, 6, 11 * size.hidden // 4, *heads, size.vocab, 0, (1,), 0, 0, 4096)
    target = make_target(torch.device("cpu"), shape)
    target.model.float()
    vocab = torch.arange(size.draft_vocab) * (size.vocab // size.draft_vocab)
    options = Eagle3Options(
        layer_ids=list(LAYERS),
        draft_vocab_size=size.draft_vocab,
        ttt_steps=size.steps,
        norm_before_residual=True,
        train_lm_head=False,
    )
    head = Eagle3Head.build(options, target, vocab).train()
    ids = torch.randint(size.vocab, (1, size.tokens))
    last = nn.functional.rms_norm(torch.randn(1, size.tokens, size.hidden), (size.hidden,), eps=1e-6)
    logits = target.head.logits(last)
    batch = TrainBatch(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        torch.zeros_like(ids),
        torch.arange(size.tokens)[None],
        torch.randn(1, size.tokens, len(LAYERS) * size.hidden),
        last,
        vocab[logits[..., vocab].argmax(-1)],  # speculators leaves out no row
        logits.logsumexp(-1),
    )
    return head, target, batch


def train_ours(head: Eagle3Head, target: Target, batch: TrainBatch, size: Size) -> Trainer:
    """Return our way to train. Its loss is the sum of the steps' means, as that of speculators."""
    spec = LossSpec(decay=1.0)
    rows = [size.tokens - 2 - step for step in range(size.steps)]

    def loss() -> Tensor:
        scored = head_loss(head(batch, size.steps), batch, target.head, head.draft_vocab, spec)
        assert scored.step_rows.tolist() == rows
        means = scored.step_loss / scored.step_rows
        return scored.loss_sum * (means.sum() / scored.loss_sum).detach()

    (optimizer,) = build_optimizers(head, TrainSpec(lr=1e-4))
    return Trainer(loss, optimizer)


def train_theirs(head: Eagle3Head, target: Target, batch: TrainBatch, size: Size) -> Trainer:
    """Return the way of speculators, from a copy of the head's weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = head.config.__class__(**head.config.to_dict() | {"num_hidden_layers": 1, "attention_bias": False})
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=size.draft_vocab,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=size.steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config).train()
    ours = {name: x for name, x in head.state_dict().items() if name != "draft_vocab"}
    assert head.draft_vocab is not None
    added = {
        "verifier_norm.weight": torch.ones(size.hidden),
        "verifier_lm_head.weight": target.head.weight[head.draft_vocab],
    }
    left = model.load_state_dict({**ours, **added}, strict=False)
    assert not left.unexpected_keys, left
    assert set(left.missing_keys) <= {"t2d", "d2t"}, left
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in head.parameters() if p.requires_grad)
    losses = resolve_loss_config("kl_div", "eager")
    # Row t: x_{t+1} with the states at t, and the target at t+1; nothing is known of the token after the last one.
    learned = batch.mask[:, 1:].clone()
    learned[:, -1] = False
    inputs = {
        "hidden_states": batch.aux[:, :-1],
        "input_ids": batch.ids[:, 1:],
        "document_ids": batch.document[:, 1:],
        "position_ids": batch.position[:, 1:],
        "verifier_last_hidden_states": batch.last[:, 1:],
    }

    def loss() -> Tensor:
        _, found, _ = model(
            **inputs, loss_mask=learned.clone(), ttt_steps=size.steps, ttt_step_loss_decay=1.0, loss_config=losses
        )
        return found  # type: ignore[no-any-return]

    return Trainer(loss, torch.optim.AdamW(trained, lr=1e-4))


class Record(TorchDispatchMode):
    """Counts what `OPERATIONS` names by the sizes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if any(name in names for names in OPERATIONS.values()):
            shapes = tuple((tuple(x.shape), x.stride()) if isinstance(x, Tensor) else x for x in args)
            self.seen[func, shapes, tuple(sorted((kwargs or {}).items()))] += 1
        return func(*args, **(kwargs or {}))


def floor_of(trainer: Trainer) -> dict[str, Callable[[], float]]:
    """Return, of each kind of `OPERATIONS`, what measures the CPU seconds of a step's calls alone, on random numbers."""
    with Record() as record:
        trainer.loss().backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad()

    def seconds(kind: str) -> float:
        total = 0.0
        for (func, shapes, options), count in record.seen.items():
            if func._overloadpacket.__name__ in OPERATIONS[kind]:
                inputs = [
                    torch.empty_strided(*x).normal_() if isinstance(x, tuple) and isinstance(x[0], tuple) else x
                    for x in shapes
                ]
                func(*inputs, **dict(options))
                total += cpu_seconds(lambda: [func(*inputs, **dict(options)) for _ in range(count)])  # noqa: B023
        return total

    return {kind: partial(seconds, kind) for kind in OPERATIONS}


def cpu_seconds(job: Callable[[], object]) -> float:
    """Return what a job takes of this process."""
    started = time.process_time()
    job()
    return time.process_time() - started


def peak(trainer: Trainer) -> int:
    """Return the most bytes that loss and gradients take above weights, their gradients and the inputs."""
    trainer.loss().backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad(set_to_none=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.loss().backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def compare(size: Size, repeats: int) -> dict[str, Any]:
    """Return what a step takes in both ways, and its products alone."""
    torch.manual_seed(0)
    head, target, batch = make_ours(size)
    ways = {"draftsmith": train_ours, "speculators": train_theirs}
    trainers = {name: way(head, target, batch, size) for name, way in ways.items()}
    losses = {name: trainer.loss().item() for name, trainer in trainers.items()}
    assert abs(losses["draftsmith"] / losses["speculators"] - 1) < 1e-4, losses
    peaks = {name: peak(trainer) for name, trainer in trainers.items()}
    jobs: dict[str, Callable[[], float]] = {name: partial(cpu_seconds, one.step) for name, one in trainers.items()}
    jobs |= floor_of(trainers["draftsmith"])
    for trainer in trainers.values():
        trainer.step()
    turns = [{name: job() for name, job in jobs.items()} for _ in tqdm(range(repeats), unit="turn")]
    ours, theirs = ([turn[name] for turn in turns] for name in trainers)
    floor = [sum(turn[kind] for kind in OPERATIONS) for turn in turns]
    return {
        "size": vars(size),
        "loss": losses,
        "peak_memory_bytes": peaks,
        "peak_of_theirs": peaks["draftsmith"] / peaks["speculators"],
        "cpu_seconds_per_step": {name: median(turn[name] for turn in turns) for name in jobs},
        "of_theirs": median(a / b for a, b in zip(ours, theirs, strict=True)),
        "of_products_and_attention": median(a / b for a, b in zip(ours, floor, strict=True)),
        "turns": turns,
    }


def main(argv: list[str]) -> int:
    """Run the bench; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.training", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--rival", type=Path, help="the folder of an installed speculators; default: a temporary one")
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as temporary:
        folder = own.rival or Path(temporary)
        if not own.rival:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *RIVAL]
            subprocess.run(command, check=True)
        sys.path.append(str(folder))
        results = {name: compare(SIZES[name], own.repeats) for name in own.size or SIZES}
    shown = {name: {k: v for k, v in found.items() if k != "turns"} for name, found in results.items()}
    facts = facts_of("training", ["--repeats", str(own.repeats)])  # not the folder of an installed rival
    return keep(own.output, facts | {"rival": RIVAL[0]} | results, shown)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
