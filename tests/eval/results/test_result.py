"""result.json: nothing lost on the way to disk and back, and no key or type that the schema does not know."""

import math
import subprocess
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.verdict import clock_faults
from draftsmith.eval.results.conditions import Group
from draftsmith.eval.results.result import (
    Costs,
    DrafterResult,
    Measures,
    Result,
    from_json,
    read_result,
    to_json,
    write_result,
)
from draftsmith.machine import Clocks, environment, git_commit


def sample(kind: Any) -> Any:
    """Return a value of a type, with every field of every dataclass in it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        values = {field.name: sample(hints[field.name]) for field in fields(kind) if field.name != "schema_version"}
        return typing.cast(Any, kind)(**values)
    if origin in (types.UnionType, typing.Union):
        return sample(arguments[0])
    if origin is dict:
        return {"a": sample(arguments[1]), "b": sample(arguments[1])}
    if origin is tuple:
        return tuple(map(sample, arguments[:1] * 2 if arguments[1] is Ellipsis else arguments))
    return {bool: True, int: 3, float: 0.5, str: "text", Any: [1, None, {"key": 2.5}]}[kind]


def full_result() -> Result:
    """A result with all that can be measured, and a slice without anything."""
    result: Result = sample(Result)
    drafter = result.drafters["a"]
    slices = {**drafter.slices, "nothing": Measures(prompts=0)}
    return replace(result, drafters={**result.drafters, "a": replace(drafter, slices=slices)})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, full_result())
    assert read_result(path) == full_result()
    before = path.read_bytes()
    write_result(path, read_result(path))
    assert path.read_bytes() == before


def test_the_version_comes_first_and_what_was_not_measured_is_null() -> None:
    value = to_json(full_result())
    assert next(iter(value)) == "schema_version"
    unmeasured = value["drafters"]["a"]["slices"]["nothing"]
    assert [name for name, number in unmeasured.items() if number is not None] == ["prompts"]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the way to every dataclass in a value, of a list to the first."""
    inner: Any = {}
    if is_dataclass(value):
        yield path
        inner = vars(value)
    elif isinstance(value, dict):
        inner = value
    elif isinstance(value, tuple):
        inner = dict(enumerate(value[:1]))
    for key, item in inner.items():
        yield from places(item, (*path, key))


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


LATER = {"engine_tokens": None, "exported": True, "engines_without": []}
"""Keys that earlier files of this version lack, and what is read then."""


@pytest.mark.parametrize("path", [p for p in places(full_result()) if "b" not in p], ids=str)
def test_unknown_and_missing_keys_are_named(path: tuple) -> None:
    for name in at(to_json(full_result()), path):
        broken = to_json(full_result())
        del at(broken, path)[name]
        if name in LATER:
            assert at(to_json(from_json(broken)), path)[name] == LATER[name]
            continue
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
        (("command",), 3),
        (("recipe",), [1]),
        (("versions", "a"), 2.13),
        (("drafters",), []),
        (("drafters", "a"), None),
        (("drafters", "a", "overall", "prompts"), None),
        (("drafters", "a", "overall", "tau"), math.nan),
        (("drafters", "a", "overall", "tau_interval"), [2.5, 2.6, 2.7]),
        (("drafters", "a", "overall", "tau_interval", 1), None),
        (("drafters", "a", "overall", "alpha_at", 1), "0.5"),
        (("supplement", "a"), [1]),
    ],
    ids=str,
)
def test_wrong_types_are_named(path: tuple, wrong: Any) -> None:
    broken = to_json(full_result())
    at(broken, path[:-1])[path[-1]] = wrong
    named = str(path[-1]) if isinstance(path[-1], str) else rf"{path[-2]}\[{path[-1]}\]"
    with pytest.raises(UserError, match=rf"r\.json: '.*{named}' must be"):
        from_json(broken, "r.json")


NOW = Result.schema_version


def test_results_without_a_part_for_servers_stay_readable() -> None:
    result = replace(full_result(), served=None)
    earlier = {key: value for key, value in to_json(result).items() if key != "served"} | {"schema_version": 13}
    assert from_json(earlier) == result


@pytest.mark.parametrize("version", [NOW - 2, NOW + 1, str(NOW), None])
def test_other_versions_are_refused(version: Any) -> None:
    said = rf"r\.json: 'schema_version' is {version!r} but this draftsmith reads {NOW} alone"
    with pytest.raises(UserError, match=said):
        from_json(to_json(full_result()) | {"schema_version": version}, "r.json")


def test_a_head_past_its_trained_length_is_a_warning() -> None:
    split = (Group("within", 9, 2.5), Group("past", 3, 1.1))
    drafter = DrafterResult(Measures(3, training_split=split), {}, DraftInfo("eagle3", 2, 2, trained_length=2048))
    (said,) = replace(full_result(), drafters={"eagle3": drafter}, supplement={}).warnings
    assert said.startswith("at temperature 0.5 eagle3 drafted 25% of its rounds past the 2,048 tokens")
    assert "from 2.50 to 1.10" in said


def test_integers_count_as_numbers_and_become_floats() -> None:
    value = to_json(full_result())
    value["drafters"]["a"]["overall"]["tau"] = 2
    tau = from_json(value).drafters["a"].overall.tau
    assert tau == 2.0
    assert isinstance(tau, float)


def test_a_bad_result_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, full_result())
    before = path.read_bytes()
    drafter = full_result().drafters["a"]
    for bad in (replace(drafter.overall, tau=math.inf), replace(drafter.overall, tokens=3.5)):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            write_result(path, replace(full_result(), drafters={"eagle3": DrafterResult(bad, {})}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
    spread = {"baseline_tok_s": 100.0, "baseline_tok_s_spread": (95.0, 105.0)}
    m = Measures(3, **spread, speedup=1.5, ideal_speedup=1.6, ttft_s=0.11, ttft_baseline_s=0.1)  # type: ignore[arg-type]
    quiet = replace(full_result(), picks=(), settings=replace(full_result().settings, batch=1))

    def doubts(clocks: Clocks | None = None, **changes: Any) -> str:
        drafters = {"eagle3": DrafterResult(replace(m, **changes), {})}
        return "; ".join(text for text, _ in clock_faults(replace(quiet, clocks=clocks, drafters=drafters)))

    assert doubts() == ""
    assert doubts(Clocks(10.0, 10.0, 0.1, 1.0)) == ""
    assert "other programs used 40% of the cores" in doubts(Clocks(10.0, 10.0, 0.4, 3.0))
    assert "varied by 30% between repeats" in doubts(baseline_tok_s_spread=(85.0, 115.0))
    assert "eagle3 was faster than its costs allow (112% of the ideal)" in doubts(speedup=1.8)
    assert "moved by +50% with eagle3" in doubts(ttft_s=0.15)
