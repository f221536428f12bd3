"""What every optimizer step takes: the micro-batches of each process, the learning rate, and the optimizers themselves.

A window is the micro-batches of one optimizer step over all processes and accumulation steps. The plan is a pure function of the recipe
and the lengths: resuming is skipping, and 2 processes see what 1 process with twice the accumulation sees. AdamW takes everything, or
Muon (Jordan et al. 2024) the weight matrices inside the head and AdamW its output projection, adapters, norms and biases.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed, nn
from xxhash import xxh3_64_hexdigest

from draftsmith.data.batch import WINDOW_SHARDS, plan_batches
from draftsmith.data.features.store import FeatureSource
from draftsmith.heads.base import DraftHead, Trains
from draftsmith.machine import faster_in_bf16
from draftsmith.recipe.schema import TrainSpec


@dataclass(frozen=True)
class TrainData:
    """Features and which of them are trained on and which are held out. identity: what identifies them, for dashboards."""

    source: FeatureSource
    train: list[int]
    heldout: list[int]
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Micro:
    """A micro-batch: sample indices per packed row. `counts` is False for a filler that completes the last window."""

    rows: tuple[tuple[int, ...], ...]
    counts: bool


@dataclass(frozen=True)
class Schedule:
    """All micro-batches of a training run, in order. shards: of `plan_batches`."""

    lengths: Sequence[int]
    spec: TrainSpec
    seed: int
    processes: int
    shards: Tensor | None = None

    @property
    def window(self) -> int:
        """Micro-batches per optimizer step, over all processes."""
        return self.processes * self.spec.accumulation

    @cached_property
    def order(self) -> str:
        """A digest of the order of samples, where it follows the shards; "" where it follows from their number and the seed."""
        if self.shards is None or len(self.shards.unique()) <= WINDOW_SHARDS:
            return ""
        counted = (micro.rows for micro in self.epoch(0) if micro.counts)
        return xxh3_64_hexdigest(repr([*counted]).encode())

    def epoch(self, number: int) -> list[Micro]:
        """Return epoch `number`'s micro-batches, filled up to whole windows."""
        plan = plan_batches(
            self.lengths,
            row_tokens=self.spec.row_tokens,
            rows=self.spec.rows,
            seed=self.seed,
            epoch=number,
            shards=self.shards,
        )
        micros = [Micro(tuple(tuple(row) for row in batch), True) for batch in plan]
        missing = -len(micros) % self.window
        return micros + [Micro(micros[0].rows, False)] * missing

    def share(self, number: int, rank: int, skip_steps: int = 0) -> list[Micro]:
        """Return the micro-batches of process `rank` in an epoch, after `skip_steps` optimizer steps."""
        micros = self.epoch(number)[skip_steps * self.window :]
        return micros[rank :: self.processes]


_Groups = dict[tuple[float, bool], list[nn.Parameter]]
"""Parameters by the multiple of the learning rate, and by whether they decay."""


def build_optimizers(head: nn.Module, spec: TrainSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a head's trainable parameters, one group per multiple of the learning rate that the head
    names (`DraftHead.lr_factor`), norms, biases and `Trains.no_decay` apart, which no weight decay pulls to 0; every group
    remembers its peak as `peak_lr`."""
    matrices: _Groups = {}
    others: _Groups = {}
    factor_of = head.lr_factor if isinstance(head, DraftHead) else lambda name: 1.0
    trains = head.trains if isinstance(head, DraftHead) else Trains()
    no_muon = ("lm_head", "embed_tokens", *trains.no_muon)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            inner = parameter.ndim == 2 and not any(part in name for part in no_muon)
            chosen = matrices if inner and spec.optimizer == "muon" else others
            decays = not spec.weight_decay or (parameter.ndim > 1 and not any(part in name for part in trains.no_decay))
            chosen.setdefault((factor_of(name), decays), []).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        groups = _groups(matrices, spec.muon_lr)
        optimizers.append(Muon(groups, lr=spec.muon_lr, weight_decay=spec.weight_decay))
    if others:
        betas = (spec.betas[0], spec.betas[1])
        groups = _groups(others, spec.lr)
        # Fused: one pass over the weights, which looks at `found_inf` on the device.
        adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=betas, weight_decay=spec.weight_decay, fused=True)
        adamw.register_load_state_dict_pre_hook(_stay_fused)
        optimizers.append(adamw)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _stay_fused(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint, which may be of an earlier version, whose optimizer was not fused."""
    return {**state, "param_groups": [{**group, "fused": True, "foreach": None} for group in state["param_groups"]]}


def _groups(parameters: _Groups, lr: float) -> list[dict[str, Any]]:
    return [
        {"params": some, "lr": lr * factor} | ({} if decays else {"weight_decay": 0.0})
        for (factor, decays), some in parameters.items()
    ]


def lr_factor(step: int, total: int, spec: TrainSpec) -> float:
    """Return the share of the peak rate at `step` of `total`: linear warmup, then a cosine down to `final_lr`.

    A pure function of the step, so that a resumed run needs no scheduler state.
    """
    warmup = max(1, round(spec.warmup * total))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return spec.final_lr + (1 - spec.final_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_lr(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


class Muon(torch.optim.Muon):
    """torch's Muon, which on a device without instructions for bf16 multiplies in fp32, and shares its work among processes.

    torch makes the products in bf16 everywhere; most processors before AVX512-BF16 and AMX take ten times as long for it. Processes
    that train together have the same gradients: each orthogonalises its share of the matrices and sends them to the others.
    State and arguments are torch's, so that checkpoints fit either. As of torch's fused optimizers, a step changes nothing where
    the attribute `found_inf` is 1.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pending: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, parameters, gradients, buffers)
            for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
                self._change(buffer, buffer.lerp(gradient, 1 - group["momentum"]))
                pending.append(
                    (parameter, gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer, group)
                )
        # Each update is made by one of the processes.
        together = distributed.is_available() and distributed.is_initialized()
        size, rank = (distributed.get_world_size(), distributed.get_rank()) if together else (1, 0)
        # The largest first, each to the process that has least to do: as work counts rows * rows * columns.
        work, owner = [0.0] * size, [0] * len(pending)
        for index in sorted(range(len(pending)), key=lambda i: -pending[i][0].numel()):
            owner[index] = work.index(min(work))
            work[owner[index]] += pending[index][0].numel() * min(pending[index][0].shape)
        made = [
            orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
            if owner[index] == rank
            else torch.empty_like(update)
            for index, (_, update, group) in enumerate(pending)
        ]
        if size > 1:
            made = [update.contiguous() for update in made]
            sent = [distributed.broadcast(update, owner[index], async_op=True) for index, update in enumerate(made)]
            for one in sent:
                one.wait()
        for (parameter, _, group), update in zip(pending, made, strict=True):
            rows, columns = parameter.shape
            assert group["adjust_lr_fn"] in (None, "original"), "other ways to adjust the rate are torch's alone"
            changed = parameter * (1 - group["lr"] * group["weight_decay"])
            self._change(parameter, changed.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5))
        return loss

    def _change(self, value: Tensor, new: Tensor) -> None:
        broken = getattr(self, "found_inf", None)
        value.copy_(new if broken is None else torch.where(broken > 0, value, new))


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return `matrix` [m, n] with singular values near 1, in its dtype, by Newton-Schulz iteration in bf16 where the device has
    instructions for it, else in fp32."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16 if faster_in_bf16(matrix.device) else torch.float32)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)
