"""The whole way on a miniature target: every stage, reuse, refusals, and kill -9 at each stage."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.main import main
from draftsmith.eval.results.result import read_result
from draftsmith.heads.eagle3.formats import load_eagle3_directory
from draftsmith.heads.record import read_passport
from draftsmith.target.target import load_target
from draftsmith.train import loop
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import digests, make_workplace, options

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Path:
    """A run directory with every stage done, in this process."""
    run = workplace / "finished"
    torch.set_num_threads(1)
    assert main(["run", *options(workplace, run)]) == 0
    return run


def test_run_leaves_results_report_and_export(workplace: Path, finished: Path) -> None:
    for temperature in ("t0", "t1"):
        result = read_result(finished / "evaluation" / temperature / "result.json")
        measures = result.drafters["eagle3"].overall
        assert set(result.drafters["eagle3"].slices) == {"chat", "code"}
        assert measures.prompts == 4
        assert measures.speedup is not None
        assert len(measures.k_sweep or ()) == 4
        assert sum(m.tokens or 0 for m in result.drafters["eagle3"].slices.values()) == measures.tokens
    passport = read_passport(finished / "export" / "eagle3")
    assert passport is not None
    assert passport.trained is not None
    assert passport.trained.longest <= 256
    assert [(one.drafter, one.temperature) for one in passport.measured] == [("eagle3", 0.0), ("eagle3", 1.0)]
    assert passport.measured[1].tau["overall"] == measures.tau
    greedy = read_result(finished / "evaluation" / "t0" / "result.json").drafters["eagle3"].overall
    assert greedy.tau == pytest.approx(greedy.tau_simulated, abs=1e-9)
    assert greedy.lossless is not None
    assert greedy.lossless.dtype == "float32"
    assert greedy.lossless.equal == greedy.lossless.checked == 4
    assert greedy.lossless.tau == pytest.approx(greedy.lossless.tau_simulated, abs=1e-9)
    assert (finished / "evaluation" / "report.html").exists()
    assert (finished / "evaluation" / "report.md").exists()
    target = load_target(str(workplace / "target"))
    assert load_eagle3_directory(finished / "export" / "eagle3", target).reads.layer_ids == (2, 4, 6)


def test_results_go_to_the_dashboard_of_the_training_once(
    workplace: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    words = [*options(workplace, run), "--tracking.backends", "[tensorboard]"]
    assert main(["export", *words, "--head", str(finished)]) == 0
    assert "no dashboard is given its results" in capsys.readouterr().err
    assert not (run / "train" / "tensorboard").exists()
    with monkeypatch.context() as broken:
        broken.setattr("draftsmith.train.trackers.TensorBoard.start", lambda board: 1 / 0)
        assert main(["export", *words]) == 0, "what was made is there"
    assert "warning: TensorBoard did not start (division by zero)" in capsys.readouterr().err
    for _ in range(2):
        assert main(["export", *words]) == 0
    (events,) = (run / "train" / "tensorboard").glob("events.out.tfevents.*")
    found = EventAccumulator(str(events))
    found.Reload()
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in found.Scalars("train/loss")] == [line["step"] for line in lines]
    assert "evaluation/slices/text_summary" in found.Tags()["tensors"]
    tau = read_result(run / "evaluation" / "t0" / "result.json").drafters["eagle3"].overall.tau
    assert found.Scalars("evaluation/eagle3/t0/tau")[0].value == pytest.approx(tau)


def test_answers_keep_their_ids_and_metrics_their_steps(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 80
    assert all(row["prompt_ids"] and row["output_ids"] and row["finish_reason"] in ("eos", "length") for row in rows)
    lines = [json.loads(line) for line in (finished / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert sum("tau" in line for line in lines) == 3
    assert set(lines[-1]["tau"]["slices"]) == {"chat", "code"}


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        *(["run", "--redo", stage] for stage in ("answers", "features", "train", "evaluate", "export")),
        ["train", "--redo", "train"],
        ["evaluate", "--redo", "evaluate"],
        ["export", "--redo", "export"],
        ["report"],
    ],
    ids=" ".join,
)
def test_a_project_of_the_users_is_left_alone(
    words: list[str],
    workplace: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Started in a git repository with folders of the names that a run has, and `--output_dir .`."""
    mine = ("train/model.py", "export/eagle3/config.json", "evaluation/t0/notes.md", "answers.jsonl", ".gitignore")
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "mine"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.chdir(tmp_path)
    head = ["--head", str(finished / "train" / "best")] if words[0] in ("evaluate", "export") else []
    assert main([*words, *options(workplace, Path(".")), *head]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "is not empty and no run of draftsmith" in said or words == ["report"], said
    assert subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True).stdout == b""


def test_redo_is_refused_before_other_stages_are_made(
    workplace: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of more conversations are not made first."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "train" / "best" / "notes.txt").write_text("mine")
    before = digests(run)
    assert main(["run", *options(workplace, run), "--data.limit", "60", "--redo", "train"]) == 2
    assert "notes.txt was not made by draftsmith, but --redo would remove it" in capsys.readouterr().err
    assert digests(run) == before


def test_second_run_reuses_every_stage(workplace: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(finished)
    assert main(["run", *options(workplace, finished)]) == 0
    assert digests(finished) == before
    printed = capsys.readouterr()
    for stage in ("answers", "features", "train", "evaluate", "export"):
        assert f"{stage}: reusing {finished}" in printed.err
    assert f"export: reusing {finished / 'export' / 'eagle3'}\n" in printed.err
    assert "result.json" in printed.out


def test_changed_settings_are_refused_by_name(
    workplace: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(finished)
    assert main(["train", *options(workplace, finished), "--answers.temperature", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "answers.temperature was 1.0, is 0.5" in message
    assert "--redo answers" in message
    for command in ("run", "regenerate", "extract", "train"):
        assert main([command, *options(workplace, finished), "--data.limit", "60"]) == 2
        message = capsys.readouterr().err
        assert "The data changed (data.limit was None, is 60) since a head was trained" in message, "no hash"
        assert f"--data_dir {finished} to add to the answers there" in message
    assert digests(finished) == before


def test_data_grows_without_loss(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers and hidden states of conversations that are still in the data stay; a head trained on fewer is made anew if asked."""
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    words = ["--answers.batch", "1", "--features.batch_tokens", "1", "--train.evaluations", "1"]
    assert main(["train", *options(workplace, grown), *words, "--data.limit", "50"]) == 0
    rows = (grown / "answers.jsonl").read_text().splitlines()
    capsys.readouterr()
    for limit in ("60", "70"):
        assert main(["train", "--redo", "train", *options(workplace, grown), *words, "--data.limit", limit]) == 0
        said = capsys.readouterr().err
        assert "answers: those of conversations that are still in the data under their ids are kept" in said
        assert "features: those of conversations that are still in the data under their ids are kept" in said
    assert not [*grown.rglob(".earlier")]
    assert main(["train", *options(workplace, whole), *words, "--data.limit", "70"]) == 0
    assert set(rows) < set((grown / "answers.jsonl").read_text().splitlines())
    made = {name: digest for name, digest in digests(grown).items() if "answers" in name or "features" in name}
    assert made
    assert made.items() <= digests(whole).items()
    assert load_file(grown / "train" / "best" / "model.safetensors").keys()
    shutil.rmtree(grown / "train")
    other = tmp_path / "other"
    assert main(["extract", *options(workplace, other), *words, "--data_dir", str(grown), "--data.limit", "60"]) == 0
    assert len((grown / "answers.jsonl").read_text().splitlines()) == 60


def test_a_run_that_shares_its_data_stays_usable(
    workplace: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run adds to the data of the first, or makes them again with other layers: what each head learned does not change."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(finished, first)
    monkeypatch.chdir(tmp_path)
    again = ["run", *options(workplace, Path("first"))]
    for more in (["--data.limit", "60"], ["--redo", "features", "--head.layer_ids", "[0,1,2]", "--data.limit", "60"]):
        trained = {n: d for n, d in digests(first).items() if n.startswith(("train/", "evaluation/t", "export/"))}
        assert main(["train", *options(workplace, second), "--data_dir", str(first), *more, "--redo", "train"]) == 0
        shared = {n: d for n, d in digests(first).items() if n.startswith(("answers", "features/"))}
        learned = digests(second)
        capsys.readouterr()
        assert main(again) == 0
        said = capsys.readouterr().err
        assert re.search(r"train: reusing first, whose (answers and )?features another run has changed since", said)
        assert trained.items() | shared.items() <= digests(first).items()
        assert digests(second) == learned
        assert main(["extract", *again[1:]]) == 2
        refusal = capsys.readouterr().err
        assert f"of the run in {second}" in refusal or f"by the run in {second}" in refusal
        assert "--redo" not in refusal
        same = [word for word in more if word not in ("--redo", "features")]
        assert main(["train", *options(workplace, second), "--data_dir", str(first), *same]) == 0


def test_one_folder_by_two_names_is_one_run(workplace: Path, finished: Path, tmp_path: Path) -> None:
    """As a relative path, an absolute one and through a link: stages are found, and locked once."""
    run, link = tmp_path / "run", tmp_path / "link"
    shutil.copytree(finished, run)
    link.symlink_to(run)
    before = digests(run)
    for name in (os.path.relpath(run), str(run), str(link), str(run / "train" / "..")):
        assert main(["train", *options(workplace, run), "--data_dir", name]) == 0
        assert digests(run) == before
    weights = run / "train" / "best" / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert main(["train", *options(workplace, link), "--data_dir", os.path.relpath(run), "--redo", "train"]) == 0
    assert weights.stat().st_mtime_ns != made
    assert digests(run)["train/best/model.safetensors"] == before["train/best/model.safetensors"]
    assert (run / "answers.jsonl").stat().st_mtime_ns == (finished / "answers.jsonl").stat().st_mtime_ns
    assert json.loads((run / "run.json").read_text()).keys() == {"answers", "features", "train", "evaluate", "export"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate"], "target.path was"),
        (["export"], "trained for"),
        (["export", "--redo", "export"], "trained for"),
    ],
    ids=" ".join,
)
def test_changed_target_is_refused(
    words: list[str], said: str, workplace: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation of another target may be asked for, but does not replace this one by itself."""
    other = tmp_path / "other"
    shutil.copytree(workplace / "target", other)
    tiny_model("llama", seed=5, vocab_size=len(tiny_tokenizer())).save_pretrained(other)
    before = digests(finished)
    assert main([words[0], *options(workplace, finished), *words[1:], "--target.path", str(other)]) == 2
    assert said in capsys.readouterr().err
    assert digests(finished) == before, "a mistake changes nothing"


@pytest.mark.parametrize(
    "mistake",
    [
        ["train", "--redo", "train", "--data.heldout", "100000"],
        ["train", "--redo", "features", "--head.layer_ids", "[2,4,99]"],
        ["train", "--features.layer_ids", "[1,3]", "--redo", "features"],
        ["train", "--head.draft_vocab_size", "99999", "--redo", "train"],
        ["train", "--train.lr", "-1", "--redo", "train"],
        ["train", "--train.loss.depth_weights", "[1.0]", "--redo", "train"],
        ["train", "--train.loss.depth_weights", "[1.0,-1.0,1.0]", "--redo", "train"],
        ["evaluate", "--redo", "evaluate", "--evaluate.prompts", "[nowhere.jsonl]"],
        ["evaluate", "--redo", "evaluate", "--export.layout", "onnx"],
        ["export", "--redo", "export", "--head", "nowhere"],
        ["export", "--redo", "export", "--export.layout", "onnx"],
        ["run", "--export.layout", "onnx"],
        ["run", "--launch", "nowhere.yaml"],
    ],
    ids=" ".join,
)
def test_a_mistake_removes_nothing(
    mistake: list[str], workplace: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(finished)
    assert main([mistake[0], *options(workplace, finished), *mistake[1:]]) == 2
    assert capsys.readouterr().err.count("draftsmith: ") == 1
    assert digests(finished) == before


def test_what_a_result_depends_on_is_noticed(
    workplace: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other prompts and another head are other results, although no setting changed."""
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text((workplace / "prompts.jsonl").read_text().replace("number 3", "number 4"))
    assert main(["evaluate", *options(workplace, run), "--evaluate.prompts", f"[{prompts}]"]) == 2
    assert "prompts was" in capsys.readouterr().err
    weights = run / "train" / "best" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: value + 1 if name == "norm.weight" else value for name, value in tensors.items()}, weights)
    for stage in ("evaluate", "export"):
        assert main([stage, *options(workplace, run)]) == 2
        assert "(the head changed)" in capsys.readouterr().err


def test_what_a_target_holds_besides_its_weights_is_noticed(
    workplace: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end tokens end answers elsewhere; its name and its dtype are in what is exported."""
    other, run = tmp_path / "other", tmp_path / "copy"
    shutil.copytree(workplace / "target", other)
    shutil.copytree(finished, run)
    moved = ["--target.path", str(other)]
    assert main(["evaluate", *options(workplace, run), *moved]) == 0
    assert "evaluate: reusing" in capsys.readouterr().err, "where a target lies says nothing about what was measured"
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    for words, said in (
        (["evaluate", *moved], "target.path was"),
        (["export", *moved], "target.reference was"),
        (["export", "--target.dtype", "bfloat16"], "target.dtype was 'float32', is 'bfloat16'"),
    ):
        before = digests(run)
        assert main([words[0], *options(workplace, run), *words[1:]]) == 2
        assert said in capsys.readouterr().err
        assert digests(run) == before, "a mistake changes nothing"
    assert main(["export", *options(workplace, run), *moved, "--export.dtype", "bfloat16", "--redo", "export"]) == 0
    config = json.loads((run / "export" / "eagle3" / "config.json").read_text())
    assert "bfloat16" in (config.get("torch_dtype"), config.get("dtype"))


def test_lost_files_are_made_again(workplace: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "features")
    shutil.rmtree(run / "export")
    assert main(["run", *options(workplace, run)]) == 0
    kept = {name: value for name, value in digests(finished).items() if not name.startswith("evaluation")}
    found = digests(run)
    # The README of the export names the folder it is in.
    readme = "export/eagle3/README.md"
    assert {n: found[n] for n in kept if n not in ("run.json", readme)} == {
        n: kept[n] for n in kept if n not in ("run.json", readme)
    }
    assert (run / readme).read_text().replace(str(run), str(finished)) == (finished / readme).read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--redo", "train"], "`draftsmith evaluate` does not make that stage here, only evaluate"),
        (["evaluate", "--no-decode", "--redo", "evaluate"], "only simulate: leave --redo evaluate out"),
        (["inspect", "--redo", "answers"], "nor any other"),
        (["train", "--features.source", "online", "--redo", "features"], "only answers, train"),
        (["run", "--answers.regenerate", "false", "--redo", "answers"], "only features, train, evaluate, export"),
    ],
)
def test_redo_of_what_the_command_does_not_make_is_refused(
    words: list[str], message: str, workplace: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(finished)
    assert main([words[0], *options(workplace, finished), *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert digests(finished) == before


def test_inspect_shows_the_recipes_own_answers_or_the_data(
    workplace: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *options(workplace, finished), "--count", "1"]) == 0
    printed, replaced = capsys.readouterr(), "those of the data stand here for them"
    assert "question" in printed.out
    assert replaced not in printed.err
    other = tmp_path / "other.jsonl"
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Something else."}]}]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", *options(workplace, finished), "--data.sources", f"[{other}]", "--count", "1"]) == 0
    printed = capsys.readouterr()
    assert "Something else." in printed.out
    assert "data: " in printed.err
    assert replaced in printed.err
    given = ["--data.sources", f"[{other}]", "--answers.regenerate", "false"]
    assert main(["inspect", *options(workplace, finished), *given, "--count", "1"]) == 0
    assert replaced not in capsys.readouterr().err

    # The first is too long to be learned, the others are not; then prompts alone, which the target is to answer.
    long = [{"messages": [{"role": "user", "content": "Hi " * 400}, rows[0]["messages"][1]]}]
    other.write_text("".join(json.dumps(row) + "\n" for row in long + rows))
    assert main(["inspect", *options(workplace, finished), *given, "--count", "1"]) == 0
    assert "Something else." in capsys.readouterr().out
    other.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    assert main(["inspect", *options(workplace, finished), "--data.sources", f"[{other}]", "--count", "1"]) == 0
    assert "not made yet, and the data hold none to show (" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize(("command", "redo"), [("run", False), ("train", True)])
def test_training_is_launched_in_processes_of_their_own(
    command: str,
    redo: bool,
    workplace: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`--launch` goes through accelerate and leaves the same head, and the launched processes are the ones that train. Nothing is said
    by both."""
    run = tmp_path / "launched"
    dropped = ("evaluation", "export") if redo else ("train", "evaluation", "export")
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns(*dropped))
    config = str(ROOT / "recipes" / "accelerate" / "cpu.yaml")
    words = ["--launch", config, "--evaluate.repeats", "1", "--evaluate.temperatures", "[0.0]"]
    marker = finished / "train" / "best" / "model.safetensors"
    monkeypatch.setattr(loop, "train", None)  # of this process
    assert main([command, *options(workplace, run), *words, *(["--redo", "train"] if redo else [])]) == 0
    assert (run / "evaluation").exists() == (command == "run")
    assert (run / marker.relative_to(finished)).stat().st_mtime_ns > marker.stat().st_mtime_ns
    assert digests(run)["train/metrics.jsonl"] == digests(finished)["train/metrics.jsonl"]
    lines = r"^(?:(?:answers|features|train): reusing|data: |warning: the head has learned nothing).*"
    said = Counter(re.findall(lines, capfd.readouterr().err, re.M))
    assert [line for line, times in said.items() if times > 1] == []
    assert f"answers: reusing {run}" in said
    assert f"train: reusing {run}" not in said


def losses_of(workplace: Path, finished: Path, name: str, *words: str) -> list[float]:
    """Train on the answers and states of a finished run, by AdamW, as Muon blows up the rounding of small singular values."""
    run = workplace / name
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("train", "evaluation", "export"))
    entries = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({k: entries[k] for k in ("answers", "features")}))
    adamw = ["--train.optimizer", "adamw", "--train.lr", "1e-3"]
    assert main(["train", *options(workplace, run), *adamw, *words]) == 0
    return [json.loads(x)["loss"] for x in (run / "train" / "metrics.jsonl").read_text().splitlines()]


def test_online_features_train_the_same_head(workplace: Path, finished: Path) -> None:
    """The target in memory and the store on disk are one source to training."""
    stored = losses_of(workplace, finished, "stored")
    online = losses_of(workplace, finished, "online", "--features.source", "online")
    assert online == pytest.approx(stored, rel=1e-4)


def test_accumulation_and_batch_size_give_one_trajectory(workplace: Path, finished: Path) -> None:
    """4 rows at once, and 2 + 2 or 1 + 1 + 1 + 1 accumulated, are the same steps."""
    losses = []
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        sizes = ["--train.rows", str(rows), "--train.accumulation", str(accumulation)]
        losses.append(losses_of(workplace, finished, f"accumulate-{rows}", *sizes))
    assert losses[1] == pytest.approx(losses[0], rel=5e-5)
    assert losses[2] == pytest.approx(losses[0], rel=5e-5)


@pytest.mark.parametrize(
    ("stage", "trigger"),
    [
        ("regenerate", "answers.jsonl.partial"),
        pytest.param("extract", "features/shard-00000.safetensors", marks=pytest.mark.slow),
        pytest.param("train", "train/step_*/DONE", marks=pytest.mark.slow),
    ],
)
def test_kill_9_then_resume_gives_the_same_files(workplace: Path, finished: Path, stage: str, trigger: str) -> None:
    run = workplace / f"killed-{stage}"
    command = [sys.executable, "-m", "draftsmith.cli.main", stage, *options(workplace, run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not any(path.stat().st_size for path in run.glob(trigger)) and "DONE" not in trigger) or not list(
        run.glob(trigger)
    ):
        assert process.poll() is None, "the stage ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    torch.set_num_threads(1)
    assert main([stage, *options(workplace, run)]) == 0
    names = {"regenerate": ["answers.jsonl"], "extract": ["features"], "train": ["train/best", "train/metrics.jsonl"]}
    expected, found = digests(finished), digests(run)
    compared = [n for n in expected if any(n == p or n.startswith(p + "/") for p in names[stage])]
    assert compared
    assert {n: found[n] for n in compared} == {n: expected[n] for n in compared}
