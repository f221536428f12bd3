"""What a launch file may say, what the recipe keeps to itself, and which checkpoints fit."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

from draftsmith.cli.launching import check_config, check_script
from draftsmith.errors import UserError
from draftsmith.heads.hydra.head import HydraHead, HydraOptions, build
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import Target
from draftsmith.train import parallel
from draftsmith.train.checkpoints import Progress, load_training_state, save_training_state
from draftsmith.train.parallel import check_launch, deepspeed_config, launch_settings, make_accelerator
from tests.bad_inputs.cases import check_sentence
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "accelerate"
PLACE = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SPEC = TrainSpec(accumulation=3, clip=0.0, rows=2)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parallel, "find_spec", lambda name: object())


def make_head() -> HydraHead:
    target = Target(tiny_model("llama"), path="tiny", fingerprint="tiny")
    return build(HydraOptions(num_heads=1), target, None)


def changed(tmp_path: Path, name: str, section: str, **keys: Any) -> Path:
    """A shipped launch file with other keys in a section; None removes a key."""
    config = yaml.safe_load((LAUNCH / f"{name}.yaml").read_text())
    config[section] = {key: value for key, value in (config[section] | keys).items() if value is not None}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "launch.yaml"


def changed_json(tmp_path: Path, **keys: Any) -> Path:
    """The shipped ZeRO-2 launch file, with other keys in its JSON."""
    config = json.loads((ROOT / "recipes" / "deepspeed" / "zero2.json").read_text()) | keys
    (tmp_path / "zero.json").write_text(json.dumps(config))
    return changed(tmp_path, "zero2-8gpu", "deepspeed_config", deepspeed_config_file=str(tmp_path / "zero.json"))


@pytest.mark.parametrize("file", sorted(LAUNCH.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_launch_files_are_accepted(file: Path) -> None:
    check_launch(SPEC, file)
    config, (kind, _, size) = (
        ClusterConfig.from_yaml_file(str(file)),
        file.stem.partition("-"),
    )  # as Accelerate reads it
    assert config.distributed_type == {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED"}.get(kind, "NO")
    assert config.num_processes == math.prod(map(int, re.findall(r"\d+", size)))
    assert config.use_cpu == ("cpu" in file.stem)


def test_the_shipped_deepspeed_configuration_leaves_nothing_to_guess() -> None:
    text = (ROOT / "recipes" / "deepspeed" / "zero2.json").read_text(encoding="utf-8")
    assert "auto" not in text  # "auto" clips gradients at 1.0 without saying so
    config = json.loads(text)
    assert not {"gradient_clipping", "gradient_accumulation_steps", "bf16", "fp16"} & set(config)  # the recipe's
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(UserError, match=r"asks for 8 processes .* which has 4 GPUs"):
        check_config(SPEC, str(LAUNCH / "ddp-8gpu.yaml"))
    for name in ("cpu", "one-gpu", "ddp-2cpu"):
        check_config(SPEC, str(LAUNCH / f"{name}.yaml"))
    with pytest.raises(UserError, match="no accelerate configuration at"):
        check_config(SPEC, "nowhere.yaml")


@pytest.mark.parametrize("name", ["fsdp2-8gpu", "zero2-8gpu"])
def test_two_optimizers_and_loss_scalers_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"set train\.optimizer to adamw"):
        check_launch(replace(SPEC, optimizer="muon"), LAUNCH / f"{name}.yaml")
    with pytest.raises(UserError, match="take bf16"):
        check_launch(replace(SPEC, precision="fp16"), LAUNCH / f"{name}.yaml")
    check_launch(replace(SPEC, optimizer="muon"), LAUNCH / "ddp-8gpu.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fsdp_version", 1),
        ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("fsdp_cpu_ram_efficient_loading", None),
        ("fsdp_activation_checkpointing", True),
    ],
)
def test_fsdp_that_would_break_the_head_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"but a head needs {key}: "):
        check_launch(SPEC, changed(tmp_path, "fsdp2-8gpu", "fsdp_config", **{key: value}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: 1.0, but train.clip is 0.0"),
        ({"gradient_accumulation_steps": 1}, "train.accumulation is 3"),
        ({"bf16": {"enabled": True}}, "section bf16: remove it, as train.precision"),
        ({"optimizer": {"type": "AdamW"}}, "section optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "section scheduler"),
        ({"zero_optimization": {"stage": 3}}, "stage 3: 1 and 2 are supported"),
    ],
)
def test_deepspeed_that_contradicts_the_recipe_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_launch(SPEC, changed_json(tmp_path, **keys))


def test_the_recipe_completes_deepspeeds_configuration(tmp_path: Path) -> None:
    agreeing = {"gradient_clipping": "auto", "gradient_accumulation_steps": 3, "bf16": {"enabled": "auto"}}
    config = deepspeed_config(SPEC, launch_settings(changed_json(tmp_path, **agreeing)))
    assert config["gradient_clipping"] == 0.0
    assert config["gradient_accumulation_steps"] == 3
    assert config["bf16"] == config["fp16"] == {"enabled": False}
    with pytest.raises(UserError, match=r"There is no DeepSpeed configuration 'nowhere\.json'"):
        deepspeed_config(SPEC, {"deepspeed_config_file": "nowhere.json"})


def test_a_missing_deepspeed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        check_launch(SPEC, LAUNCH / "zero2-8gpu.yaml")


def test_the_launcher_cannot_change_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = make_accelerator(SPEC, torch.device("cpu"))
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.mixed_precision == "no", "the head's own autocast is the precision"
    assert accelerator.ddp_handler.to_kwargs() == {"broadcast_buffers": False, "gradient_as_bucket_view": True}


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_accelerator(SPEC, torch.device("cpu"))
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"started 2 process\(es\) for NO, but Accelerate made 1 of NO"):
        make_accelerator(SPEC, torch.device("cpu"))


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    accelerator = make_accelerator(SPEC, torch.device("cpu"))
    head = make_head()
    save_training_state(accelerator, tmp_path, Progress(step=5, window=1), head)
    assert load_training_state(accelerator, tmp_path, head) == Progress(step=5, window=1)
    file = tmp_path / "step_5" / "progress.json"
    (tmp_path / "step_5" / "DONE").write_text("")  # as earlier versions did, without digests
    file.write_text(file.read_text().replace("plain", "FSDP2"))
    with pytest.raises(UserError, match="made under FSDP2 and cannot be resumed under plain"):
        load_training_state(accelerator, tmp_path, head)


def test_a_resumed_head_keeps_what_it_measured(tmp_path: Path) -> None:
    """Weights were trained with that number; where it is measured again it may be another."""
    accelerator = make_accelerator(SPEC, torch.device("cpu"))
    head, again = make_head(), make_head()
    head.embedding_scale = again.embedding_scale * 4
    save_training_state(accelerator, tmp_path, Progress(step=5, window=1), head)
    load_training_state(accelerator, tmp_path, again)
    assert again.embedding_scale == head.embedding_scale
    (tmp_path / "step_5" / "DONE").write_text("")
    file, again = tmp_path / "step_5" / "progress.json", make_head()
    file.write_text(file.read_text().replace("embedding_scale", "token_scale"))  # as earlier versions wrote it
    load_training_state(accelerator, tmp_path, again)
    assert again.embedding_scale == head.embedding_scale


TWO = {"distributed_type": "MULTI_GPU", "use_cpu": True, "num_processes": 2}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"distributed_type": "MULTI_CPU"}, "with distributed_type MULTI_CPU Accelerate starts one"),
        ({"distributed_type": "NO"}, "with distributed_type NO Accelerate starts one"),
        ({"num_processes": 3, "num_machines": 2}, "every machine has as many processes"),
        ({"num_machines": 2, "machine_rank": 2}, "machine_rank counts from 0"),
        ({"num_machines": 2}, "name an address of machine 0"),
    ],
)
def test_launches_that_would_start_other_processes_are_refused(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump(TWO | keys))
    with pytest.raises(UserError, match=why):
        check_config(SPEC, str(file))


def test_a_launch_on_cpus_needs_a_recipe_on_cpus() -> None:
    with pytest.raises(UserError, match=r"add --target\.device cpu"):
        check_config(SPEC, str(LAUNCH / "ddp-2cpu.yaml"), "cuda")


def test_machines_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    launch = check_config(SPEC, str(LAUNCH / "ddp-2x8gpu.yaml"), "cuda")
    assert (launch.processes, launch.machine, launch.address) == (16, 0, "10.0.0.1:29500")


@pytest.mark.parametrize("launcher", ["medusa.py", "eagle.py"])
def test_a_launchable_file_refuses_methods_of_another(launcher: str) -> None:
    check_script(launcher, {"medusa.py": "medusa2", "eagle.py": "eagle1"}[launcher])
    check_script(None, "hydra")
    with pytest.raises(
        UserError, match=rf"train/{launcher} does not train the method 'hydra' .* launch train/head\.py"
    ):
        check_script(launcher, "hydra")


@pytest.mark.parametrize(
    "odd",
    [
        {"ACCELERATE_USE_CPU": "maybe"},
        {"ACCELERATE_DEBUG_MODE": "maybe"},
        {"ACCELERATE_DYNAMO_BACKEND": "foo"},
        {"ACCELERATE_TORCH_DEVICE": "bogus"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "x"},
    ],
    ids=lambda odd: " ".join(odd),
)
def test_odd_variables_of_accelerate_are_named(odd: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        monkeypatch.setattr(state, "_shared_state", {})
    for name, value in odd.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"Accelerate refuses what the environment says .*{', '.join(odd)}") as refused:
        make_accelerator(TrainSpec(), torch.device("cpu"))
    check_sentence(str(refused.value))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("items", ["abcdefg", "ab", ""])
def test_shares_are_found_in_the_order_of_their_items(items: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By three processes in turns, of which some may have less to do than others, or nothing."""
    every = [f"{i}{item}" for i, item in enumerate(items)]
    seen: list[str] = []

    def look(index: int, item: str) -> str:
        seen.append(f"{index}{item}")
        return seen[-1]

    def gather(into: list[list[str]], share: list[str]) -> None:
        assert share == seen == every[rank::3]
        into[:] = [every[other::3] for other in range(3)]

    fakes = {"is_initialized": True, "get_world_size": 3, "get_rank": rank}
    for name, value in fakes.items():
        monkeypatch.setattr(parallel.distributed, name, lambda value=value: value)
    monkeypatch.setattr(parallel.distributed, "all_gather_object", gather)
    assert parallel.over_ranks(items, look) == every


def test_half_precision_without_a_scaler_is_refused() -> None:
    with pytest.raises(UserError, match="fp16, whose losses are scaled on a GPU alone"):
        make_accelerator(replace(SPEC, precision="fp16"), torch.device("cpu"))
