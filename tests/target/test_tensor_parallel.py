"""Two processes that share every layer of a target compute, decode and teach what one does with the whole."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, StableLmConfig

import draftsmith
from draftsmith.errors import UserError
from tests.models import save_tiny_target
from tests.pretended_gpu.cuda import pretended_gpu
from tests.target.looks import check_same, look
from tests.train.runs import launch_two

KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "qwen3", "mixtral"))]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / kind, kind)
    said = launch_two(["-m", "tests.target.looks", path, str(tmp_path)], {})
    one = look(draftsmith.load_target(path), tmp_path / "store")
    for rank in range(2):
        assert (tmp_path / f"{rank}.pt").exists(), said
        check_same(torch.load(tmp_path / f"{rank}.pt"), one)


@pytest.mark.parametrize(
    ("kind", "processes", "started", "why"),
    [
        ("llama", 2, "1", "tensor_parallel is 2, but 1 process was started: start 2, such as with `torchrun --nproc_per"),
        ("llama", 3, "3", "cannot be split over 3 processes: its 4 query heads are no multiple of that; take a divisor of 4"),
        ("llama", 4, "4", "cannot be split over 4 processes: its 2 key/value heads are no multiple of that; take a divisor of 2"),
        ("stablelm", 2, "2", r"no plan for models of type 'stablelm'; spread its layers over GPUs instead \(gpus\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_one_sentence(
    kind: str, processes: int, started: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }
    if kind == "stablelm":
        AutoModelForCausalLM.from_config(StableLmConfig(num_key_value_heads=2, **sizes)).save_pretrained(
            tmp_path / kind
        )
    else:
        save_tiny_target(tmp_path / kind, kind)
    with pytest.raises(UserError, match=why):
        draftsmith.load_target(tmp_path / kind, tensor_parallel=processes)


@pytest.mark.parametrize(
    ("gpu", "given", "why"),
    [
        (True, {"device": "cuda", "gpus": 2}, "tensor_parallel is 2 and gpus 2: choose one, as a process has one GPU"),
        (True, {}, "device 'cpu', but each process takes a GPU by its LOCAL_RANK: set device to 'cuda'"),
        (True, {"device": "cuda:1"}, "device 'cuda:1', but each process takes a GPU by its LOCAL_RANK: set device to 'cuda'"),
        (False, {"gpus": 2}, "tensor_parallel is 2 and gpus 2"),
        (False, {"device": "meta"}, "device 'meta', but each process takes a CPU: set device to 'cpu'"),
    ],
)  # fmt: skip
def test_a_device_that_would_not_be_taken_is_refused(
    gpu: bool, given: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = save_tiny_target(tmp_path / "llama", "llama")
    with pretended_gpu(2) if gpu else nullcontext(), pytest.raises(UserError, match=why):
        draftsmith.load_target(path, tensor_parallel=2, **given)
