"""A target whose layers are on two pretended GPUs computes, decodes and trains what it does on one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith
from draftsmith.errors import UserError
from tests.models import save_tiny_target
from tests.pretended_gpu.cuda import pretended_gpu
from tests.target.looks import check_same, look

pytestmark = pytest.mark.full
KINDS = ["llama", pytest.param("gemma3", marks=pytest.mark.slow)]


@pytest.fixture(name="path", params=KINDS, scope="module")
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    return save_tiny_target(tmp_path_factory.mktemp("target") / request.param, request.param)


def test_two_gpus_compute_what_one_does(path: str, tmp_path: Path) -> None:
    with pretended_gpu(1):
        one = look(draftsmith.load_target(path, device="cuda"), tmp_path / "one")
    with pretended_gpu(2):
        target = draftsmith.load_target(path, device="cuda", gpus=2)
        devices = [next(layer.parameters()).device.index for layer in target._layers]
        assert (sorted(devices), set(devices)) == (devices, {0, 1})
        assert {target.device.index, target.head.weight.device.index} == {0}
        two = look(target, tmp_path / "two")
    check_same(two, one)


@pytest.mark.parametrize(
    ("device", "gpus", "why"),
    [
        ("cuda:1", 2, "target.gpus is 2, from cuda:1 on, but torch sees 2"),
        ("cpu", 2, "target.gpus is 2, from cpu on, but target.device is cpu"),
        ("cuda", 10, "target.gpus is 10, from cuda:0 on, but torch sees 2"),
    ],
)
def test_gpus_that_are_not_there_are_refused(device: str, gpus: int, why: str, tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "target", "llama", num_hidden_layers=3)
    with pretended_gpu(2), pytest.raises(UserError, match=why):
        draftsmith.load_target(path, device=device, gpus=gpus)


def test_more_gpus_than_layers_are_refused(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "target", "llama", num_hidden_layers=3)
    with pretended_gpu(4), pytest.raises(UserError, match="has 3 layers to spread: lower it to 3 or less"):
        draftsmith.load_target(path, device="cuda", gpus=4)
    with pretended_gpu(3):
        target = draftsmith.load_target(path, device="cuda", gpus=3)
        assert [next(layer.parameters()).device.index for layer in target._layers] == [0, 1, 2]
