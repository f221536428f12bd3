"""--fail-under through `draftsmith evaluate`: refused before decoding, or held against what was written."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftsmith.cli.main import main
from draftsmith.eval.results.result import read_result
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.eagle1 import head as eagle1
from draftsmith.heads.export.export import export_head
from draftsmith.target.target import load_target
from tests.workplace import fails, make_workplace, options, save_untrained

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that evaluate an untrained head on two slices of five prompts."""
    folder = make_workplace(tmp_path_factory.mktemp("gating"), prompts=10)
    fewer = {
        "temperatures": "[0.0]",
        "max_new_tokens": "8",
        "repeats": "1",
        "num_speculative_tokens": "1",
        "max_k": "1",
    }
    fewer |= {"generate": "false"}
    own = [word for key, value in fewer.items() for word in (f"--evaluate.{key}", value)]
    return ["evaluate", "--head", str(save_untrained(folder)), *own, *options(folder, folder / "run")]


def test_refused_before_anything_is_decoded(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = fails([*words, "--fail-under", "chat.tau.low=2"], capsys)
    assert "chat has 5 prompts, and there is no interval over fewer than 10" in said
    assert not list(Path(words[-1]).rglob("result.json"))


def test_a_published_head_of_another_method_than_the_recipes(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those of the head that is given; what the recipe exports and trains does not concern it."""
    head, target = tmp_path / "eagle1", load_target(str(Path(words[-1]).parent / "target"))
    export_head(eagle1.build(Eagle1Options(), target, None), target, head)
    given = [*words, "--head", str(head), "--output_dir", str(tmp_path / "run"), "--export.layout", "eagle3_llama_cpp"]
    given += ["--head.draft_vocab_size", "999999", "--evaluate.beside.ours", words[words.index("--head") + 1]]
    assert main([*given, "--no-decode", "--fail-under", "eagle3:tau_simulated=7.5"]) == 2
    assert "no drafter eagle3; there are eagle1, ours" in capsys.readouterr().err
    assert main([*given, "--no-decode", "--fail-under", "eagle1:code.tau_simulated=7.5"]) == 3
    result = read_result(tmp_path / "run" / "simulation" / "t0" / "result.json")
    assert set(result.drafters) == {"eagle1", "ours"}
    assert main([*given, "--no-decode"]) == 0
    assert "simulate: reusing" in capsys.readouterr().err
    (head / "config.json").write_text(
        (head / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1')
    )
    assert main([*given, "--no-decode"]) == 2
    assert "(the head changed)" in capsys.readouterr().err


def test_decoded_and_simulated_results_are_written_before_the_gate(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(words[-1])
    drafts = ["--evaluate.drafts", "[{tree: chain}, {tree: dynamic, depth: 2, branching: 2, total_tokens: 4}]"]
    lines = "eagle3 dynamic 2x2, 4 tokens"
    assert main([*words, *drafts, "--no-decode", "--fail-under", f"{lines}:tau_simulated=1.5"]) == 2
    assert f"{lines} cannot be simulated, so --no-decode leaves it out" in capsys.readouterr().err
    gates = ["--fail-under", "tau=7.5,code.tau=7.5", "--fail-under", "eagle3:chat.tau_simulated=7.5"]
    assert main([*words, *gates]) == 3
    missed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    overall = read_result(run / "evaluation" / "t0" / "result.json").drafters["eagle3"].overall
    assert overall.tau is not None
    assert missed[0].startswith(f"draftsmith: eagle3 at T=0: tau {overall.tau:.4g} is below the threshold 7.5 (")
    assert [line.split(": ")[2].split(" ")[0] for line in missed] == ["tau", "code.tau", "chat.tau_simulated"]
    assert (run / "evaluation" / "report.html").exists()
    assert main([*words, "--fail-under", "speedup=0.001"]) == 0
    assert "gate: passed (checks: 1)" in capsys.readouterr().err
    checks, gates = run.parent / "checks.xml", "code.tau_simulated=7.5,tau_simulated.low=1.000001"
    assert main([*words, "--no-decode", "--fail-under", gates, "--junit", str(checks)]) == 3
    result = read_result(run / "simulation" / "t0" / "result.json")
    simulated = result.drafters["eagle3"]
    assert simulated.overall.tau_simulated_interval is not None
    low, high = simulated.overall.tau_simulated_interval
    assert low <= simulated.overall.tau_simulated <= high
    assert simulated.slices["code"].tau_simulated_interval is None, "five prompts"
    decoded = read_result(run / "evaluation" / "t0" / "result.json")
    assert result.settings.prompts == decoded.settings.prompts, "the same prompts"
    cases = ElementTree.parse(checks).getroot().findall("testsuite/testcase")
    named = [("code.tau_simulated@T0", 1), ("tau_simulated.low@T0", low < 1.000001)]
    assert [(case.get("name"), len(case)) for case in cases] == named
