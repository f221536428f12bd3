"""FSDP2 and DeepSpeed ZeRO-2, with the shipped launch files: the trajectory of one process, also after Ctrl-C."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.train.runs import ROOT, make_run

pytestmark = pytest.mark.full

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def launcher_environment(name: str) -> dict[str, str]:
    """Return what `accelerate launch --config_file` would tell its processes."""
    file = ROOT / "recipes" / "accelerate" / f"{name}.yaml"
    args = launch_command_parser().parse_args(["--config_file", str(file), "train/eagle.py"])
    args, defaults, _ = _validate_launch_command(args)
    return _told(args, list(defaults.deepspeed_config))


def _told(args: argparse.Namespace, deepspeed_fields: list[str]) -> dict[str, str]:
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(deepspeed_fields)
        told = prepare_deepspeed_cmd_env(args)[1]
    else:
        told = prepare_multi_gpu_env(args)
    return {key: value for key, value in told.items() if os.environ.get(key) != value and key != "PYTHONPATH"}


# A head alone, and one that tunes its target, whose model is no part of what is sharded.
WAYS = [
    ("eagle3", "fsdp2-8gpu", "FSDP2"),
    pytest.param("medusa2", "zero2-8gpu", "DeepSpeed on 2 processes", marks=needs_deepspeed),
    ("medusa2", "fsdp2-8gpu", "FSDP2"),
    pytest.param("eagle3", "zero2-8gpu", "DeepSpeed on 2 processes", marks=needs_deepspeed),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name", "layout"), WAYS)
def test_interrupted_and_resumed_shards_train_as_one_process(
    method: str, name: str, layout: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, method)
    run.copy(name)
    script = [str(Path("tests") / "train" / "launched.py"), "train"]
    environment = launcher_environment(name) | {"DS_ACCELERATOR": "cpu"}
    said = run.launch(name, script, environment | {"STOP_AT": "20"})
    assert "run the same command again" in said
    assert len(run.metrics(name)) == 20
    assert run.progress(name)["layout"] == layout
    said = run.launch(name, script, environment)
    assert (run.folder / name / "train" / "summary.json").exists(), said
    assert run.progress(name)["window"] == 2, "two processes with accumulation 1"
    run.check_same(name)
