"""What surrounds vLLM, with stand-ins for it: the job that its Python gets, what is read back, what is recorded inside."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError
from draftsmith.eval.engines import vllm_runner
from draftsmith.eval.engines.agreement import EngineAnswer, EngineRound
from draftsmith.eval.engines.vllm_client import VllmSettings, run_vllm

REQUESTS = [Request("a", "s", (5, 6), 4), Request("b", "s", (7,), 3)]
ANSWERS = {
    "0.0": [
        {"id": "a", "ids": [1, 2, 3, 2], "rounds": [{"drafted": [], "sampled": [1]}, {"drafted": [2, 3], "sampled": [2, 3, 2]}]},
        {"id": "b", "ids": [1, 2], "rounds": [{"drafted": [], "sampled": [1]}, {"drafted": [9, 9], "sampled": [2]}]},
    ]
}  # fmt: skip
COUNTERS = {
    "vllm:spec_decode_num_drafts": 2,
    "vllm:spec_decode_num_draft_tokens": 4,
    "vllm:spec_decode_num_accepted_tokens": 2,
}


def make_home(folder: Path, body: str) -> Path:
    """An environment whose Python does `body` with `job`, `result` (paths) and `json`."""
    home = folder / "home"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "python"
    head = f"#!{sys.executable}\nimport json, os, sys\nfrom pathlib import Path\n"
    program.write_text(head + "job, result = Path(sys.argv[2]), Path(sys.argv[3])\n" + body, encoding="utf-8")
    program.chmod(0o755)
    return home


def settings(home: Path) -> VllmSettings:
    draft = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 2}
    return VllmSettings(home, Path("target"), draft, context=64, eos_ids=(2,))


def answering(answers: dict, counters: dict) -> str:
    found = {"version": "0.0.1", "counters": counters, "answers": answers}
    return (
        f"result.write_text({json.dumps(found)!r})\nPath(job.parent, 'env').write_text(json.dumps(dict(os.environ)))\n"
    )


def test_a_run_gives_the_job_and_reads_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    home = make_home(tmp_path, answering(ANSWERS, COUNTERS))
    run = run_vllm(settings(home), REQUESTS, tmp_path / "run")
    assert run.version == "0.0.1"
    assert run.answers == {
        0.0: [
            EngineAnswer("a", (1, 2, 3, 2), (EngineRound((2, 3), 2),)),
            EngineAnswer("b", (1, 2), (EngineRound((9, 9), 0),)),
        ]
    }
    job = json.loads((tmp_path / "run" / "job.json").read_text())
    assert job["prompts"] == [
        {"id": "a", "ids": [5, 6], "max_new_tokens": 4},
        {"id": "b", "ids": [7], "max_new_tokens": 3},
    ]
    assert (job["model"], job["temperatures"], job["eos"]) == ("target", [0.0], [2])
    assert job["speculative_config"]["model"] == "draft"
    environment = json.loads((tmp_path / "run" / "env").read_text())
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "PYTHONPATH" not in environment


@pytest.mark.parametrize("name", COUNTERS)
def test_what_the_runner_missed_is_noticed(name: str, tmp_path: Path) -> None:
    home = make_home(tmp_path, answering(ANSWERS, COUNTERS | {name: COUNTERS[name] + 1}))
    with pytest.raises(AssertionError, match=name):
        run_vllm(settings(home), REQUESTS, tmp_path / "run")


def test_a_failure_is_one_sentence_with_vllms_own_error(tmp_path: Path) -> None:
    said = ("WARNING ValueError: of no account", "[rank0]: ValueError: no such layer: midlayer", "Processed: 0 of 20")
    home = make_home(tmp_path, "".join(f"print({line!r})\n" for line in said) + "sys.exit(1)\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("stale")
    with pytest.raises(UserError, match=r"vLLM failed: ValueError: no such layer: midlayer \(see .*vllm\.log\)\."):
        run_vllm(settings(home), REQUESTS, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_missing_environment_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot start .*nowhere"):
        run_vllm(settings(tmp_path / "nowhere"), REQUESTS, tmp_path / "run")


def test_the_recorder_splits_the_drafts_of_a_batch() -> None:
    rounds: dict[str, list] = {"x": [], "y": []}
    batch = types.SimpleNamespace(req_ids=["x", "y"], vocab_size=10)
    runner = types.SimpleNamespace(input_batch=batch)
    sampled = torch.tensor([[4, 5, -1], [6, -1, -1]])
    output = types.SimpleNamespace(sampled_token_ids=sampled)
    sample = vllm_runner.recording(lambda runner, logits, metadata: output, rounds)
    metadata = types.SimpleNamespace(draft_token_ids=torch.tensor([4, 8, 3]), num_draft_tokens=[2, 1])
    assert sample(runner, None, metadata) is output
    output.sampled_token_ids = torch.tensor([[7], [8]])
    sample(runner, None, None)
    assert rounds["x"] == [{"drafted": [4, 8], "sampled": [4, 5]}, {"drafted": [], "sampled": [7]}]
    assert rounds["y"] == [{"drafted": [3], "sampled": [6]}, {"drafted": [], "sampled": [8]}]


def test_the_repaired_temperatures_are_those_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the loop that vLLM's docstring describes."""
    sampler = types.ModuleType("vllm.v1.sample.rejection_sampler")
    package = types.ModuleType("vllm.v1.sample")
    package.rejection_sampler = sampler
    for name, module in {
        "vllm": types.ModuleType("vllm"),
        "vllm.v1": types.ModuleType("vllm.v1"),
        package.__name__: package,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_runner.repair_temperatures()
    x, ends = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    expected, start = [], 0
    for value, end in zip(x.tolist(), ends.tolist(), strict=True):
        expected += [1.0 if value == -1.0 else value] * (end - start)
        start = end
    found = sampler.expand_batch_to_tokens(x, ends, 5, replace_from=-1, replace_to=1)
    assert found.tolist() == expected
    assert found.dtype == x.dtype
    assert sampler.expand_batch_to_tokens(torch.tensor([3, 4]), torch.tensor([1, 3]), 3).tolist() == [3, 4, 4]
