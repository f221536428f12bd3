"""The clock of training, and a head's loss, accuracy and simulated tau on held-out answers, with what it fits to them after training."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from draftsmith.data.batch import Batch, TrainBatch, plan_batches
from draftsmith.data.features.store import FeatureSource
from draftsmith.decoder.answers import Tally, total
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.acceptance import acceptance, find_answers, simulate
from draftsmith.heads.base import DraftHead, HeadOutput, drafting
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.progress import say
from draftsmith.target.target import Target, TargetHead
from draftsmith.train.feed import read_batch
from draftsmith.train.parallel import Found, over_ranks
from draftsmith.train.process import world
from draftsmith.train.steps import tuned_figures


@dataclass
class Pace:
    """The clock of this process; its readings never reach files that a resume must reproduce."""

    first_tokens: int
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.perf_counter)

    def figures(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Return what dashboards get beside every step's record: tokens per second of training since the process began, without
        evaluations and checkpoints, and memory, of a GPU the peak."""
        on_gpu = device.type == "cuda"
        used = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        speed = (tokens - self.first_tokens) / max(self.seconds, 1e-9)
        return {"tokens_per_second": speed, "memory_gib": used / 2**30}


@dataclass(frozen=True)
class HeldOut:
    """Figures of a head on the held-out answers.

    loss: per supervised row, over all answers and per slice, of the logits that drafts are made of: in training some heads have losses
    beside it (Domino, XPress, DFlash with a variable prefix). accuracy, acceptance: per step.
    tau: simulated accepted length at K drafts, over all answers and per slice. chance: the accuracy of always guessing
    the target's most common choice. more: "tuned" -> how far a tuned target is from the original (see `tuned_figures`), and
    "selector" -> what a head's selector is worth (see `_selector_figures`), where there are such. A tuned target verifies by its own distribution, but tau is an approximation, since the answers
    are the original's.
    """

    loss: float
    loss_by_slice: dict[str, float]
    accuracy: list[float]
    acceptance: list[float]
    tau: float
    tau_by_slice: dict[str, float]
    chance: float
    more: dict[str, Any]


def make_heldout_batches(source: FeatureSource, index: Sequence[int], row_tokens: int, rows: int) -> list[Batch]:
    """Return the held-out batches for the whole run, as samples of `source`, each of one slice."""
    batches: list[Batch] = []
    for name in sorted({source.slices[i] for i in index}):
        # One slice per batch, so that its loss is the slice's.
        chosen = [i for i in index if source.slices[i] == name]
        plan = plan_batches([source.lengths[i] for i in chosen], row_tokens=row_tokens, rows=rows, seed=0, epoch=0)
        batches += [[[chosen[i] for i in row] for row in batch] for batch in plan]
    return batches


@dataclass(frozen=True)
class _Passed:
    """What the pass of a held-out batch adds to the figures. sums: float64 [3, S] right guesses, acceptance and rows by step. tuned: float64 [4]
    of `LossOutput.tuned`. likeliest: [R] the target's choice per row. selector, plain: of a head that has one, [2, S] of
    `LossOutput.selector`, and the tallies of drafts without it."""

    slice_name: str
    loss: float
    divisor: float
    sums: Tensor
    tuned: Tensor | None
    likeliest: Tensor
    tallies: list[Tally]
    selector: Tensor | None
    plain: list[Tally]


def _fill_nothing(source: FeatureSource, head: DraftHead) -> None:
    """Compute what others ask of a target that they share with this process, which has no samples of its own."""
    source.fill([], [], head.reads.layer_ids)


@torch.no_grad()
def evaluate_heldout(
    head: DraftHead,
    source: FeatureSource,
    batches: Sequence[Batch],
    row_tokens: int,
    target_head: TargetHead,
    spec: LossSpec,
    sampling: Sampling,
    num_speculative_tokens: int,
) -> HeldOut:
    """Evaluate the head on the held-out answers: one training pass, without training's noise, gives the loss and every
    acceptance probability. Each process takes a share of `batches` and gets the figures of all."""
    train_steps, num_speculative_tokens = head.trains.steps, head.clamp_draft_length(num_speculative_tokens)
    device = next(head.parameters()).device

    def look(_: int, plan: Batch) -> _Passed:
        batch = read_batch(source, plan, head.reads.layer_ids, row_tokens).to(device)
        with drafting(head):
            output = head(batch, max(train_steps, num_speculative_tokens))
            trained = HeadOutput(output.steps[:train_steps], output.tuned)
            scored = head_loss(trained, batch, target_head, head.draft_vocab, spec)
            divisor = loss_divisor(batch, spec, head) if scored.weights is None else scored.weights
            if head.drafts.own_pass and num_speculative_tokens != train_steps:
                output = head(batch, num_speculative_tokens)
            accepted = acceptance(output, batch, target_head, head.draft_vocab, sampling)
        answers = find_answers(batch)
        plain: list[Tally] = []
        if scored.selector is not None:
            unchosen = HeadOutput(tuple(replace(step, selector=None) for step in output.steps))
            without = acceptance(unchosen, batch, target_head, head.draft_vocab, sampling)
            plain = simulate(without.c_BLK, answers, num_speculative_tokens)
        return _Passed(
            source.slices[plan[0][0]],
            float(scored.loss_sum),
            float(divisor),
            torch.stack([scored.step_correct, scored.step_acceptance, scored.step_rows]).double().cpu(),
            None if scored.tuned is None else scored.tuned.double().cpu(),
            batch.top1.flatten()[output.steps[0].rows + 1].cpu(),
            simulate(accepted.c_BLK, answers, num_speculative_tokens),
            None if scored.selector is None else scored.selector.double().cpu(),
            plain,
        )

    idle = partial(_fill_nothing, source, head)
    return _sum_up(over_ranks(batches, look, idle), train_steps, num_speculative_tokens)


def _sum_up(passes: Sequence[_Passed], train_steps: int, num_speculative_tokens: int) -> HeldOut:
    """Return the figures of all held-out batches, summed in their order."""
    losses: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    tallies: dict[str, list[Tally]] = defaultdict(list)
    sums, tuned = torch.zeros(3, train_steps, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for passed in passes:
        of_slice = losses[passed.slice_name]
        of_slice[0] += passed.loss
        of_slice[1] += passed.divisor
        tallies[passed.slice_name] += passed.tallies
        sums += passed.sums
        tuned += 0 if passed.tuned is None else passed.tuned
    everything = total((t for group in tallies.values() for t in group), num_speculative_tokens)
    by_slice = {name: total(group, num_speculative_tokens).tau for name, group in sorted(tallies.items())}
    likeliest = torch.cat([passed.likeliest for passed in passes])
    return HeldOut(
        sum(loss for loss, _ in losses.values()) / max(sum(divisor for _, divisor in losses.values()), 1),
        {name: loss / max(divisor, 1) for name, (loss, divisor) in losses.items()},
        (sums[0] / sums[2].clamp(min=1)).tolist(),
        (sums[1] / sums[2].clamp(min=1)).tolist(),
        everything.tau or 0.0,
        {name: tau for name, tau in by_slice.items() if tau is not None},
        int(likeliest.bincount(minlength=1).max()) / max(1, len(likeliest)),
        tuned_figures(*tuned[1:].tolist()) | _selector_figures(passes, sums[2], everything.tau, num_speculative_tokens),
    )


def _selector_figures(
    passes: Sequence[_Passed], rows_S: Tensor, tau: float | None, num_speculative_tokens: int
) -> dict[str, Any]:
    """Return by step the accuracy of the plain logits and how often the candidates hold the target's likeliest token; tau of drafts
    without the selector, and the `lift` to that with it. Nothing for a head without one."""
    sums = [passed.selector for passed in passes if passed.selector is not None]
    plain = [tally for passed in passes for tally in passed.plain]
    if not plain:
        return {}
    plain_accuracy, recall = (sum(sums[1:], sums[0]) / rows_S.clamp(min=1)).tolist()
    plain_tau = total(plain, num_speculative_tokens).tau or 0.0
    lifted = {"plain_tau": plain_tau, "lift": (tau or 0.0) - plain_tau}
    return {"selector": {"recall": recall, "plain_accuracy": plain_accuracy, **lifted}}


def calibrate_best(
    folder: Path, target: Target, source: FeatureSource, batches: Sequence[Batch], row_tokens: int, sampling: Sampling
) -> dict[str, Any]:
    """Fit the confidence of the finished head in `folder` to the held-out answers, of which each process takes a share, and save it;
    return its report, with the errors before and after, nothing for a head without one. sampling: that of the answers."""
    head = load_head(folder, target).to(target.device)

    def passes(look: Callable[[int, TrainBatch, HeadOutput, Tensor], Found]) -> list[Found]:
        def look_at(index: int, plan: Batch) -> Found:
            batch = read_batch(source, plan, head.reads.layer_ids, row_tokens).to(target.device)
            output = head(batch, head.trains.steps)
            c_BLK = acceptance(output, batch, target.head, head.draft_vocab, sampling).c_BLK
            return look(index, batch, output, c_BLK)

        return over_ranks(batches, look_at, partial(_fill_nothing, source, head))

    with drafting(head), torch.no_grad():
        report = head.calibrate(passes)
    if not report:
        return {}
    if world().main:
        save_head(head, folder, target)
    return {"calibration": report}


def warn_at_chance(held: HeldOut) -> None:
    """Warn when the head is no more accurate than always guessing the most common token."""
    if held.accuracy[0] <= held.chance:
        say(
            f"warning: held-out accuracy is {held.accuracy[0]:.3f}, and always guessing the most common token gives "
            f"{held.chance:.3f}: check the learning rate (train.lr), and with `draftsmith inspect` that the supervised tokens are "
            "the answers."
        )


def warn_at_start(warm_start: str | None, best_step: int, best_tau: float) -> None:
    """Warn when no evaluation was better than that of the head that training started from."""
    if warm_start is not None and not best_step:
        say(
            f"warning: no evaluation was better than that of the head that training started from ({warm_start}, held-out "
            f"tau {best_tau:.2f}), which is kept: lower train.lr, or train it for longer."
        )
