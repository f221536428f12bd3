"""How a head is spread over processes: alone, by DDP, by FSDP2 or by DeepSpeed ZeRO.

    accelerate launch --config_file recipes/accelerate/fsdp2-8gpu.yaml train/eagle.py --recipe R

The launch file says how many processes there are and what they share out. Accumulation, clipping, precision and the
optimizer belong to the recipe: a launch file that says otherwise is refused, before anything runs.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils.parametrize import cached

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError, first_line
from draftsmith.fields import shown
from draftsmith.foreign.text import read_object, read_yaml
from draftsmith.heads.base import DraftHead
from draftsmith.heads.losses.head_loss import LossOutput, head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.machine import faster_in_bf16
from draftsmith.recipe.parse import find_file
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import TargetHead
from draftsmith.train.process import world

FSDP, DEEPSPEED = "FSDP", "DEEPSPEED"

# What FSDP2 needs, and what Accelerate takes where a launch file is silent. One shard group: EAGLE-3 calls parts of its
# layer without going through their `forward`, where FSDP would gather them. With RAM-efficient loading, transformers
# would leave the target of every process but the first empty.
_FSDP_NEEDS = {
    "fsdp_version": ("2", "1"),
    "fsdp_auto_wrap_policy": ("NO_WRAP", "NO_WRAP"),
    "fsdp_cpu_ram_efficient_loading": ("false", "true"),
    "fsdp_activation_checkpointing": ("false", "false"),
}
# Sections of DeepSpeed's configuration that would take over what a key of `train` decides.
_SECTIONS = dict.fromkeys(("bf16", "fp16", "torch_autocast"), "precision") | {
    "optimizer": "optimizer",
    "scheduler": "lr",
}
_EXAMPLES = "`draftsmith recipes` lists examples, under accelerate/"
_COUNTS = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "main_process_port": 1}
"""Whole numbers of a launch file, and the least of each."""


class WrappedHead(nn.Module):
    """A head with its loss, for Accelerate to wrap: both use the weights, which FSDP2 gathers for one call of `forward`.

    It also keeps the head's final norm away from Accelerate, which would make it a shard group of its own.
    """

    def __init__(self, head: DraftHead, target_head: TargetHead, loss: LossSpec) -> None:
        super().__init__()
        self.head, self.loss = head, loss
        self._target_head = [target_head]  # in a list, so that it is not a part

    def forward(self, batch: TrainBatch, progress: float, scale: float) -> tuple[Tensor | None, ...]:
        """Return the fields of a LossOutput: FSDP2 and DeepSpeed look for tensors in tuples alone. See `head_loss`."""
        with cached():  # an adapter's sum with its base, once a pass
            output = self.head(batch, self.head.trains.steps)
        (target_head,) = self._target_head
        scored = head_loss(output, batch, target_head, self.head.draft_vocab, self.loss, progress, scale=scale)
        return tuple(getattr(scored, field.name) for field in fields(LossOutput))


def launch_settings(config: Path | None = None) -> dict[str, str]:
    """Return what a launch file says, or (None) what the launcher told this process, as lower-case strings.

    Keys: distributed_type, deepspeed_config_file, and those of fsdp_config; of a file all others, too. Raises UserError for what
    is no launch file.
    """
    if config is not None:
        file = read_yaml(config, _EXAMPLES)
        if not isinstance(file, dict) or "distributed_type" not in file:
            raise UserError(f"{config} is no launch file, as it names no distributed_type: {_EXAMPLES}.")
        needed = ("distributed_type", "num_processes", "num_machines", "use_cpu")
        # Without the other sections, and without what is left to the launcher's defaults.
        settings = {
            key: value for key, value in file.items() if key in needed or not (isinstance(value, dict) or value is None)
        }
        for section in ("fsdp_config", "deepspeed_config"):
            inside = file.get(section) or {}
            if not isinstance(inside, dict):
                raise UserError(f"{config}: {section} is {shown(inside)}, but it is a section: {_EXAMPLES}.")
            settings |= inside
        for key, value in settings.items():
            if isinstance(value, list | dict) or value is None or "\0" in str(value):
                raise UserError(f"{config}: {key} is {shown(value)}, which is no value for it: {_EXAMPLES}.")
            text, least = str(value), _COUNTS.get(key)
            if least is not None and not (text.isascii() and text.isdecimal() and least <= int(text) <= 10**6):
                raise UserError(f"{config}: {key} is {shown(value)}: it must be a number from {least} to 1000000.")
        return {str(key): str(value) for key, value in settings.items()}
    on = [kind for kind in (DEEPSPEED, FSDP) if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true"]
    settings = {"distributed_type": on[0] if on else "NO"}
    settings |= {key.lower(): value for key, value in os.environ.items() if key.startswith("FSDP_")}
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
        settings["deepspeed_config_file"] = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    return settings


def check_launch(spec: TrainSpec, config: Path | None = None) -> None:
    """Raise UserError where a launch file, or (None) the launcher of this process, cannot train this recipe."""
    settings = launch_settings(config)
    kind = settings["distributed_type"]
    if kind not in (FSDP, DEEPSPEED):
        return
    if spec.precision == "fp16":
        raise UserError(f"train.precision is 'fp16', which {kind} would need a loss scaler of its own for: take bf16.")
    if spec.lora_rank is not None:
        raise UserError(
            f"train.lora_rank is {spec.lora_rank}, whose factors {kind} would not find in the weights: launch with accelerate/ddp-8gpu, "
            "which is one of `draftsmith recipes`."
        )
    if spec.optimizer == "muon":
        raise UserError(
            f"train.optimizer is 'muon', which is two optimizers, and under {kind} there can only be one: set "
            "train.optimizer to adamw, or launch with accelerate/ddp-8gpu, which is one of `draftsmith recipes`."
        )
    if kind == FSDP:
        for key, (needed, default) in _FSDP_NEEDS.items():
            value = settings.get(key, default)
            if value.lower() != needed.lower():
                raise UserError(
                    f"The launch file has {key}: {value}, but a head needs {key}: {needed} under fsdp_config: "
                    "`draftsmith recipes accelerate/fsdp2-8gpu` shows one."
                )
        return
    if spec.loss.divided_later:
        raise UserError(
            f"train.loss.slot_weights is {spec.loss.slot_weights} and train.loss.normalize weights, which divides gradients once all "
            "passes of a step are done, and DeepSpeed keeps them to itself: launch with accelerate/ddp-8gpu, or set "
            "train.loss.normalize to rows."
        )
    if find_spec("deepspeed") is None:
        raise UserError(
            'The launch file asks for DeepSpeed, which is not installed: pip install "draftsmith[deepspeed]".'
        )
    deepspeed_config(spec, settings)


def deepspeed_config(spec: TrainSpec, settings: dict[str, str]) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the file that the launch file names, completed from the recipe.

    Raises UserError where the file is missing or contradicts the recipe.
    """
    path = Path(find_file(settings.get("deepspeed_config_file", "")))
    if not path.is_file():
        raise UserError(
            f"There is no DeepSpeed configuration {str(path)!r}: name one with deepspeed_config_file in the launch file, "
            "from the folder you start in, or recipes/deepspeed/zero2.json, which is installed with draftsmith."
        )
    config = read_object(path, "take recipes/deepspeed/zero2.json, which is installed with draftsmith")
    owned = {
        "gradient_accumulation_steps": (spec.accumulation, "train.accumulation"),
        # Left out or "auto", Accelerate would clip at 1.0 without a word.
        "gradient_clipping": (spec.clip, "train.clip"),
        "train_micro_batch_size_per_gpu": (spec.rows, "train.rows"),
    }
    for key, (value, owner) in owned.items():
        if config.get(key, "auto") not in ("auto", value):
            raise UserError(f"{path} has {key}: {config[key]}, but {owner} is {value}: remove it, the recipe decides.")
        config[key] = value
    for key, owner in _SECTIONS.items():
        section = config.get(key, {"enabled": False})
        if not isinstance(section, dict) or section.get("enabled", True) not in (False, "auto"):
            raise UserError(f"{path} has a section {key}: remove it, as train.{owner} of the recipe decides.")
        config.pop(key, None)
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2):
        raise UserError(f"{path} has zero_optimization.stage {stage}: 1 and 2 are supported; FSDP2 shards weights too.")
    # Weights stay in fp32, and the head itself computes in train.precision, as it does without DeepSpeed.
    return config | {"bf16": {"enabled": False}, "fp16": {"enabled": False}}


def _accelerator(spec: TrainSpec, device: torch.device, settings: dict[str, str]) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
    )

    kind = settings["distributed_type"]
    return Accelerator(
        # Precision is the head's own autocast (see `prepare`); Accelerate only adds the loss scaler of fp16.
        mixed_precision="fp16" if spec.precision == "fp16" else "no",
        # A plain number would give way to an environment variable that launchers set.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=spec.accumulation),
        cpu=device.type == "cpu",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(spec, settings)) if kind == DEEPSPEED else None,
        fsdp_plugin=FullyShardedDataParallelPlugin() if kind == FSDP else None,
        # No buffer changes in training, and gradients need no second copy.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )


def make_accelerator(spec: TrainSpec, device: torch.device) -> Any:
    """Return the Accelerator of this process. Raises UserError where it is not what the launcher meant to start."""
    check_launch(spec)
    if spec.precision == "fp16" and device.type == "cpu":
        raise UserError('train.precision is fp16, whose losses are scaled on a GPU alone: take auto, bf16 or "no".')
    try:
        accelerator = _accelerator(spec, device, launch_settings())
    except (ValueError, LookupError, RuntimeError, AttributeError, ImportError) as error:
        names = [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]
        if isinstance(error, UserError) or not names:
            raise
        raise UserError(
            f"Accelerate refuses what the environment says ({first_line(error)[:200]}): correct or unset {', '.join(sorted(names))[:300]}, "
            "or start with `--launch`, which sets them from a launch file."
        ) from error
    kind = launch_settings()["distributed_type"]
    made, started = accelerator.distributed_type.value, world().size
    if accelerator.num_processes != started or (kind in (FSDP, DEEPSPEED) and made != kind):
        raise UserError(
            f"The launcher started {started} process(es) for {kind}, but Accelerate made {accelerator.num_processes} of "
            f"{made}: FSDP and DeepSpeed need GPUs; on CPUs take accelerate/ddp-2cpu, which is one of `draftsmith recipes`."
        )
    return accelerator


def autocast_of(device: torch.device, spec: TrainSpec) -> torch.autocast:
    """Return train.precision as the context that heads compute in."""
    dtype = autocast_dtype(device, spec)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def autocast_dtype(device: torch.device, spec: TrainSpec) -> torch.dtype | None:
    """Return the dtype that train.precision stands for on a device, None for no autocast."""
    if spec.precision == "auto":
        return torch.bfloat16 if faster_in_bf16(device) else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec.precision)


def prepare(
    accelerator: Any,
    head: DraftHead,
    target_head: TargetHead,
    optimizers: Sequence[torch.optim.Optimizer],
    spec: TrainSpec,
) -> tuple[nn.Module, list[Any]]:
    """Return `head` as a WrappedHead and the optimizers, both wrapped by Accelerate; `head` stays a part of the former.

    From here on the head computes in train.precision whoever calls it; its weights are fp32 in every mode.
    """
    if autocast_dtype(accelerator.device, spec) is not None:
        head.forward = autocast_of(accelerator.device, spec)(head.forward)  # type: ignore[method-assign]
    if accelerator.is_fsdp2:
        # The frozen embedding is the target's own memory: sharding it would copy it and gather it at every step.
        frozen = [m for m in head.modules() if (own := list(m.parameters())) and not any(p.requires_grad for p in own)]
        accelerator.state.fsdp_plugin.ignored_modules = frozen
    model, *wrapped = accelerator.prepare(WrappedHead(head, target_head, spec.loss), *optimizers)
    return model, wrapped


@contextmanager
def whole_head(model: nn.Module) -> Iterator[None]:
    """Let each process call the head inside a prepared model directly, on its own, as long as the context lasts."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


Item = TypeVar("Item")
Found = TypeVar("Found")


def over_ranks(
    items: Sequence[Item], look: Callable[[int, Item], Found], idle: Callable[[], None] = lambda: None
) -> list[Found]:
    """Return, on every process, what `look` finds at each item and its number, in the order of `items`.

    Each process looks at its share. What is found travels pickled: small, and on the CPU. idle: called where others have an item more.
    """
    together = distributed.is_available() and distributed.is_initialized()
    size, rank = (distributed.get_world_size(), distributed.get_rank()) if together else (1, 0)
    shares: list[Any] = [[look(i, items[i]) for i in range(rank, len(items), size)]]
    if len(items) % size and rank >= len(items) % size:
        idle()
    if size > 1:
        shares *= size
        distributed.all_gather_object(shares, shares[rank])
    return [shares[i % size][i // size] for i in range(len(items))]


def whole_state(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the head's complete fp32 tensors under its own names on the main process. All processes must call it."""
    return {name.removeprefix("head."): value for name, value in accelerator.get_state_dict(model).items()}


def checkpoint_layout(accelerator: Any) -> str:
    """Return the kind of launch that can load a checkpoint of this one; one and several plain processes are the same kind."""
    kind = accelerator.distributed_type.value
    if kind == DEEPSPEED:
        return f"DeepSpeed on {accelerator.num_processes} processes"
    return "FSDP2" if kind == FSDP else "plain"
