"""The doctor sees what is wrong, says how to mend it, and works where nothing else does."""

import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from draftsmith.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


def the(checks: list[doctor.Check], name: str) -> doctor.Check:
    """Return the one check of that name."""
    (found,) = [check for check in checks if check.name == name]
    return found


def test_counts_what_is_bad_and_cuts_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([doctor.Check("One", "ok", "fine")]),))
    assert doctor.run_doctor() == 0
    broken = doctor.Check("Two", "bad", "[broken]", "run a command that is longer than the console is wide")
    monkeypatch.setattr(doctor, "CHECKS", (*doctor.CHECKS, lambda: iter([broken])))
    assert doctor.run_doctor() == 1
    text = capsys.readouterr().out
    assert "[broken]" in text
    assert "-> run a command that is longer than the console is wide" in text  # whole, so that it can be copied
    assert "1 of 2 checks need a fix." in text


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("libtorch_cpu.so: cannot open")])
def test_goes_on_where_torch_cannot_be_imported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(doctor.importlib, "import_module", refuse)
    assert the(list(doctor.check_torch()), "torch").state == "bad"
    assert [check.name for check in doctor.check_hardware()] == ["Memory", "CPU"]


def test_every_check_runs_here_and_every_bad_one_has_a_fix() -> None:
    checks = [check for look in doctor.CHECKS for check in look()]
    assert {check.state for check in checks} <= {"ok", "note", "bad"}
    assert all(check.fix for check in checks if check.state == "bad")
    assert the(checks, "Rooms").state == "ok"
    assert the(checks, "Packages").state == "ok"
    assert the(checks, "torch").state == "ok"


def make_checkout(folder: Path) -> Path:
    """A repository with folders and links but without code; returns its package folder."""
    package = folder / "draftsmith"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    for room in doctor.ROOMS:
        (folder / room).mkdir()
        (package / room).symlink_to(f"../{room}")
    return package


@pytest.mark.parametrize("copied", [False, True])
def test_links_that_are_small_files_or_copies_are_found_and_the_fix_mends_them(copied: bool, tmp_path: Path) -> None:
    package = make_checkout(tmp_path)
    assert next(doctor.check_rooms(package)).state == "ok"
    for room in ("data", "eval"):
        (package / room).unlink()
        if copied:
            (package / room).mkdir()
        else:
            (package / room).write_text(f"../{room}", encoding="utf-8")
    check = next(doctor.check_rooms(package))
    assert check.state == "bad"
    assert check.detail.startswith("data, eval: a copy" if copied else "data, eval: not a folder")
    subprocess.run(["bash", "-c", check.fix.split(": ", 1)[1]], cwd=tmp_path, check=True)
    assert next(doctor.check_rooms(package)).state == "ok"


def test_folders_of_an_installed_package_are_fine(tmp_path: Path) -> None:
    for room in doctor.ROOMS:
        (tmp_path / "draftsmith" / room).mkdir(parents=True)
    assert next(doctor.check_rooms(tmp_path / "draftsmith")).state == "ok"


def test_an_installed_package_is_told_nothing_of_scripts(tmp_path: Path) -> None:
    (tmp_path / "draftsmith" / "cli").mkdir(parents=True)
    file = shutil.copy(ROOT / "draftsmith" / "cli" / "doctor.py", tmp_path / "draftsmith" / "cli")
    found = runpy.run_path(str(file))
    assert found["INSTALL"] == "pip install --upgrade draftsmith"
    assert doctor.INSTALL.startswith("bash scripts/quickstart.sh")


def test_script_works_without_links_and_without_any_package(tmp_path: Path) -> None:
    package = make_checkout(tmp_path)
    (package / "cli").mkdir()
    shutil.copy(ROOT / "draftsmith" / "cli" / "doctor.py", package / "cli")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "doctor.py", tmp_path / "scripts")
    (package / "train").unlink()
    (package / "train").write_text("../train", encoding="utf-8")
    # -S: no site-packages, so neither torch nor rich nor draftsmith can be imported.
    command = [sys.executable, "-S", "-E", "scripts/doctor.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert not result.stderr
    assert "train: not a folder" in result.stdout
    assert "bash scripts/quickstart.sh" in result.stdout


@pytest.mark.parametrize(
    ("version", "state"),
    [("5.16.9", "bad"), ("5.17.0", "ok"), ("5.23.7", "ok"), ("5.24.0.dev0", "bad"), ("4.57.1", "bad"), ("6.0", "bad")],
)
def test_transformers_outside_the_tested_range(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: version)
    assert next(doctor.check_transformers()).state == state


def test_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    oldest, newest = doctor.TESTED_TRANSFORMERS
    assert f"{oldest[0]}.{oldest[1]}" in ranges["transformers"]
    assert f"{oldest[0]}.{oldest[1] - 1}.99" not in ranges["transformers"]
    assert f"{newest[0]}.{newest[1]}.99" in ranges["transformers"]
    assert f"{newest[0]}.{newest[1] + 1}" not in ranges["transformers"]
    assert f">={doctor.OLDEST_TORCH[0]}.{doctor.OLDEST_TORCH[1]}" == str(ranges["torch"])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in ("peft", "wandb") else real(name))
    check = next(doctor.check_packages())
    assert (check.state, check.detail) == ("bad", "missing: peft, wandb")


def test_gpu_lines_follow_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name="New", total_memory=80 * doctor.GB, major=9),
             SimpleNamespace(name="Old", total_memory=16 * doctor.GB, major=7)]  # fmt: skip
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: cards[index]
    )
    torch = SimpleNamespace(__version__="2.10.1+cu130", cuda=cuda, version=SimpleNamespace(cuda="13.0", hip=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    checks = list(doctor.check_torch())
    assert the(checks, "torch").state == "bad"
    assert the(checks, "GPU 0") == doctor.Check("GPU 0", "ok", "New, 80 GB, bf16 yes")
    assert the(checks, "GPU 1").state == "note"
    cuda.is_available = lambda: False
    assert "nvidia-smi" in the(list(doctor.check_torch()), "GPU").fix


def test_a_folder_that_cannot_be_written_or_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "deep" / "cache"))
    assert the(list(doctor.check_disk()), "draftsmith's cache").state in ("ok", "note")
    assert not (tmp_path / "deep").exists()  # looking leaves nothing behind

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=doctor.GB))
    assert the(list(doctor.check_disk()), "draftsmith's cache").state == "bad"

    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file" / "cache"))
    check = the(list(doctor.check_disk()), "draftsmith's cache")
    assert check.state == "bad"
    assert "DRAFTSMITH_CACHE" in check.fix


def test_cache_folder_is_the_one_that_data_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.data.embedded import default_cache

    for value in (None, str(tmp_path)):
        if value:
            monkeypatch.setenv("DRAFTSMITH_CACHE", value)
        else:
            monkeypatch.delenv("DRAFTSMITH_CACHE", raising=False)
        assert doctor.caches()["draftsmith's cache"] == default_cache()


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (None, "note"),
        ("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n", "ok"),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", "bad"),
        ("distributed_type: NO\nnum_processes: 2\nuse_cpu: true\n", "bad"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n", "ok"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nuse_cpu: false\n", "ok"),
    ],
)
def test_accelerate_configuration(
    text: str | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if text:
        (tmp_path / "accelerate").mkdir()
        (tmp_path / "accelerate" / "default_config.yaml").write_text(text, encoding="utf-8")
    assert next(doctor.check_accelerate()).state == state


def test_offline_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("draftsmith.foreign.code.why_offline", lambda: None)  # tests/foreign/test_hub.py asks
    assert next(doctor.check_hub()).state == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert next(doctor.check_hub()).state == "ok"
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert next(doctor.check_hub()).detail == "offline (TRANSFORMERS_OFFLINE)"


@pytest.mark.full
def test_the_command_goes_on_where_no_library_can_be_imported() -> None:
    """An installed package has no scripts/doctor.py."""
    program = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'safetensors', 'yaml'):\n"
        "            raise ImportError(f'no {name} here')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from draftsmith.cli.main import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "checks need a fix." in done.stdout
    assert "no torch here" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
