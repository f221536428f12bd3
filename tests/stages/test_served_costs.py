"""`draftsmith costs --server`: from running servers to a table, and from that to a plan that prices what they drafted."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.eval.clocks.cost_table import ALONE, read_cost_table
from draftsmith.eval.results.result import read_result, write_result
from draftsmith.target.target import load_target
from tests.eval.engines.fake_server import Engine, serving
from tests.eval.planner.plans import result
from tests.workplace import make_workplace, options

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("served"))


@pytest.fixture
def urls(place: Path) -> Iterator[list[str]]:
    """A server with the target alone, and two that draft."""
    with ExitStack() as stack:
        model = str(place / "target")
        yield [
            stack.enter_context(serving(Engine(k=k, accepts=(k, 0), model=model), step))
            for k, step in ((3, 0.002), (0, 0.001), (1, 0.0015))
        ]


def words(place: Path, tmp_path: Path, urls: list[str]) -> list[str]:
    plan = ["--evaluate.plan_batches", "[1, 2]", "--evaluate.plan_contexts", "[12]"]
    named = [word for url in urls for word in ("--server", url)]
    return ["costs", *options(place, tmp_path / "run"), *plan, *named, "--output", str(tmp_path / "served.json")]


def test_servers_make_a_table_that_decides(
    place: Path, urls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is loaded for it, and the plan prices K = 1, 2 and 3 alone."""
    fingerprint = load_target(str(place / "target")).fingerprint
    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.load_target", None)
        assert main(words(place, tmp_path, urls)) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'served.json'}\n"
    assert f"costs: {urls[0]}, vLLM 9.9, drafts 3 tokens a round" in said.err
    assert f"costs: {urls[1]}, vLLM 9.9, is the target alone" in said.err
    table = read_cost_table(tmp_path / "served.json")
    assert (table.target.fingerprint, table.drafters) == (fingerprint, ["eagle3"])
    assert [(p.batch, p.context) for p in table.points] == [(1, 12), (2, 12)]
    for point in table.points:
        assert {name: list(costs) for name, costs in point.round_ms.items()} == {ALONE: ["0"], "eagle3": ["1", "3"]}
        assert min(ms for costs in point.round_ms.values() for ms in costs.values()) > 0

    made = result(0, {"overall": 0.8})
    (tmp_path / "run" / "t0").mkdir(parents=True)
    path = tmp_path / "run" / "t0" / "result.json"
    write_result(path, made)
    value = json.loads(path.read_text())
    value["target"]["fingerprint"] = fingerprint
    path.write_text(json.dumps(value))
    assert read_result(path).settings.dtype == "float32", "that of the servers is not known, and not compared"
    command = ["report", str(path), "--costs", str(tmp_path / "served.json"), "--output", str(tmp_path / "report")]
    assert main(command) == 0
    plan = json.loads((tmp_path / "report" / "plan.json").read_text())
    assert [row["num_speculative_tokens"] for row in plan["draft_lengths"]] == [1, 2, 3]
    assert plan["machine"] is None
    assert [(s["url"], s["num_speculative_tokens"]) for s in plan["servers"]] == [
        (urls[1], 0),
        (urls[2], 1),
        (urls[0], 3),
    ]
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"as measured from running servers (vLLM 9.9 at {urls[1]}" in text
    assert "round ms" in text
    assert "draft ms" not in text


def test_what_keeps_servers_from_a_table_is_one_sentence_and_leaves_no_file(
    place: Path, urls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["--model", "another"], "serves served, not another"),
        (["--head", "folder"], "--head is for this machine"),
        (["--evaluate.plan_contexts", "[450]"], "evaluate.plan_contexts holds 450, but the target's context leaves"),
        (["--server", urls[0]], f"{urls[0]} and {urls[0]} both draft 3 tokens a round"),
    ):
        assert main([*words(place, tmp_path, urls), *more]) == 2
        said = capsys.readouterr().err
        assert re.search(f"draftsmith: .*{re.escape(message)}", said), said
    assert main([*words(place, tmp_path, []), "--model", "m"]) == 2
    assert "--model is what servers call the target" in capsys.readouterr().err
    assert not (tmp_path / "served.json").exists()
