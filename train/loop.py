"""The training loop that every drafter shares.

    accelerate launch train/eagle.py --recipe recipes/eagle3/tiny.yaml

features -> packed batches -> head -> loss -> step; at intervals an evaluation on the held-out answers (loss, simulated tau)
and a checkpoint to resume from. `best/` keeps the head with the best held-out tau.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from draftsmith.data.features.behind import HostCopies
from draftsmith.decoder.sampling import row_key
from draftsmith.errors import StoppedError, UserError
from draftsmith.heads.adapter import adapter_of, merged, save_adapter
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.layers.compiled import compiling
from draftsmith.heads.losses.head_loss import LossOutput
from draftsmith.machine import HeldMemory, environment_json
from draftsmith.progress import Bar, say
from draftsmith.recipe.schema import Recipe
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from draftsmith.train.checkpoints import Progress, digest_of, load_training_state, save_training_state
from draftsmith.train.dashboards import Tracker
from draftsmith.train.feed import Fed, Feed
from draftsmith.train.meeting import meeting
from draftsmith.train.metrics import (
    Pace,
    calibrate_best,
    evaluate_heldout,
    make_heldout_batches,
    warn_at_chance,
    warn_at_start,
)
from draftsmith.train.parallel import autocast_of, make_accelerator, prepare, whole_head, whole_state
from draftsmith.train.process import ENDING, Interrupt
from draftsmith.train.schedule import Micro, Schedule, TrainData, build_optimizers, lr_factor, set_lr
from draftsmith.train.steps import Found, Step, Teller, collect, divide_again, leave_out, step_sums

SIGNALS = (*ENDING, signal.SIGINT)
_EARLY = 200
"""Steps until the first evaluation of a long run."""


def train(recipe: Recipe, target: Target, head: DraftHead, data: TrainData, folder: Path) -> Path:
    """Train `head` and return the folder of the best one (`folder`/best).

    Files in `folder`: metrics.jsonl, step_N/ (to resume from), best/ (the head with the best held-out
    tau), summary.json (when training has ended). Resumes by itself; Ctrl-C and SIGTERM save a
    checkpoint first.
    """
    recipe.train.loss.check_head(head)
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(recipe.seed)
    run = _Run(recipe, target, head, data, folder)
    progress = run.resume()
    if (folder / "summary.json").exists():
        return folder / "best"
    progress = run.check_window(progress)
    with compiling(recipe.train.compile, run.accelerator.device):
        if not run.accelerator.is_main_process:
            return run.train(progress, None)
        processes, spec = run.accelerator.num_processes, run.spec
        parts = f"{processes} process{'es' if processes > 1 else ''} x {spec.accumulation} (accumulation) x {spec.rows} rows"
        say(f"training: {parts} of {spec.row_tokens} tokens = up to {run._most_tokens:,} tokens a step")
        with Tracker(folder, recipe.tracking, recipe.name, run.describe(), progress.step) as tracker:
            return run.train(progress, tracker)


class _Run:
    """A training run: its parts, its schedule and the loop."""

    def __init__(self, recipe: Recipe, target: Target, head: DraftHead, data: TrainData, folder: Path) -> None:
        self.recipe, self.spec, self.target, self.data, self.folder = recipe, recipe.train, target, data, folder
        self.accelerator = make_accelerator(self.spec, target.device)
        self.head = head.to(self.accelerator.device).train()
        self.target_head = target.head.to(self.accelerator.device)
        self.copies = HostCopies(self.accelerator.device)
        self.feed = Feed(data, self.head, self.spec, self.accelerator.device)
        # Before each process has a shard of the head.
        self.untrained = digest_of(folder, Progress(), head) if meeting() else ""
        optimizers = build_optimizers(head, self.spec)
        self.model, self.optimizers = prepare(self.accelerator, head, self.target_head, optimizers, self.spec)
        self.train_steps = head.trains.steps
        self.draft_length = head.clamp_draft_length(recipe.evaluate.num_speculative_tokens)
        lengths = [data.source.lengths[i] for i in data.train]
        shards = None if data.source.shards is None else data.source.shards[data.train]
        self.schedule = Schedule(lengths, self.spec, recipe.seed, self.accelerator.num_processes, shards)
        # Packing differs from epoch to epoch, and so may the number of steps; epochs that max_steps does not reach are not planned.
        self.epoch_steps, most = list[int](), self.spec.max_steps or sys.maxsize
        while len(self.epoch_steps) < self.spec.epochs and sum(self.epoch_steps) < most:
            self.epoch_steps.append(len(self.schedule.epoch(len(self.epoch_steps))) // self.schedule.window)
        self.total = min(sum(self.epoch_steps), most)
        count = min(self.spec.evaluations, self.total)
        self.eval_steps = {round(self.total * (i + 1) / count) for i in range(count)}
        if min(self.eval_steps) > 2 * _EARLY:
            # An early look, for the warnings: a long run should not wait for its first tenth.
            self.eval_steps.add(_EARLY)
        self.heldout_batches = make_heldout_batches(data.source, data.heldout, self.spec.row_tokens, self.spec.rows)

    def resume(self) -> Progress:
        """Load the newest checkpoint, if there is one. Raises UserError where the processes would not go on from the same state."""
        progress = load_training_state(self.accelerator, self.folder, self.head)
        self._saved = progress.step or None
        if met := meeting():
            weights = digest_of(self.folder, progress, self.head) if progress.step else self.untrained
            facts = {"The step to go on from": progress.step, "The digest of the weights": weights}
            facts |= {"The number of micro-batches per step": self.schedule.window}
            met.compare(
                facts, "all processes need the same files and packages; copy them, or add --redo train to begin again"
            )
        return progress

    def check_window(self, progress: Progress) -> Progress:
        """Return `progress` with the micro-batches per step and the order of samples. Raises UserError where its checkpoint had
        another number of them, or another order: some samples would be learned twice in an epoch, and some never."""
        if progress.window not in (0, self.schedule.window):
            raise UserError(
                f"The checkpoint in {self.folder} was made with {progress.window} micro-batches per step over all processes, "
                f"now there are {self.schedule.window} ({self.accelerator.num_processes} processes x train.accumulation="
                f"{self.spec.accumulation}): choose them so that their product is the same, or add --redo train."
            )
        if progress.step and progress.order != self.schedule.order:
            raise UserError(
                f"The checkpoint in {self.folder} took the samples in another order: the hidden states were stored again since, or by "
                "another version of draftsmith; add --redo train."
            )
        return replace(progress, window=self.schedule.window, order=self.schedule.order)

    def describe(self) -> dict[str, Any]:
        """Return what dashboards show beside the figures: the recipe, what the head is made from, and with what."""
        around = environment_json()
        facts = {
            "recipe": asdict(self.recipe),
            "inputs": self.data.identity,
            "target": {"path": self.target.path, "fingerprint": self.target.fingerprint},
            **{name: around[name] for name in ("versions", "hardware", "commit")},
            "world_size": self.accelerator.num_processes,
            "tokens_per_step": self._most_tokens,
        }
        return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]

    @property
    def _most_tokens(self) -> int:
        """The tokens of a full optimizer step, over all processes: the global batch."""
        return self.schedule.window * self.spec.rows * self.spec.row_tokens

    def train(self, progress: Progress, tracker: Tracker | None) -> Path:
        """Train from `progress` to the end, to the patience's end, or to Ctrl-C. tracker: that of the main process."""
        if self.spec.warm_start is not None and not progress.step:
            # The head that training starts from stays the best one until another is better.
            record: dict[str, Any] = {"step": 0, "tokens": 0, "epoch": 0.0}
            progress = self._evaluate(record, progress)
            if tracker:
                tracker.foresee(record, self.total, self.draft_length)
                tracker.log(record)
        held = HeldMemory()
        bar = Bar(total=self.total, initial=progress.step, desc="training", unit="step", disable=tracker is None)
        self.pace, earlier, self.teller = Pace(progress.tokens), progress.train_seconds, Teller(tracker, bar)
        stopping = 0  # the signal, as all processes agreed, so that none leaves another waiting
        with bar, Interrupt() as interrupt:
            while progress.step < self.total and not self._stale(progress) and not stopping:
                before = time.perf_counter()
                for window in self.feed.windows(self._micros(progress.step)):
                    step = self._step(window, progress, interrupt)
                    self.teller.taken(step)
                    progress, evaluates = step.progress, step.progress.step in self.eval_steps
                    held.step_ended()
                    if evaluates:
                        step.read()  # what the device has still to do is none of the evaluation's time
                    self.pace.seconds += time.perf_counter() - before
                    if earlier is not None:
                        progress = replace(progress, train_seconds=earlier + self.pace.seconds)
                    if evaluates:
                        progress = self._evaluate(step.record, progress)
                        if tracker:
                            self.teller.expected = tracker.foresee(step.record, self.total, self.draft_length)
                    step.progress = progress
                    step.clocks |= self.pace.figures(progress.tokens, self.accelerator.device)
                    stopping = self._maybe_checkpoint(progress, interrupt)
                    before = time.perf_counter()  # the next step begins with reading its batches
                    if progress.step >= self.total or self._stale(progress) or stopping:
                        break
            self.teller.rest()
        self._save(progress)
        if stopping:
            raise StoppedError(
                f"Training was interrupted at step {progress.step} of {self.total}; a checkpoint is saved in "
                f"{self.folder}: run the same command again to go on from there.",
                128 + stopping,
            )
        calibration = self._calibrate()
        if tracker:
            warn_at_start(self.spec.warm_start, progress.best_step, progress.best_tau)
            seconds = progress.train_seconds
            pace = {"tokens_per_second": progress.tokens / seconds if seconds else None}
            write_json(self.folder / "summary.json", asdict(progress) | pace | calibration)
            best = {"best/tau": progress.best_tau, "best/step": progress.best_step}
            tracker.summary(best | ({} if seconds is None else {"train/seconds": seconds}))
        self.accelerator.wait_for_everyone()
        return self.folder / "best"

    def _calibrate(self) -> dict[str, Any]:
        """Fit the best head's confidence, if it has one, to the held-out answers; return its report."""
        if "confidence" not in self.head.trains.outputs or not (self.folder / "best").exists():
            return {}
        data, sampling = (self.data.source, self.heldout_batches, self.spec.row_tokens), self.recipe.answers.sampling
        with autocast_of(self.accelerator.device, self.spec):  # as in the evaluations, whose memory it then takes
            return calibrate_best(self.folder / "best", self.target, *data, sampling)

    def _wishes(self, interrupt: Interrupt) -> torch.Tensor:
        """Return [1 + signals]: whether a checkpoint is due, and whether each signal asked this process to stop."""
        due = time.perf_counter() - self.pace.saved_at > 60 * self.spec.checkpoint_minutes
        return torch.tensor([due, *(interrupt.asked == number for number in SIGNALS)]).float()

    def _maybe_checkpoint(self, progress: Progress, interrupt: Interrupt) -> int:
        """Save a checkpoint when one is due, at once where it tells of a new best head, and return the signal to stop for, or 0; all
        processes decide alike, by what they wished before the step."""
        wished = self._wishes(interrupt) if self.accelerator.num_processes == 1 else self.wished
        due, *asks = (bool(x) for x in wished > 0)
        asked = next((number for number, ask in zip(SIGNALS, asks, strict=True) if ask), 0)
        due = due or progress.best_step == progress.step
        if due or asked:
            self.teller.rest()
        if due:
            self._save(progress)
        return asked

    def _save(self, progress: Progress) -> None:
        """Save a checkpoint, unless it was the last thing that was saved, or gone on from."""
        if progress.step != self._saved:
            save_training_state(self.accelerator, self.folder, progress, self.head)
            self._saved, self.pace.saved_at = progress.step, time.perf_counter()

    def _stale(self, progress: Progress) -> bool:
        return self.spec.patience is not None and progress.stale >= self.spec.patience

    def _micros(self, step: int) -> Iterator[tuple[Micro, int]]:
        """Yield the micro-batches of this process from `step` on, each with its epoch's seed."""
        first, skip = self._locate(step)
        for epoch in range(first, self.spec.epochs):
            seed = row_key(self.recipe.seed, "epoch", epoch)
            for micro in self.schedule.share(epoch, self.accelerator.process_index, skip if epoch == first else 0):
                yield micro, seed

    def _locate(self, step: int) -> tuple[int, int]:
        """Return the epoch that `step` falls into, and the steps before it in that epoch."""
        for epoch, steps in enumerate(self.epoch_steps):
            if step < steps:
                return epoch, step
            step -= steps
        return len(self.epoch_steps), 0

    def _epoch(self, step: int) -> float:
        """Return `step` in epochs."""
        epoch, skip = self._locate(step)
        return epoch + (skip / self.epoch_steps[epoch] if skip else 0.0)

    def _step(self, window: list[Fed], progress: Progress, interrupt: Interrupt) -> Step:
        """Take one optimizer step on the sum of losses over the global divisor; the device may still be at it on return."""
        accelerator, device = self.accelerator, self.accelerator.device
        counted = torch.zeros(4)
        for micro in window:
            counted += torch.tensor([micro.divisor, micro.rows, micro.covered, micro.tokens]) * micro.counts
        if accelerator.num_processes > 1:
            # One message carries the wishes too, as each is waited for.
            counted = accelerator.reduce(torch.cat([counted, self._wishes(interrupt)]).to(device), "sum").cpu()
            counted, self.wished = counted[:4], counted[4:]
        divisor, rows, covered, tokens = counted
        if rows == 0 or divisor == 0:
            return self._skip_empty_step(progress)
        # Accelerate divides by the accumulation steps and averages over processes: undo both.
        scale = accelerator.num_processes * self.spec.accumulation / divisor
        known = float(scale) / self.spec.accumulation * (accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
        sums: torch.Tensor | None = None
        found: Found | None = None
        factor = lr_factor(progress.step, self.total, self.spec)
        set_lr(self.optimizers, factor)
        for micro in window:
            batch = self.feed.batch(micro)
            with accelerator.accumulate(self.model):
                scored = LossOutput(*self.model(batch, progress.step / self.total, known))
                accelerator.backward(scored.loss_sum * (scale * micro.counts))
                added = step_sums(scored)
                sums = torch.zeros_like(added) if sums is None else sums
                sums += added if micro.counts else 0
                if accelerator.sync_gradients:
                    found = self._clip(sums, divisor)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            del batch  # the device holds this one and the copy of the one behind it, no third
        seen, learned = progress.tokens + int(tokens), progress.rows + int(rows)
        progress = replace(progress, step=progress.step + 1, tokens=seen, rows=learned)
        record = {
            "step": progress.step,
            "tokens": progress.tokens,
            "epoch": self._epoch(progress.step),
            "loss": None,
            "step_loss": None,
            "lr": factor * self.spec.lr,
            "accuracy": None,
            "acceptance": None,
        }
        if self.head.trains.blocks:
            record["covered"] = float(covered / rows)
        clocks = {"muon_lr": factor * self.spec.muon_lr} if self.spec.optimizer == "muon" else {}
        return Step(record, progress, found, clocks)

    def _clip(self, sums: torch.Tensor, divisor: torch.Tensor) -> Found:
        """Clip the gradient and return what the step has found; the optimizers leave out one that is not finite."""
        norm, sums = None, self.accelerator.reduce(sums, "sum")
        if self.spec.loss.divided_later:
            divisor = divide_again(self.head, sums, divisor)
        if self.spec.clip > 0:
            norm = self.accelerator.clip_grad_norm_(self.head.parameters(), self.spec.clip)
        scaled = self.accelerator.scaler is not None
        found, broken = collect(sums, divisor, norm, self.copies, scaled=scaled)
        if not scaled:
            leave_out(self.optimizers, broken)
        return found

    def _skip_empty_step(self, progress: Progress) -> Step:
        """Count a step without a supervised row, such as a single document whose answer is one token, and change nothing
        else. Raises UserError where a whole epoch has none."""
        progress = replace(progress, step=progress.step + 1)
        if not progress.rows and progress.step >= min(self.epoch_steps[0], self.total):
            self.teller.rest()
            raise UserError(
                "A whole epoch holds no supervised row: the answers are empty or masked out; look at them with "
                "`draftsmith inspect`."
            )
        record = {"step": progress.step, "tokens": progress.tokens, "epoch": self._epoch(progress.step)}
        return Step(record, progress)

    def _evaluate(self, record: dict[str, Any], progress: Progress) -> Progress:
        """Evaluate on the held-out answers, and save the head if its tau is the best so far, on which all processes find the same."""
        with whole_head(self.model):
            held = evaluate_heldout(
                self.head,
                self.data.source,
                self.heldout_batches,
                self.spec.row_tokens,
                self.target_head,
                self.spec.loss,
                self.recipe.answers.sampling,
                self.recipe.evaluate.num_speculative_tokens,
            )
        record |= {
            "heldout_loss": held.loss,
            "heldout_loss_by_slice": held.loss_by_slice,
            "heldout_accuracy": held.accuracy,
            "heldout_chance": held.chance,
            "heldout_acceptance": held.acceptance,
            "tau": {"overall": held.tau, "slices": held.tau_by_slice, "num_speculative_tokens": self.draft_length},
            **{f"heldout_{name}": figures for name, figures in held.more.items()},
        }
        if not progress.best_tau and self.accelerator.is_main_process:
            warn_at_chance(held)
        if progress.best_tau and held.tau <= progress.best_tau:
            return replace(progress, stale=progress.stale + 1)
        tensors = whole_state(self.accelerator, self.model)
        if self.accelerator.is_main_process:
            if adapter := adapter_of(self.head):
                if "confidence" not in self.head.trains.outputs:  # whose calibration an adapter does not hold
                    save_adapter(self.head, self.folder / "adapter", self.target, tensors)
                tensors = merged(tensors, adapter)
            save_head(self.head, self.folder / "best", self.target, tensors)
        return replace(progress, best_tau=held.tau, best_step=progress.step, stale=0)
