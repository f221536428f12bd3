"""What `--launch` starts takes its modules from where they are installed."""

from pathlib import Path

import psutil
import pytest

from draftsmith.cli import launching

ACCELERATE = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


@pytest.mark.parametrize(
    ("file", "processes"),
    [
        pytest.param("cpu.yaml", 1, marks=pytest.mark.full),
        pytest.param("ddp-2cpu.yaml", 2, marks=pytest.mark.slow),
    ],
)
def test_modules_of_the_working_folder_are_not_run(
    file: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the launcher nor by its workers, nor those that lie beside the script."""
    here, script = tmp_path / "here", tmp_path / "there" / "work.py"
    for folder in (here, script.parent):
        folder.mkdir()
        for name in ("psutil", "accelerate", "yaml", "draftsmith"):
            (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'hostile')!r}, 'a').write(__file__)")
    script.write_text(
        "import os, psutil, draftsmith, accelerate\n"
        f"open({str(tmp_path / 'worker')!r} + os.environ.get('RANK', '0'), 'w').write(psutil.__file__)"
    )
    monkeypatch.chdir(here)
    words = [str(tmp_path), "--quiet", "--config_file", str(ACCELERATE / file), str(script)]
    assert launching.run_launcher(words, processes) == 0
    assert not (tmp_path / "hostile").exists()
    for rank in range(processes):
        assert (tmp_path / f"worker{rank}").read_text() == psutil.__file__
