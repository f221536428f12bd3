"""Checkpoints: what is damaged is named, and the one before it taken."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.errors import UserError
from draftsmith.train.checkpoints import Progress, latest_checkpoint, load_training_state, save_training_state
from tests.exports import make_medusa, make_target


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder with checkpoints of three steps saved, and files of somebody else's that are called much the same."""
    for name in ("step_by_step", "step_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    accelerator, head = prepared()
    for step in (1, 2, 3):
        with torch.no_grad():
            next(head.parameters()).fill_(step)
        save_training_state(accelerator, tmp_path, Progress(step=step), head)
    return tmp_path


def prepared():
    accelerator = Accelerator(cpu=True)
    head = make_medusa(make_target())
    accelerator.prepare(head, torch.optim.AdamW(head.parameters()))
    return accelerator, head


def resume(folder: Path) -> tuple[int, float]:
    accelerator, head = prepared()
    progress = load_training_state(accelerator, folder, head)
    return progress.step, float(next(head.parameters()).flatten()[0])


def test_two_are_kept_and_nobody_elses_folder_goes(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_3", "step_7", "step_by_step"]
    assert resume(folder) == (3, 3.0)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "progress.json", "random_states_0.pkl", "DONE"])
@pytest.mark.parametrize("way", ["cut", "flipped", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    way: str, file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder / "step_3" / file, way)
    assert resume(folder) == (2, 2.0)
    no_checkpoint_at_all = (file, way) == ("DONE", "gone")
    assert ("step_3 is damaged" in capsys.readouterr().err) == (not no_checkpoint_at_all)


def test_where_all_are_damaged_it_is_said(folder: Path) -> None:
    for step in (2, 3):
        spoil(folder / f"step_{step}" / "model.safetensors", "cut")
    with pytest.raises(
        UserError, match=r"No checkpoint in .* is as it was saved \(step_3: model\.safetensors.*--redo train"
    ):
        latest_checkpoint(folder)


def test_one_of_an_earlier_version_has_no_digests(folder: Path) -> None:
    (folder / "step_3" / "DONE").write_text("")
    assert resume(folder) == (3, 3.0)
    spoil(folder / "step_3" / "model.safetensors", "cut")
    with pytest.raises(UserError, match=r"step_3 cannot be loaded .*--redo train"):
        resume(folder)


def spoil(path: Path, way: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x41
    if way == "gone":
        path.unlink()
    else:
        path.write_bytes(data if way == "flipped" else data[: len(data) // 2])


def test_a_damaged_one_is_replaced_when_training_comes_there_again(folder: Path) -> None:
    spoil(folder / "step_3" / "model.safetensors", "cut")
    accelerator, head = prepared()
    with torch.no_grad():
        next(head.parameters()).fill_(30)
    save_training_state(accelerator, folder, Progress(step=3), head)
    assert resume(folder) == (3, 30.0)
