"""Costs, plan, rules and settings of a whole evaluation, and the same results planned for another machine."""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from draftsmith.cli.main import main
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode, decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.cost_table import CostPoint, CostTable, read_cost_table, write_cost_table
from draftsmith.eval.clocks.costs import _Rounds, measure_table
from draftsmith.eval.planner.plan import RoundCost
from draftsmith.eval.planner.routing import read_rules, route
from draftsmith.eval.results.result import DrafterResult, Result, read_result, write_result
from draftsmith.eval.simulate.answers import answer_alone
from draftsmith.foreign.records import Journal
from draftsmith.machine import hardware
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from tests.models import make_target, tiny_model
from tests.workplace import make_workplace, options, save_untrained

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of an evaluation of an untrained head, at two batches and three contexts."""
    place = make_workplace(tmp_path_factory.mktemp("planning"))
    own = {"evaluate.plan_batches": "[1, 4]", "evaluate.temperatures": "[0.0]", "evaluate.max_new_tokens": "8"}
    return [
        *options(place, place / "run"),
        "--head",
        str(save_untrained(place)),
        *(word for key, value in own.items() for word in (f"--{key}", value)),
    ]


@pytest.fixture(scope="module")
def evaluated(words: list[str]) -> Path:
    """The folder of the evaluation."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("draftsmith.stages.planning.measure_table", partial(measure_table, seconds=0.0))
        assert main(["evaluate", *words]) == 0
    return Path(words[words.index("--output_dir") + 1]) / "evaluation"


def test_an_evaluation_ends_in_a_decision(evaluated: Path) -> None:
    table = read_cost_table(evaluated / "costs.json")
    assert table.batches == [1, 4]
    assert len(table.contexts) == 3
    assert [(p.batch, p.context) for p in table.points] == [(b, c) for b in (1, 4) for c in table.contexts]
    for point in table.points:
        assert max(map(int, point.verify_ms)) >= 9
        assert set(point.draft_ms) == set(point.admit_ms) == {"eagle3"}
        assert set(point.overhead_ms) == {"", "eagle3"}
        assert {"1", "4"} <= point.draft_ms["eagle3"].keys()
    drafted = read_result(evaluated / "t0" / "result.json").drafters["eagle3"].draft
    assert table.drafts == {"eagle3": drafted}, "so that another head's table is noticed"
    assert drafted is not None
    assert drafted.vocabulary == 0
    plan = json.loads((evaluated / "plan.json").read_text())
    assert plan["verdict"]["action"] in ("train on more data", "measure again"), "the head is untrained"
    assert len(plan["places"]) == 3 * 2 * 3, "overall and two slices, two batches, three contexts"
    assert [row["num_speculative_tokens"] for row in plan["draft_lengths"]] == [1, 2, 3, 4]
    result = read_result(evaluated / "t0" / "result.json")
    for row in plan["draft_lengths"]:
        sweep = next(
            p
            for p in result.drafters["eagle3"].overall.k_sweep or ()
            if p.num_speculative_tokens == row["num_speculative_tokens"]
        )
        assert row["tau"] == sweep.tau_simulated
    assert 2 <= len(result.picks) <= 4
    assert result.settings.num_speculative_tokens in {p.num_speculative_tokens for p in result.picks}, "to compare with"
    assert len({p.prompts for p in result.picks}) == 1
    assert {p.drafter for p in result.picks} == {"eagle3"}
    assert len(plan["checks"]) == len(result.picks)
    assert result.clocks is not None
    assert result.clocks.wall_s > 0


def test_rules_leave_an_untrained_head_off(evaluated: Path) -> None:
    rules = read_rules(evaluated / "routing.json")
    assert rules.largest_batch == 0
    assert route(rules, temperature=0).num_speculative_tokens == 0
    assert not (evaluated / "settings").exists()


def test_the_report_opens_with_the_verdict(evaluated: Path) -> None:
    page, text = ((evaluated / name).read_text() for name in ("report.html", "report.md"))
    headline = json.loads((evaluated / "plan.json").read_text())["verdict"]["headline"]
    assert headline in text
    assert page.index('class="verdict') < page.index("<nav") < page.index('id="plan"')
    for part in ("Speedup by draft length", "The best draft by batch and context", "Predicted against measured"):
        assert part in text
        assert part in page


def test_results_are_planned_for_another_machine(
    evaluated: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine on which a pass over a draft costs what a token does, drafting next to nothing; of a head whose every second token is
    accepted, on enough prompts."""
    copied = tmp_path / "run"
    copytree(evaluated.parent, copied)
    own = [*words[: words.index("--head")], "--export.layout", "eagle3_llama_cpp", "--export.tensor_parallel", "2"]
    own += ["--output_dir", str(copied)]
    table = read_cost_table(evaluated / "costs.json")
    value = json.loads((evaluated / "costs.json").read_text())
    for point in value["points"]:
        point["verify_ms"] = dict.fromkeys(point["verify_ms"], 10.0)
        point["draft_ms"] = {name: dict.fromkeys(costs, 0.1) for name, costs in point["draft_ms"].items()}
        point["overhead_ms"] = dict.fromkeys(point["overhead_ms"], 0.0)
    value["hardware"]["gpu"] = "another GPU"
    (tmp_path / "h200.json").write_text(json.dumps(value))
    result = str(copied / "evaluation" / "t0" / "result.json")
    found = json.loads(Path(result).read_text())
    measures = found["drafters"]["eagle3"]["overall"]
    measures["prompts"] = 12
    for sweep in measures["k_sweep"]:
        sweep["tau_simulated"] = 2 - 0.5 ** sweep["num_speculative_tokens"]
    Path(result).write_text(json.dumps(found))
    command = ["report", result, "--costs", str(tmp_path / "h200.json"), "--output", str(tmp_path)]
    assert main([*command, "--price-per-hour", "3.6"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["verdict"]["action"] in ("deploy", "change the draft length")
    assert f"verdict: {plan['verdict']['headline']}" in capsys.readouterr().err
    assert plan["machine"]["gpu"] == "another GPU"
    assert plan["checks"] == [], "what was timed here says nothing about a machine elsewhere"
    words = (tmp_path / "settings" / "vllm" / "start.sh").read_text().replace("\\\n", " ")
    config = json.loads(words[words.index("{") : words.rindex("}") + 1])
    assert config["method"] == "eagle3"
    assert config["num_speculative_tokens"] == read_rules(tmp_path / "routing.json").num_speculative_tokens > 0
    assert main(["report", *own, *command[2:-1], str(tmp_path / "two")]) == 0
    assert [path.name for path in (tmp_path / "two" / "settings").iterdir()] == ["llama_cpp"]
    assert "2 GPUs are to serve" in (tmp_path / "two" / "report.md").read_text()
    place = plan["places"][0]
    assert place["target_alone_per_million"] == pytest.approx(3.6 / 3600 / place["target_alone_tok_s"] * 1e6)
    assert "per million" in (tmp_path / "report.md").read_text()
    before = (tmp_path / "plan.json").read_bytes()
    for spoiled, said in (
        (
            {"drafts": {"eagle3": value["drafts"]["eagle3"] | {"vocabulary": 9}}},
            "another eagle3 than the result's: it has 9 tokens",
        ),
        ({"target": value["target"] | {"fingerprint": "f"}}, "costs of another target"),
    ):
        (tmp_path / "h200.json").write_text(json.dumps(value | spoiled))
        assert main(command) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_bytes() == before
    write_cost_table(tmp_path / "h200.json", table)
    assert main([*command, "--price-per-hour", "cheap"]) == 2
    assert "--price-per-hour" in capsys.readouterr().err
    found["drafters"]["eagle3"]["draft"]["engine_tokens"] = 15  # a block of them, more than were simulated
    (block := tmp_path / "block.json").write_text(json.dumps(found))
    assert main(["report", str(block), *command[2:]]) == 0
    assert "warning: engines draft 15 tokens with eagle3, the length of its block" in capsys.readouterr().err
    assert not (tmp_path / "settings" / "vllm" / "start.sh").exists()


def test_costs_are_a_command_of_their_own(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", partial(measure_table, seconds=0.0))
    few = [*words, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[12]"]
    assert main(["costs", *few, "--output", str(tmp_path / "costs.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'costs.json'}\n"
    table = read_cost_table(tmp_path / "costs.json")
    assert [(p.batch, p.context) for p in table.points] == [(1, 12)]
    assert main(["costs", *few, "--output", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["costs", *words, "--evaluate.plan_contexts", "[100000]", "--output", str(tmp_path / "c.json")]) == 2
    assert "evaluate.plan_contexts holds 100000" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_costs_are_timed_at_temperature_0_and_above_it(
    words: list[str],
    evaluated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And again where a run's table holds the others alone."""
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", partial(measure_table, seconds=0.0))
    few = [*words, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[12]", "--evaluate.temperatures"]
    held = {}
    for temperatures in ("[0.0]", "[0.7, 1.0]", "[1.0, 0.0, 0.7]"):
        assert main(["costs", *few, temperatures, "--output", str(tmp_path / "costs.json")]) == 0
        table = read_cost_table(tmp_path / "costs.json")
        held[table.temperatures] = table.points[0].sampled
    assert [*held] == [(0.0,), (0.7,), (0.0, 1.0)]
    assert held[0.0,] is held[0.7,] is None
    (point,), both = table.points, held[0.0, 1.0]
    assert both is not None
    assert point.at(0.7).draft_ms == both.draft_ms
    assert [*both.draft_ms["eagle3"]] == [*point.draft_ms["eagle3"]]
    assert set(both.overhead_ms) == {"", "eagle3"}
    copytree(evaluated.parent, tmp_path / "run")
    path = tmp_path / "run" / "evaluation" / "costs.json"
    write_cost_table(path, replace(read_cost_table(path), temperatures=(1.0,)))
    capsys.readouterr()
    assert main(["evaluate", *words, "--output_dir", str(tmp_path / "run")]) == 0
    assert "temperatures or drafters, and is measured again" in capsys.readouterr().err
    assert read_cost_table(path).temperatures == (0.0,)


def test_rounds_are_timed_in_a_row_as_answers_are_made() -> None:
    """Behind one that is not timed; they begin anew before an answer ends, also where the context leaves few tokens."""
    target = make_target()
    for context in (24, target.context_length - 4):
        rounds = _Rounds(target, TargetAlone(), [5] * context, 2, Sampling(), None)
        seen = []
        for _ in range(9):
            rounds.prepare()
            assert rounds._loop is not None
            before = rounds._loop.passes
            rounds()
            assert rounds.rounds == rounds._loop.passes - before
            seen.append((before, rounds.rounds))
        if context == 24:
            assert seen[:3] == [(1, 3), (5, 3), (1, 3)]
        else:
            assert {count for _, count in seen} <= {1, 2, 3}


def made_up(_: Target, systems: Any, ids: Any, rows: int, *__: Any) -> CostPoint:
    """A point of a table that nothing is timed for."""
    draft = {c.name: {str(k): 1.0 + k for k in c.lengths} for c in systems}
    passes = {str(n): 10.0 + n for n in range(1, 10)}
    return CostPoint(rows, len(ids), passes, draft, dict.fromkeys(draft, 1.0), dict.fromkeys(["", *draft], 0.0))


@pytest.mark.parametrize("stays", [False, True])
def test_costs_that_contradict_each_other_are_timed_again_at_once(
    stays: bool, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def held_up(target: Target, systems: Any, ids: Any, rows: int, *more: Any) -> CostPoint:
        point = made_up(target, systems, ids, rows, *more)
        asked.append(len(ids))
        if len(ids) != 12 or (asked.count(12) > 1 and not stays):
            return point
        return replace(point, overhead_ms={name: 63.0 if name else 0.0 for name in point.overhead_ms})

    monkeypatch.setattr("draftsmith.eval.clocks.costs._point", held_up)
    few = [*words, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[10, 12, 14]"]
    assert main(["costs", *few, "--output", str(tmp_path / "costs.json")]) == 0
    assert asked == [10, 12, 14, 12]
    table, said = read_cost_table(tmp_path / "costs.json"), capsys.readouterr().err
    assert {p.context: p.overhead_ms["eagle3"] for p in table.points} == {10: 0.0, 12: 63.0 if stays else 0.0, 14: 0.0}
    warning = "costs contradict each other: at batch 1 eagle3's overhead takes 63 ms behind 12 tokens and 0 behind 10"
    assert (warning in said) is stays


@pytest.fixture
def finished(
    evaluated: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str]]:
    """A copy of the evaluation, and the words that evaluate it again; what would decode fails, and no cost is timed."""
    copied = tmp_path / "run"
    copytree(evaluated.parent, copied)

    monkeypatch.setattr("draftsmith.eval.clocks.costs._point", made_up)
    monkeypatch.setattr("draftsmith.stages.evaluation.decode_drafters", None)
    return copied / "evaluation", ["evaluate", *words, "--output_dir", str(copied)]


def places_of(folder: Path) -> list[tuple[int, int]]:
    return [(point.batch, point.context) for point in read_cost_table(folder / "costs.json").points]


def test_other_batches_are_planned_after_an_evaluation_without_decoding(
    finished: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, command = finished
    table, result = read_cost_table(folder / "costs.json"), (folder / "t0" / "result.json").read_bytes()
    assert main([*command, "--evaluate.plan_batches", "[1, 2, 4]"]) == 0
    more = read_cost_table(folder / "costs.json")
    assert places_of(folder) == [(b, c) for b in (1, 2, 4) for c in table.contexts]
    assert [p for p in more.points if p.batch != 2] == list(table.points), "what was measured is not measured again"
    plan = json.loads((folder / "plan.json").read_text())
    assert {place["batch"] for place in plan["places"]} == {1, 2, 4}
    assert read_rules(folder / "routing.json").by_batch[-1][1] == 4
    assert main([*command, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[12, 20]"]) == 0
    assert places_of(folder) == [(1, 12), (1, 20)]
    assert main([*command, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[900000]"]) == 2
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", None)  # nothing is missing
    assert main([*command, "--evaluate.plan_batches", "[1]", "--evaluate.plan_contexts", "[20]"]) == 0
    assert places_of(folder) == [(1, 20)]
    assert {place["context"] for place in json.loads((folder / "plan.json").read_text())["places"]} == {20}
    assert (folder / "t0" / "result.json").read_bytes() == result


def test_a_finished_evaluation_keeps_its_costs_until_more_are_asked_for_elsewhere(
    finished: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs of two machines never stand in one table."""
    folder, command = finished
    table, here = read_cost_table(folder / "costs.json"), hardware()
    monkeypatch.setattr("draftsmith.machine.hardware", lambda: replace(here, cpu="another CPU"))
    assert main(command) == 0
    assert main([*command, "--evaluate.plan_batches", "[1]"]) == 0
    fewer = read_cost_table(folder / "costs.json")
    assert (fewer.hardware, fewer.points) == (here, tuple(p for p in table.points if p.batch == 1))
    assert json.loads((folder / "plan.json").read_text())["checks"]
    capsys.readouterr()
    assert main([*command, "--evaluate.plan_batches", "[1, 2]"]) == 0
    assert "is of another machine" in capsys.readouterr().err
    other = read_cost_table(folder / "costs.json")
    assert other.hardware.cpu == "another CPU"
    assert not set(map(str, other.points)) & set(map(str, table.points))
    assert json.loads((folder / "plan.json").read_text())["checks"] == []


def test_what_does_not_fit_is_not_tried_at_every_evaluation(
    finished: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, command = finished
    monkeypatch.setattr("draftsmith.eval.clocks.costs.fits_in_memory", lambda target, rows, *_, **__: rows < 8)
    command += ["--evaluate.plan_batches", "[1, 4, 8]"]
    assert main(command) == 0
    table = read_cost_table(folder / "costs.json")
    assert table.batches == [1, 4]
    assert table.too_large == tuple((8, context) for context in table.contexts)
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", None)
    assert main(command) == 0
    assert main([*command[:-1], "[1, 4]"]) == 0


def test_costs_that_are_cut_short_leave_the_evaluation_finished(
    finished: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, command = finished
    before = (folder / "costs.json").read_bytes()

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.stages.planning.measure_table", dies)
        assert main([*command, "--evaluate.plan_batches", "[1, 2]"]) != 0
    assert (folder / "costs.json").read_bytes() == before
    assert main([*command, "--evaluate.plan_batches", "[1, 2]"]) == 0
    assert read_cost_table(folder / "costs.json").batches == [1, 2]


def test_a_tree_is_planned_and_timed_beside_the_same_one_with_other_levels(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two levels of three cost least."""
    (tmp_path / "three.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    monkeypatch.setattr("draftsmith.eval.clocks.costs._point", made_up)

    def cost(_: CostTable, __: CostPoint, name: str, k: int) -> RoundCost:
        return RoundCost(10.0, 1.0 + abs(k - 2) if name == "eagle3 three" else 50.0, 1.0)

    monkeypatch.setattr("draftsmith.stages.evaluator.round_cost", cost)
    drafts = json.dumps([{"tree": "chain"}, {"tree": str(tmp_path / "three.json")}])
    less = ["--evaluate.per_slice", "1", "--evaluate.repeats", "1", "--evaluate.lossless", "false"]
    command = ["evaluate", *words, *less, "--evaluate.drafts", drafts, "--output_dir", str(tmp_path / "run")]
    assert main(command) == 0
    folder = tmp_path / "run" / "evaluation"
    picks = read_result(folder / "t0" / "result.json").picks
    assert [(pick.drafter, pick.num_speculative_tokens) for pick in picks] == [("eagle3 three", k) for k in (1, 2, 3)]
    assert all(pick.speedup and pick.tau_simulated and pick.prompts == 2 for pick in picks)
    assert read_cost_table(folder / "costs.json").nodes == {"eagle3 three": {"1": 3, "2": 5, "3": 6}}
    plan = json.loads((folder / "plan.json").read_text())
    assert [row["drafted_tokens"] for row in plan["draft_lengths"]] == [1, 2, 3, 4, 2, 4, 5]
    assert [check["num_speculative_tokens"] for check in plan["checks"]] == [1, 2, 3]


def test_an_export_starts_engines_with_the_planned_draft_length(
    evaluated: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a draft pays: a head that was evaluated as off is exported as the recipe says, and so is another head."""
    rules = read_rules(evaluated / "routing.json")
    assert main(["export", *words]) == 0
    readme = evaluated.parent / "export" / "eagle3" / "README.md"
    assert "num_speculative_tokens: 3, the number in the lines below\n" in readme.read_text()
    lowered = replace(rules, num_speculative_tokens=2, by_batch=((1, 1, 2), (2, 4, 0)))
    write_json(evaluated / "routing.json", asdict(lowered))
    try:
        assert main(["export", *words]) == 0
    finally:
        write_json(evaluated / "routing.json", asdict(rules))
    text = readme.read_text()
    assert (
        "num_speculative_tokens: 2, the number in the lines below; by the evaluation of this head the fastest are 2 at "
        in text
    )
    assert "batch 1, none at batch 2 to 4" in text
    assert '"num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 4, 0]]' in text
    assert "export: made again, as prompts are rendered otherwise" in capsys.readouterr().err
    assert main(["export", *words]) == 0
    assert main(["export", *words]) == 0
    assert "made again" in (said := capsys.readouterr().err)
    assert said.endswith(f"export: reusing {readme.parent}\n"), "but once"


def test_the_readme_of_an_export_says_first_that_the_head_does_not_pay(evaluated: Path, words: list[str]) -> None:
    """Without --redo, as the verdict came after the export."""
    plan, readme = evaluated / "plan.json", evaluated.parent / "export" / "eagle3" / "README.md"
    found = plan.read_text()
    try:
        for action, said in (("deploy", False), ("do not deploy", True), ("measure again", False)):
            plan.write_text(json.dumps({"verdict": {"action": action, "headline": "It reaches 0.7x.", "reasons": []}}))
            assert main(["export", *words]) == 0
            title, second = readme.read_text().split("\n\n")[:2]
            assert title == "# eagle3 head, layout eagle3"
            assert second.startswith("**It reaches 0.7x.** So says the evaluation") == said
    finally:
        plan.write_text(found)


@pytest.mark.parametrize("how", [(), ("--no-decode",)], ids=["decoded", "simulated"])
def test_an_interrupted_evaluation_goes_on_where_it_was(
    how: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill by any way loses the part it comes in: what came before is not decoded again, and no figure changes."""
    place = "draftsmith.eval.simulate.answers.decode" if how else "draftsmith.eval.drafters.system.decode_batch"
    work = decode if how else decode_batch
    monkeypatch.setattr("draftsmith.stages.evaluator.answer_alone", partial(answer_alone, rows=1))
    monkeypatch.setattr("draftsmith.eval.simulate.answers._KEPT_BATCHES", 1)
    own = ["--evaluate.plan_batches", "[]", "--evaluate.repeats", "2", "--evaluate.temperatures", "[1.0]", *how]
    calls, last = 0, 10**6

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > last:
            raise KeyboardInterrupt
        return work(*arguments, **options)

    monkeypatch.setattr(place, counted)

    def evaluate(folder: Path) -> DrafterResult:
        assert main(["evaluate", *words, *own, "--output_dir", str(folder)]) == 0
        kind = "simulation" if how else "evaluation"
        return read_result(folder / kind / "t1" / "result.json").drafters["eagle3"]

    whole, all_calls = evaluate(tmp_path / "whole"), calls
    calls, last = 0, all_calls // 2
    with suppress(KeyboardInterrupt):
        assert main(["evaluate", *words, *own, "--output_dir", str(tmp_path / "cut")]) != 0
    journal = next((tmp_path / "cut").rglob("parts.journal"))
    assert journal.stat().st_size > 0
    calls, last = 0, 10**6
    found = evaluate(tmp_path / "cut")
    assert 0 < calls < all_calls, "less than all is done again"
    assert calls <= all_calls - all_calls // 2 + 3, "at most the turn that was cut, and a warm-up"
    assert not journal.exists()
    for scope, expected in {"": whole.overall, **whole.slices}.items():
        m = found.slices[scope] if scope else found.overall
        for key in ("prompts", "tokens", "rounds", "tau", "tau_simulated", "acceptance_at"):
            assert getattr(m, key) == getattr(expected, key)


def test_a_kill_between_a_result_and_its_journal_leaves_no_journal(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ["evaluate", *words, "--no-decode", "--output_dir", str(tmp_path / "run")]

    def dies_after(path: Path, result: Result) -> None:
        write_result(path, result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.stages.evaluation.write_result", dies_after)
        assert main(how) != 0
    place = tmp_path / "run" / "simulation" / "t0"
    assert sorted(path.name for path in place.iterdir()) == ["parts.journal", "result.json"]
    assert main(how) == 0
    assert [path.name for path in place.iterdir()] == ["result.json"]


def test_answers_are_kept_also_where_other_rows_fit_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.simulate.answers._KEPT_BATCHES", 1)
    target, journal = Target(tiny_model("llama"), path="tiny", fingerprint="0"), Journal()
    requests = [Request(str(i), "a", (3 + i, 5), 4) for i in range(5)]
    found = [
        [(g.request, g.output_ids) for g in answer_alone(target, requests, Sampling(), journal, rows)]
        for rows in (2, 3, 2)
    ]
    assert found[0] == found[1] == found[2]
    assert [request for request, _ in found[1]] == requests
