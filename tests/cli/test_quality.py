"""Tasks of lm-eval, answered by a lossy drafter and by the target alone, from files of our own; what is refused needs no lm-eval."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.cli.main import main
from draftsmith.data.conversations.templates import load_tokenizer, render_prompt
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.verify import Typical
from draftsmith.heads.checkpoint import load_checkpoint, save_head
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.registry import find_method
from draftsmith.target.target import load_target
from tests.workplace import fails, make_workplace

pytestmark = pytest.mark.full

PROMPTS, ANSWER, STOP = 6, 10, "e"
TASK: dict[str, Any] = {
    "task": "numbers",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "number {{n}}?",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [STOP], "max_gen_toks": ANSWER, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def needs_lm_eval(test: Any) -> Any:
    """Mark a test that has lm-eval read its own list of tasks, which takes it seconds."""
    missing = find_spec("lm_eval") is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="the extra lm-eval is not installed")(test))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and Medusa heads that have learnt nothing."""
    folder = make_workplace(tmp_path_factory.mktemp("quality"))
    target = load_target(str(folder / "target"), device="cpu")
    save_head(find_method("medusa").build(MedusaOptions(num_heads=2), target, None), folder / "head", target)
    return folder


def words(place: Path, *own: str, drafts: str = "[{acceptance: typical}]", temperature: float = 2.0) -> list[str]:
    text = (place / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text) | {"method": "medusa", "head": {"num_heads": 2}}
    (place / "medusa.yaml").write_text(yaml.safe_dump(recipe))
    settings = ["--evaluate.drafts", drafts, "--evaluate.temperatures", f"[{temperature}]", "--evaluate.batch", "2"]
    return ["quality", "--recipe", str(place / "medusa.yaml"), "--head", str(place / "head"), *settings, *own]


def write_task(place: Path, answers: list[str], name: str = "task", **changes: Any) -> str:
    rows = [{"n": n, "answer": answer} for n, answer in enumerate(answers)]
    data = place / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}} | changes
    (place / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return str(place / f"{name}.yaml")


def own_answers(place: Path, *, lossy: bool, temperature: float) -> list[str]:
    """What the target writes, alone or with the lossy drafter, without lm-eval."""
    target, tokenizer = load_target(str(place / "target"), device="cpu"), load_tokenizer(str(place / "target"))
    asked = [render_prompt(tokenizer, [{"role": "user", "content": f"number {n}?"}]) for n in range(PROMPTS)]
    requests = [Request.seeded(f"numbers {n} 1", "tasks", ids, ANSWER, 0) for n, ids in enumerate(asked)]
    drafter, typical = TargetAlone(), None
    if lossy:
        drafter = find_method("medusa").make_drafter(load_checkpoint(place / "head", target), 2)
        typical = Typical()
    decoded = decode_batch(target, drafter, requests, Sampling(temperature), typical)
    texts = (tokenizer.decode(g.output_ids, skip_special_tokens=True) for g in decoded.generations)
    return [text.split(STOP)[0] for text in texts]


@needs_lm_eval
def test_a_lossy_drafter_is_scored_beside_the_target_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, lossy = (own_answers(place, lossy=lossy, temperature=2.0) for lossy in (False, True))
    same = sum(a == b for a, b in zip(alone, lossy, strict=True)) / PROMPTS
    assert same < 1, "the rule accepts what the target would not have written"
    output = place / "scores.json"
    task = write_task(place, alone)
    assert main(words(place, "--tasks", task, "--output", str(output))) == 0
    shown = capsys.readouterr().out
    found = json.loads(output.read_text())
    scores = {one["system"]: one for one in found["scores"]}
    assert list(scores) == ["target alone", "medusa, typical (lossy)"]
    for one in scores.values():
        assert (one["task"], one["metric"], one["prompts"]) == ("numbers", "exact_match", PROMPTS)
        assert one["temperature"] == 2.0
    assert scores["target alone"]["value"] == 1.0, "as its own answers are the right ones"
    assert scores["medusa, typical (lossy)"]["value"] == pytest.approx(same)
    assert "numbers" in shown
    assert shown.endswith(f"{output}\n")
    assert main(words(place, "--tasks", task, "--output", str(output), "--limit", "2")) == 0
    assert {one["prompts"] for one in json.loads(output.read_text())["scores"]} == {2}


@needs_lm_eval
def test_a_tuned_target_is_scored_once_where_nothing_is_lossy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(str(place / "target"), device="cpu")
    save_head(
        find_method("medusa2").build(Medusa2Options(num_heads=2, lora_r=4), target, None), place / "tuned", target
    )
    output, task = place / "tuned.json", write_task(place, own_answers(place, lossy=False, temperature=0.0))
    (place / "bush.json").write_text('{"choices": [[0], [1], [0, 0]]}')
    drafts = f"[{{tree: chain}}, {{tree: {place / 'bush.json'}}}, {{acceptance: typical}}]"
    own = ["--tasks", task, "--limit", "3", "--output", str(output), "--evaluate.temperatures", "[0, 2]"]
    command = words(place, *own, drafts=drafts)
    command[command.index("--head") + 1] = str(place / "tuned")
    assert main(command) == 0, capsys.readouterr().err
    scores = json.loads(output.read_text())["scores"]
    greedy, drawn = ([one["system"] for one in scores if one["temperature"] == t] for t in (0, 2))
    assert greedy == ["target alone", "medusa2, tuned target"]
    assert drawn == [*greedy, "medusa2, typical (lossy), tuned target"]
    assert [one["value"] for one in scores[:2]] == [1.0, 1.0], "the new adapter changes nothing yet"


@needs_lm_eval
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": "0"}, "by their likelihood"),
        ({"unsafe_code": True}, "runs the code that a model wrote"),
        ({"doc_to_text": "a long story " * 400}, "leaves no room for an answer"),
        ({"test_split": "nowhere"}, "which lm-eval cannot load"),
    ],
)
def test_tasks_that_cannot_be_answered_are_named(
    changes: dict[str, Any], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(place, ["a"] * PROMPTS, "odd", **changes)
    output = place / "never.json"
    assert message in fails(words(place, "--tasks", task, "--output", str(output)), capsys)
    assert not output.exists()


@needs_lm_eval
def test_what_changes_no_text_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write_task(place, ["a"] * PROMPTS)
    assert "changes what the target writes" in fails(words(place, "--tasks", task, drafts="[{tree: chain}]"), capsys)
    assert "changes what the target writes" in fails(words(place, "--tasks", task, temperature=0.0), capsys)
    assert "--tasks names no_such_task, which lm-eval cannot load" in fails(
        words(place, "--tasks", "no_such_task"), capsys
    )


def test_without_tasks_or_lm_eval_it_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "quality needs tasks of lm-eval: add --tasks gsm8k" in fails(words(place), capsys)
    assert "--output is" in fails(words(place, "--tasks", "a", "--output", "scores.txt"), capsys)
    assert "leave --redo out" in fails(words(place, "--tasks", "a", "--redo", "train"), capsys)
    monkeypatch.delitem(sys.modules, "draftsmith.cli.quality", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)  # the first that is imported
    assert "pip install 'draftsmith[lm-eval]'" in fails(words(place, "--tasks", "gsm8k"), capsys)
