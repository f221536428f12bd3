"""A target whose layers are on two pretended GPUs computes, decodes and trains what it does on one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith
from draftsmith.cli import launching
from draftsmith.cli.main import main
from draftsmith.data.features.index import is_complete
from draftsmith.errors import UserError
from tests.helpers import save_target
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


def _words(folder: Path, method: str = "eagle3") -> list[str]:
    """Return the options of a small recipe whose target is on two GPUs, for a launch of two processes."""
    asked = ({"role": "user", "content": f"question {i}?"} for i in range(6))
    rows = (json.dumps({"messages": [one, {"role": "assistant", "content": "answer!"}]}) for one in asked)
    (folder / "talk.jsonl").write_text("".join(row + "\n" for row in rows))
    launch = (launching.find_file("accelerate/ddp-8gpu"), folder / "launch.yaml")
    launch[1].write_text(Path(launch[0]).read_text().replace("num_processes: 8", "num_processes: 2"))
    save_target(folder / "target")
    options = {
        "recipe": f"{method}/tiny",
        "target.path": str(folder / "target"),
        "target.device": "cuda",
        "target.gpus": "2",
        "data.sources": f"[{folder / 'talk.jsonl'}]",
        "data.max_length": "64",
        "data.heldout": "2",
        "answers.regenerate": "false",
        "output_dir": str(folder / "run"),
        "launch": str(launch[1]),
    }
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def test_a_launch_finds_the_data_that_one_process_made_on_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(words: list[str], processes: int) -> int:
        assert processes == 2
        assert is_complete(tmp_path / "run" / "features")
        return 7

    monkeypatch.setattr(launching, "run_launcher", started)
    with pretended_gpu(2):
        assert main(["train", *_words(tmp_path), "--head.layer_ids", "[2, 4, 6]"]) == 7


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--data.heldout", "6"], "data.heldout is 6 but there are only 6 answers: lower it"),
        (["--train.row_tokens", "8"], "Only 0 of 6 samples fit train.row_tokens=8, and data.heldout takes 2: raise"),
        (["--data.limit", "1"], "2 processes were started for 1 samples, so that some would have none: start fewer"),
    ],
)
def test_mistakes_of_a_launched_training_show_before_one_process_makes_its_data(
    options: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "run_launcher", None)
    with pretended_gpu(2):
        assert main(["train", *_words(tmp_path), "--head.layer_ids", "[2, 4, 6]", *options]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run" / "features").exists()


@pytest.mark.parametrize(
    ("command", "method", "options", "why"),
    [
        (
            "extract",
            "eagle3",
            [],
            "target.gpus is 2: one process makes .*, so leave --launch out of `draftsmith extract`",
        ),
        (
            "train",
            "eagle3",
            ["--features.source", "online"],
            "features.source: online each process .*: set it to store, or leave",
        ),
        ("run", "medusa2", [], "with method: medusa2 each process of --launch needs all layers"),
    ],
)
def test_a_launch_whose_processes_would_need_all_layers_is_refused_before_any_is_loaded(
    command: str,
    method: str,
    options: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(draftsmith, "load_target", None)
    with pretended_gpu(2):
        assert main([command, *_words(tmp_path, method), *options]) == 2
    assert re.search(why, capsys.readouterr().err)
