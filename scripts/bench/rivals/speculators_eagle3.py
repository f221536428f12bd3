"""Train EAGLE-3 with the speculators package; run by that package's own Python, which lacks draftsmith.

    python speculators_eagle3.py JOB.json

JOB: store (a feature store of ours), target (folder), layer_ids, vocab (ascending target ids of the draft vocabulary, or
null), train (ids of the samples to learn from), ttt_steps, epochs, step_tokens, row_tokens, lr, dtype, output and
checkpoint_minutes. In `output` come `head/`, written by `Eagle3DraftModel.save_pretrained`, `training.json` with what it
took, and `state.pt` to resume from.

What is the package's own (0.9.0), at the defaults of its `speculators train`: the model with its norms and its frozen
output projection, `build_draft_model`, `shift_batch`, `MultipackDistributedBatchSamplerV2`, `CollateFn`, the forward pass with its
KL loss over the draft vocabulary and equal weights of the steps (ttt_step_loss_decay 1), Muon (match_rms_adamw, momentum
0.95, weight decay 0.1) for matrices and AdamW (weight decay 0.01) for the rest at one learning rate, the linear schedule
with 1% warmup, the gradient norm of 1, weights in fp32, seed 42. Its recipe adds no noise to hidden states.

What had to be ours: the loop, as its Trainer sends everything to a GPU, step for step the same, but without validation
(it would hold a tenth of the data back and mark the best epoch; here the head is the last step's); the eager form of the loss
in place of Triton's; full attention in place of a window of 2048, which no sample is longer than; dtype of hidden states (its
default is bf16), aux layers, draft vocabulary, steps, epochs and learning rate, from the job. A step of it is one packed row of
`total_seq_len` tokens; its masks are dense on a CPU and grow with the square of that, so a step is taken over shorter rows, each
weighted by its supervised tokens, which makes its loss that of the long row (but for later steps' means, over slightly other
numbers of rows). cpu_parts.py has what only makes it cheaper: attention by documents in place of flex, which has no backward
on a CPU, the projection and the loss where there is supervision, and Muon's products of bf16 matrices, made in fp32 and rounded.
"""

import hashlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

Facts = dict[str, Any]
START: Facts = {"epoch": 0, "step": 0, "tokens": 0, "supervised_tokens": 0, "seconds": 0.0, "cpu_seconds": 0.0}


def main() -> None:
    """Read the job and train, from the last saved state where there is one."""
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), flush=True)


def vocab_maps(ids: list[int] | None, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """The maps t2d [V] (bool) and d2t [W] (offsets) of a draft vocabulary of ascending target ids."""
    if ids is None:
        return None, None
    chosen = torch.tensor(ids)
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True), chosen - torch.arange(len(ids))


def make_model(job: Facts, config: Any) -> Any:
    """The untrained draft model that `speculators train` would make, with the job's vocabulary and layers."""
    import argparse

    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import build_draft_model, set_seed

    set_seed(config.seed)
    size = json.loads((Path(job["target"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    t2d, d2t = vocab_maps(job["vocab"], size)
    args = argparse.Namespace(**config.flatten())
    return build_draft_model(args, Eagle3DraftModel, t2d, d2t, size if d2t is None else len(d2t)).float()


def make_config(job: Facts) -> Any:
    """The package's own configuration with its own defaults, but for what the job and a CPU decide."""
    from speculators.train.config import TrainConfig

    return TrainConfig.from_flat(
        {
            "speculator_type": "eagle3",
            "verifier_name_or_path": job["target"],
            "target_layer_ids": job["layer_ids"],
            "draft_vocab_size": None if job["vocab"] is None else len(job["vocab"]),
            "ttt_steps": job["ttt_steps"],
            "total_seq_len": job["row_tokens"],
            "hidden_states_dtype": job["dtype"],
            "epochs": job["epochs"],
            "lr": job["lr"],
            "draft_attn_impl": "sdpa",
            "loss_implementation": "eager",
            "full_attention_indices": [0],
            "mask_token_id": 0,  # of block drafters alone
        }
    )


class Rows:
    """The packed rows of every epoch, made by the package's sampler and collate function, grouped into steps."""

    def __init__(self, job: Facts, store: Any, config: Any, hidden_size: int) -> None:
        from speculators.models.eagle3 import shift_batch
        from speculators.train.data import CollateFn
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

        self.store, self.names = store, job["train"]
        lengths = [store.length[name] for name in self.names]
        self.sampler = MultipackDistributedBatchSamplerV2(job["row_tokens"], lengths, 1, 0, seed=config.seed)
        dtype = getattr(torch, job["dtype"])
        layers = len(job["layer_ids"])
        self.collate = CollateFn(job["row_tokens"], hidden_size, layers, dtype=dtype, preprocess=shift_batch)
        self.lengths, self.step_tokens = lengths, job["step_tokens"]

    def epoch(self, number: int) -> list[list[Any]]:
        """The steps of an epoch: lists of rows of at most `step_tokens` tokens together, a row a list of places in `names`."""
        self.sampler.set_epoch(number)
        steps: list[list[Any]] = []
        room = 0
        for row in self.sampler:
            tokens = sum(self.lengths[i] for i in row)
            if not steps or tokens > room:
                steps.append([])
                room = self.step_tokens
            steps[-1].append(row)
            room -= tokens
        return steps

    def read(self, row: Any) -> Facts:
        """A packed row [1, row_tokens]."""
        return self.collate([self.store.get(self.names[i]) for i in row])


class Store:
    """Samples of a feature store of ours as speculators' data sets give them; `norm` is the weight [H] of the final norm.

    The store has the state y behind the target's final norm (weight w), speculators wants the one before: the norm of y / w,
    times w, is y again.
    """

    def __init__(self, path: str, layer_ids: list[int], norm: Tensor) -> None:
        self.path, self.layer_ids = Path(path), list(layer_ids)
        if bool((norm.abs() < 1e-6).any()):
            raise SystemExit("The target's final norm has a weight of zero: the state before it cannot be told.")
        self.norm = norm.float()
        index = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
        if not index["complete"] or not set(layer_ids) <= set(index["layer_ids"]):
            raise SystemExit(f"{path} is not complete or lacks one of the layers {layer_ids}.")
        self.place: dict[str, tuple[int, int]] = {}
        self.length: dict[str, int] = {}
        self.shards: list[Any] = []
        for number, shard in enumerate(index["shards"]):
            self.shards.append(safe_open(self.path / shard["file"], framework="pt"))
            for row, (name, length) in enumerate(zip(shard["ids"], shard["lengths"], strict=True)):
                self.place[name], self.length[name] = (number, row), length

    def get(self, name: str) -> dict[str, Tensor]:
        """One sample of L tokens: input_ids [L], loss_mask [L], hidden_states [L, A*H], verifier_last_hidden_states [L, H]
        (before the final norm, up to its scale), lengths [1], position_ids [L]."""
        number, row = self.place[name]
        shard = self.shards[number]
        start, end = (int(x) for x in shard.get_slice("offsets")[row : row + 2])
        last = shard.get_slice("last")[start:end].float()
        return {
            "hidden_states": torch.cat([shard.get_slice(f"aux.{k}")[start:end] for k in self.layer_ids], -1),
            "input_ids": shard.get_slice("ids")[start:end].long(),
            "verifier_last_hidden_states": last / self.norm,
            "loss_mask": shard.get_slice("mask")[start:end].bool(),
            "lengths": torch.tensor([end - start]),
            "position_ids": torch.arange(end - start),
        }


def final_norm(target: str) -> Tensor:
    """The weight [H] of the final norm of a target in safetensors files."""
    for file in sorted(Path(target).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("model.norm.weight"):
                    return opened.get_tensor(name)
    raise SystemExit(f"There is no model.norm.weight in {target}.")


def train(job: Facts) -> Facts:
    """Train as the job says; return what `training.json` holds."""
    output = Path(job["output"])
    if (output / "training.json").exists():
        record = json.loads((output / "training.json").read_text(encoding="utf-8"))
        refuse_other_job(record.get("job"), job, output)
        return record

    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
    from transformers import get_linear_schedule_with_warmup

    output.mkdir(parents=True, exist_ok=True)
    config = make_config(job)
    model = make_model(job, config).train()
    store = Store(job["store"], job["layer_ids"], final_norm(job["target"]))
    rows = Rows(job, store, config, model.hidden_size)
    flat = config.flatten()
    names = {key: flat[key] for key in TrainerConfig._fields if key in flat and key != "hidden_states_dtype"}
    settings = TrainerConfig(num_epochs=flat["epochs"], **names)
    optimizers = build_optimizers(model, settings)
    epoch_steps = [len(rows.epoch(number)) for number in range(job["epochs"])]
    warmup, total = _resolve_scheduler_steps(settings, epoch_steps[0])
    schedulers = [get_linear_schedule_with_warmup(one, warmup, total) for one in optimizers]
    call, _ = model.get_trainer_kwargs(**config.flatten())
    supervision = on_cpu(model, call)
    parts = {"model": model, **{f"o{i}": o for i, o in enumerate(optimizers)}}
    parts |= {f"s{i}": s for i, s in enumerate(schedulers)}
    run = load_state(output / "state.pt", parts) or {**START, "job": identify_job(job)}
    refuse_other_job(run.get("job"), job, output)
    saved = time.perf_counter()
    while run["epoch"] < job["epochs"]:
        for group in rows.epoch(run["epoch"])[run["step"] :]:
            started, worked = time.perf_counter(), time.process_time()
            packed, dtype = [rows.read(row) for row in group], getattr(torch, job["dtype"])
            figures = one_step(model, packed, call, dtype, optimizers, supervision)
            for scheduler in schedulers:
                scheduler.step()
            run["step"] += 1
            run["seconds"] += time.perf_counter() - started
            run["cpu_seconds"] += time.process_time() - worked
            for key in ("tokens", "supervised_tokens"):
                run[key] += figures.pop(key)
            done = sum(epoch_steps[: run["epoch"]]) + run["step"]
            if done % 5 == 0:
                log(output, {**run, **figures, "step": done, "of": sum(epoch_steps)})
            if time.perf_counter() - saved > 60 * job["checkpoint_minutes"]:
                save_state(output / "state.pt", parts, run)
                saved = time.perf_counter()
        run |= {"epoch": run["epoch"] + 1, "step": 0}
    return finish(job, config, model, run, sum(epoch_steps))


def identify_job(job: Facts) -> str:
    """Return a fingerprint of the job, without its folders and how often it is saved."""
    facts = {key: value for key, value in job.items() if key not in ("store", "target", "output", "checkpoint_minutes")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def refuse_other_job(begun: str | None, job: Facts, output: Path) -> None:
    """Exit with a sentence where `output` holds a training of another job, which must not be taken for this one."""
    if begun != identify_job(job):
        raise SystemExit(
            f"{output} holds a training of another job (other answers, rows or rates): move it away first."
        )


def on_cpu(model: Any, call: Facts) -> Any:
    """Put what is cheaper on a CPU in the package's place; return what has to know what of a row is supervised."""
    from cpu_parts import Supervision, document_attention, orthogonalise
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", document_attention)
    torch.optim._muon._zeropower_via_newtonschulz = orthogonalise
    supervision = Supervision()
    model.lm_head.forward = supervision.project(model.lm_head)
    call["loss_config"] = {name: (supervision.loss(one), weight) for name, (one, weight) in call["loss_config"].items()}
    return supervision


def one_step(
    model: Any, rows: list[Facts], call: Facts, dtype: torch.dtype, optimizers: list[Any], supervision: Any
) -> Facts:
    """One optimizer step over packed rows; returns tokens, supervised tokens, loss and the accuracy of each step."""
    counts = [int(row["loss_mask"].sum()) for row in rows]
    model.zero_grad()
    loss_sum, sums = 0.0, dict[str, float]()
    for row, count in zip(rows, counts, strict=True):
        if not count:
            continue
        tensors = {key: value for key, value in row.items() if isinstance(value, Tensor)}
        supervision.begin(row["loss_mask"])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            _, loss, metrics = model(**tensors, **call)
        share = count / sum(counts)
        (loss * share).backward()
        loss_sum += float(loss.detach()) * share
        for key, value in metrics.items():
            if "full_acc" in key:
                sums[key] = sums.get(key, 0.0) + float(value)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    found = [[sums.get(f"full_acc_{k}_{part}", 0.0) for part in ("sum", "total")] for k in range(call["ttt_steps"])]
    accuracy = [right / max(1.0, rows_of) for right, rows_of in found]
    tokens = sum(int((row["document_ids"] >= 0).sum()) for row in rows)
    return {"tokens": tokens, "supervised_tokens": sum(counts), "loss": loss_sum, "accuracy": accuracy}


def finish(job: Facts, config: Any, model: Any, run: Facts, steps: int) -> Facts:
    """Save the head and the record of its training; remove what resuming needed."""
    output = Path(job["output"])
    model.save_pretrained(output / "head")
    flat = config.flatten()
    shown = (
        "optimizer lr muon_lr weight_decay muon_weight_decay muon_momentum muon_adjust_lr_fn scheduler_type ttt_steps "
    )
    shown += "ttt_step_loss_decay loss_fn norm_before_residual norm_before_fc norm_output hidden_states_dtype seed"
    record = {
        "trainer": f"speculators {version('speculators')}",
        "job": run["job"],
        **{key: job.get(key) for key in ("epochs", "step_tokens", "row_tokens", "answers")},
        "steps": steps,
        **{key: run[key] for key in ("seconds", "cpu_seconds", "tokens", "supervised_tokens")},
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "settings": {key: flat[key] for key in shown.split()},
    }
    scratch = output / "training.json.tmp"
    scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, output / "training.json")
    (output / "state.pt").unlink(missing_ok=True)
    return record


def save_state(file: Path, parts: Facts, run: Facts) -> None:
    """Save what resuming needs, whole or not at all."""
    scratch = file.with_suffix(".tmp")
    torch.save({"run": run, **{name: part.state_dict() for name, part in parts.items()}}, scratch)
    os.replace(scratch, file)


def load_state(file: Path, parts: Facts) -> Facts | None:
    """Restore `parts` from a saved state and return its counters; None where there is none."""
    if not file.exists():
        return None
    state = torch.load(file, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["run"]


def log(output: Path, record: Facts) -> None:
    """Append a line to metrics.jsonl and show it."""
    with (output / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    left = (record["of"] - record["step"]) * record["seconds"] / record["step"]
    print(f"step {record['step']}/{record['of']} loss {record['loss']:.3f}, {left:.0f} s to go", flush=True)


if __name__ == "__main__":
    main()
