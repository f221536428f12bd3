"""result.json: nothing lost on the way to disk and back, and no key or type that the schema does not know."""

import copy
import json
import math
import subprocess
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.results.conditions import Group
from draftsmith.eval.results.result import (
    Costs,
    Divergence,
    DrafterResult,
    Example,
    Lossless,
    Measures,
    MsPerRound,
    Percentiles,
    Piece,
    PromptSums,
    Result,
    Settings,
    SweepPoint,
    TargetInfo,
    environment,
    from_json,
    read_result,
    to_json,
    write_result,
)
from draftsmith.machine import Clocks, git_commit
from draftsmith.storage import write_json


@cache
def full_result() -> Result:
    measures = Measures(
        prompts=3,
        tokens=30,
        rounds=12,
        tau=2.5,
        tau_interval=(2.25, 2.75),
        tau_simulated=2.5,
        acceptance_rate=0.3,
        acceptance_at=(0.75, 0.5, 0.0),
        alpha_at=(0.75, 0.5 / 0.75, None),
        contexts=(Group("32 to 63", 12, 2.5, 12.0, 2.5),),
        training_split=(Group("within", 9, 2.5), Group("past", 3, 1.1)),
        k_sweep=(SweepPoint(1, 1.75, 0.75, 1.2), SweepPoint(2, 2.25, 0.6, None)),
        decode_tok_s=200.0,
        baseline_tok_s=100.0,
        speedup=2.0,
        latency_s=Percentiles(0.1, 0.2),
        token_wait_s=Percentiles(0.0, 0.02),
        exact_match=0.5,
        exact_match_baseline=0.75,
        referenced=2,
        valid_json=0.5,
        valid_json_baseline=1.0,
        json_answers=4,
        ms_per_round=MsPerRound(1.0, 2.0, 0.125, 0.25),
        lossless=Lossless("float32", 3, 2, (Divergence("p1", "chat", 4, 17, 18, 0.001),)),
        looping=0.0,
    )
    return Result(
        command="draftsmith evaluate",
        **environment(),
        recipe={"head": {"method": "eagle3", "layers": [2, 8, 13]}},
        target=TargetInfo("models/tiny", "abc", 3_300_000, 16, 128, 1024, 13_200_000, 4096),
        settings=Settings(1.0, 50, 0.9, 5, 1, "float32", 0, 3, longest_text=300),
        drafters={
            "eagle3": DrafterResult(
                measures,
                {"chat": measures, "code": Measures(prompts=0)},
                DraftInfo("eagle3", 2, 2, trained_length=2048, cache_bytes=256, cache_slots=3),
                {"p1": PromptSums("chat", 20.0, 7.0, 6.5), "p2": PromptSums("chat", 10.0, 5.0, None)},
            )
        },
        costs=Costs({"1": 5.0, "3": 6.0}, {"eagle3": {"2": 4.0}}, {"eagle3": {"2": 3}}),
        examples=(Example("eagle3", "code", "Add.", (Piece("a", None), Piece("b", 0))),),
        supplement={"prompt set": "x.jsonl", "answers": 3, "ok": True, "nothing": None, "share": 0.5},
    )


def test_round_trip(tmp_path: Path) -> None:
    result = full_result()
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result
    before = (tmp_path / "result.json").read_bytes()
    write_result(tmp_path / "result.json", read_result(tmp_path / "result.json"))
    assert (tmp_path / "result.json").read_bytes() == before


def test_the_version_comes_first_and_what_was_not_measured_is_null() -> None:
    value = to_json(full_result())
    assert next(iter(value)) == "schema_version"
    unmeasured = value["drafters"]["eagle3"]["slices"]["code"]
    assert [name for name, number in unmeasured.items() if number is not None] == ["prompts"]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every object in the JSON whose keys the schema fixes."""
    free = {("recipe",), ("versions",), ("supplement",), ("drafters",), ("costs", "verify_ms"), ("costs", "draft_ms")}
    free.add(("costs", "nodes"))
    found = []
    if isinstance(value, dict):
        if path not in free and path[-1:] not in (("slices",), ("prompts",)):
            found.append(path)
        if path[:1] != ("recipe",) and path[:2] not in (("costs", "draft_ms"), ("costs", "nodes")):
            found += [place for key, item in value.items() for place in places(item, (*path, key))]
    elif isinstance(value, list):
        found += [place for i, item in enumerate(value) for place in places(item, (*path, i))]
    return found


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("path", places(to_json(full_result())), ids=str)
def test_unknown_and_missing_keys_are_named(path: tuple) -> None:
    for name in at(to_json(full_result()), path):
        broken = to_json(full_result())
        del at(broken, path)[name]
        with pytest.raises(UserError, match=rf"runs/r\.json.*{name}"):
            from_json(broken, "runs/r.json")
    broken = to_json(full_result())
    at(broken, path)["taux"] = 1
    with pytest.raises(UserError, match=r"runs/r\.json: unknown key '.*taux'"):
        from_json(broken, "runs/r.json")


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("settings", "temperature"), "0"),
        (("settings", "temperature"), True),
        (("settings", "batch"), 1.0),
        (("settings", "batch"), True),
        (("settings", "dtype"), None),
        (("command",), 3),
        (("recipe",), [1]),
        (("versions", "torch"), 2.13),
        (("drafters",), []),
        (("drafters", "eagle3"), None),
        (("drafters", "eagle3", "overall", "tau"), [2.5]),
        (("drafters", "eagle3", "overall", "tau"), math.nan),
        (("drafters", "eagle3", "overall", "tau_interval"), [2.5]),
        (("drafters", "eagle3", "overall", "tau_interval"), [2.5, 2.6, 2.7]),
        (("drafters", "eagle3", "overall", "tau_interval", 1), None),
        (("drafters", "eagle3", "overall", "alpha_at", 1), "0.5"),
        (("drafters", "eagle3", "overall", "k_sweep", 0, "num_speculative_tokens"), None),
        (("drafters", "eagle3", "overall", "lossless", "equal"), "2"),
        (("costs", "verify_ms", "1"), None),
        (("examples", 0, "pieces", 0, "position"), "0"),
        (("supplement", "share"), [1]),
    ],
    ids=str,
)
def test_wrong_types_are_named(path: tuple, wrong: Any) -> None:
    broken = to_json(full_result())
    at(broken, path[:-1])[path[-1]] = wrong
    named = str(path[-1]) if isinstance(path[-1], str) else rf"{path[-2]}\[{path[-1]}\]"
    with pytest.raises(UserError, match=rf"r\.json: '.*{named}' must be"):
        from_json(broken, "r.json")


def test_every_number_of_measures_may_be_null_except_the_count_of_prompts() -> None:
    for field in fields(Measures):
        value = to_json(full_result())
        value["drafters"]["eagle3"]["overall"][field.name] = None
        if field.name == "prompts":
            with pytest.raises(UserError, match="prompts"):
                from_json(value)
        else:
            assert getattr(from_json(value).drafters["eagle3"].overall, field.name) is None


def test_a_head_past_its_trained_length_is_a_warning() -> None:
    (said,) = full_result().warnings
    assert said.startswith("at temperature 1 eagle3 drafted 25% of its rounds past the 2,048 tokens")
    assert "from 2.50 to 1.10" in said


def test_integers_count_as_numbers_and_become_floats() -> None:
    value = to_json(full_result())
    value["drafters"]["eagle3"]["overall"]["tau"] = 2
    tau = from_json(value).drafters["eagle3"].overall.tau
    assert tau == 2.0
    assert isinstance(tau, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ("{}", "schema_version"),
        ('{"schema_version": 10}', "'schema_version' is 10 but this draftsmith reads 11 alone"),
        ('{"schema_version": NaN}', "holds the number nan"),
        ("[" * 100_000, "nested deeper"),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        read_result(tmp_path / "r.json")
    assert "r.json" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read \(it does not exist\)"):
        read_result(tmp_path / "none.json")


def test_a_bad_result_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, full_result())
    before = path.read_bytes()
    drafter = full_result().drafters["eagle3"]
    for bad in (replace(drafter.overall, tau=math.inf), replace(drafter.overall, tokens=3.5)):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            write_result(path, replace(full_result(), drafters={"eagle3": DrafterResult(bad, {})}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_slice_may_not_be_called_overall() -> None:
    value = to_json(full_result())
    slices = value["drafters"]["eagle3"]["slices"]
    slices["overall"] = copy.deepcopy(slices["chat"])
    with pytest.raises(UserError, match="slice named overall"):
        from_json(value)


def test_predicted_speedup_of_costs() -> None:
    costs = Costs({"1": 5.0, "3": 6.0}, {"eagle3": {"2": 4.0, "3": 5.0}})
    assert costs.speedup("eagle3", 2, 2.5) == pytest.approx(2.5 / (6.0 / 5.0 + 4.0 / 5.0))
    assert costs.speedup("eagle3", 3, 2.5) is None
    assert costs.speedup("medusa", 2, 2.5) is None
    assert Costs({"3": 6.0}, {"eagle3": {"2": 4.0}}).speedup("eagle3", 2, 2.5) is None


def test_environment_is_json_and_complete() -> None:
    found = environment()
    assert set(found) == {"commit", "date", "hardware", "versions"}
    assert {"python", "torch", "transformers", "draftsmith"} <= set(found["versions"])
    assert found["hardware"].cpu
    assert found["hardware"].cores >= 1
    json.dumps(to_json(full_result()), allow_nan=False)


def test_git_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-qm", "a")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "a").write_text("b")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_a_clock_that_cannot_be_trusted_is_said() -> None:
    quiet = full_result()
    m = replace(
        quiet.drafters["eagle3"].overall,
        baseline_tok_s=100.0,
        baseline_tok_s_spread=(95.0, 105.0),
        speedup=1.5,
        ideal_speedup=1.6,
        ttft_s=0.11,
        ttft_baseline_s=0.1,
    )

    def doubts(clocks: Clocks | None = None, **changes: Any) -> str:
        drafter = replace(quiet.drafters["eagle3"], overall=replace(m, **changes))
        return "; ".join(replace(quiet, clocks=clocks, drafters={"eagle3": drafter}).doubts)

    assert doubts() == ""
    assert doubts(Clocks(10.0, 10.0, 0.1, 1.0)) == ""
    assert "other programs used 40% of the cores" in doubts(Clocks(10.0, 10.0, 0.4, 3.0))
    assert "varied by 30% between repeats" in doubts(baseline_tok_s_spread=(85.0, 115.0))
    assert "eagle3 was faster than its costs allow (112% of the ideal)" in doubts(speedup=1.8)
    assert "moved by +50% with eagle3" in doubts(ttft_s=0.15)


def add_fields() -> None:
    """Write what `Measures` hold since into the committed results, as null, under the version of now."""
    nulls = dict.fromkeys(field.name for field in fields(Measures))
    for path in (Path(__file__).parents[3] / "docs" / "results").rglob("result.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        for drafter in value["drafters"].values():
            drafter["overall"] = nulls | drafter["overall"]
            drafter["slices"] = {name: nulls | measures for name, measures in drafter["slices"].items()}
        write_json(path, value | {"schema_version": Result.schema_version})


if __name__ == "__main__":
    add_fields()
