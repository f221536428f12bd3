"""The check of a CUDA machine, in the parts that need none: time limits, wheels, what is written when steps fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from scripts.bench.gpu import check as gpu_check
from scripts.bench.gpu.check import GpuCheck, Step, install_wheels, main, read_tests, run_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(tmp_path: Path, code: str, limit: float = 60.0) -> gpu_check.Outcome:
    return run_step(Step("a step", 1.0, script(code)), limit, dict(os.environ), tmp_path / "log")


def test_a_step_that_fails_leaves_its_last_words(tmp_path):
    outcome = run(tmp_path, "print('first'); print('bar 1\\rbar 2\\rsorry'); raise SystemExit(3)")
    assert (outcome.status, outcome.error) == ("failed", ["first", "sorry"])
    assert run(tmp_path, "print('fine')").error == []
    assert (tmp_path / "log").read_text().count("===== a step") == 2


def test_a_step_that_hangs_is_ended_with_all_it_started(tmp_path):
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); time.sleep(60)"
    started = time.monotonic()
    outcome = run(tmp_path, code, 4.0)
    assert outcome.status == "timed out"
    assert time.monotonic() - started < 30
    pid = int(outcome.error[0])
    # A killed process takes a moment to go.
    while runs(pid) and time.monotonic() - started < 30:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie, which init may never reap."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def make_check(tmp_path: Path, minutes: float = 9.0) -> GpuCheck:
    options = gpu_check._parse(["--device", "cpu", "--output", str(tmp_path / "out"), "--minutes", str(minutes)])
    options.output.mkdir()
    return GpuCheck(options, tmp_path, dict(os.environ), time.monotonic())


def test_what_a_step_leaves_of_its_time_goes_to_the_next(tmp_path):
    check = make_check(tmp_path)
    for share in (0.1, 0.3):
        check._step(Step("quick", share, script("pass")))
    first, second = check.outcomes
    assert first.limit_seconds == pytest.approx(0.1 * 525, abs=1)
    assert second.limit_seconds == pytest.approx(0.4 * 525 - first.seconds, abs=2)


def test_the_shares_fill_the_time_and_a_failed_step_costs_no_other(tmp_path, monkeypatch):
    check = make_check(tmp_path)
    seen: list[Step] = []

    def fake(step: Step, limit: float, environment: dict[str, str], log: Path) -> gpu_check.Outcome:
        seen.append(step)
        status = "timed out" if step.name == "tests" else "passed"
        return gpu_check.Outcome(step.name, status, 0.0, limit, " ".join(step.command))

    monkeypatch.setattr(gpu_check, "run_step", fake)
    check.run()
    assert sum(step.share for step in seen) == pytest.approx(1.0)
    assert [step.name for step in seen] == ["machine", "tests", *gpu_check.PARTS, "eagle3 train", "eagle3 evaluate"]
    train = seen[-2].command
    assert train[train.index("--evaluate.dtype") + 1] == "bfloat16"
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert not written["passed"]
    assert [step["status"] for step in written["steps"]] == ["passed", "timed out", *["passed"] * 8]


def test_parts_that_are_chosen_share_the_time(tmp_path, monkeypatch):
    check = make_check(tmp_path)
    check.options.only = ["decoding", "eagle3"]
    seen = []
    monkeypatch.setattr(check, "_step", seen.append)
    check.run()
    assert [step.name for step in seen] == ["machine", "decoding", "eagle3 train", "eagle3 evaluate"]
    assert sum(step.share for step in seen) == pytest.approx(1.0)


def test_the_options_of_the_heads_are_keys_of_their_recipes(tmp_path):
    from draftsmith.recipe.parse import parse_recipe

    check = make_check(tmp_path)
    for head in gpu_check.HEADS:
        for check.options.small in (False, True):
            recipe = parse_recipe(check._recipe(head))
            assert (recipe.method, recipe.target.path) == (head, "embedded")
            assert (recipe.target.dtype, recipe.evaluate.dtype, recipe.target.device) == ("bfloat16", "bfloat16", "cpu")
            assert recipe.train.precision == "bf16"
            assert not recipe.evaluate.generate


def test_missing_wheels_are_named(tmp_path, monkeypatch):
    listed = tmp_path / "scripts" / "gpu_wheels.txt"
    listed.parent.mkdir()
    listed.write_text("# a comment\npytest==9.9.9\nnot-there==1.0\nnor_this==2.0  # why\n")
    monkeypatch.setattr(gpu_check, "WHEELS", listed)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    with pytest.raises(
        UserError, match=r"lacks not-there==1.0, nor_this==2.0, and .* without --wheels \(.* scripts/gpu_wheels"
    ):
        install_wheels(None, tmp_path / "packages")
    with pytest.raises(UserError, match=rf"from {tmp_path} \(.*No matching distribution found for not-there==1.0"):
        install_wheels(tmp_path, tmp_path / "packages")


def test_the_wheels_are_pinned_as_in_the_constraints():
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in gpu_check.WHEELS.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert not [line for line in lines if line not in pinned]


def test_a_machine_without_a_gpu_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_tests_that_are_cut_off_keep_what_they_found(tmp_path):
    (tmp_path / "test_few.py").write_text(
        "import os, pytest, signal, time\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('x', ['a b', 'PASSED'])\n"
        "def test_bad(x): assert 0\n"
        "@pytest.mark.skip\n"
        "def test_left(): pass\n"
        "@pytest.fixture\n"
        "def spoiled():\n    yield\n    assert 0\n"
        "def test_end(spoiled): pass\n"
        "def test_last():\n"
        "    while 'ERROR' not in open('log').read(): time.sleep(0.01)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    options = ["-v", "-n", "1", "-p", "no:cacheprovider", "test_few.py"]
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, stdout=file, check=False)
    failures = [f"test_few.py::{name}" for name in ("test_bad[a b]", "test_bad[PASSED]", "test_end")]
    assert read_tests(log) == {"passed": 1, "failed": 3, "skipped": 1, "failures": failures}
    log.write_text("===== machine: python\n")
    assert read_tests(log) is None


def test_the_whole_check_runs_on_a_cpu(tmp_path):
    options = ["--device", "cpu", "--small", "--minutes", "15", "--output", str(tmp_path)]
    command = ["bash", "scripts/gpu_check.sh", *options]
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['peft'] = None\n")  # a machine that lacks it
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["passed"]
    assert sorted(written["results"]) == ["eagle3-t0", "eagle3-t1"]
    assert written["decoding"]["eagle3"]["same_text"]
    assert written["sources"]["store"]["tokens"] == written["sources"]["online"]["tokens"] == 2048
    assert written["training"]["2 x 64"]["flops"] > 1e7
    assert written["training"]["2 x 64"]["share_of_products"] > 0
    assert written["long"]["training step"]["ms"] > 0
    assert 0 < written["numbers"]["attention"]["output"] < 0.02
    assert 0 < written["numbers"]["gradients of 7 steps"]["median"] < 0.2
    assert written["stages"]["data"]["answers"]["tokens_per_second"] > 0
