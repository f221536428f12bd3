"""The table of drafters: rows of an earlier result stand beside new ones, and differences are of the same prompts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.results.intervals import bootstrap_tau
from scripts.bench.drafters import Bench, methods_of, read_beside, table

FACTS = {"tokens": 1000, "target": "a", "prompts": "b"}


def result_of(**taus: dict[str, tuple[float, float]]) -> Any:
    """A result whose drafters have (tokens, rounds) of each prompt."""
    drafters = {}
    for name, prompts in taus.items():
        sums = {p: SimpleNamespace(tokens=tokens, rounds_simulated=rounds) for p, (tokens, rounds) in prompts.items()}
        tau = sum(t for t, _ in prompts.values()) / sum(r for _, r in prompts.values())
        overall = SimpleNamespace(
            tau_simulated=tau,
            **dict.fromkeys(
                (
                    "tau",
                    "tau_simulated_interval",
                    "k_sweep",
                    "budget_sweep",
                    "decode_tok_s",
                    "speedup",
                    "speedup_spread",
                )
            ),
        )
        drafters[name] = SimpleNamespace(draft=None, overall=overall, slices={}, prompts=sums)
    return SimpleNamespace(drafters=drafters, costs=None)


FIRST = {str(n): (60.0, 30.0 + n) for n in range(12)}
BETTER = {str(n): (60.0, 25.0 + n) for n in range(12)}


def test_an_earlier_table_goes_on() -> None:
    before = json.loads(json.dumps(table(result_of(medusa=FIRST), {})))
    assert before["best"] == "medusa"
    assert before["drafters"]["medusa"]["behind_best"] is None
    after = table(result_of(eagle3=BETTER), before)
    assert (after["best"], list(after["drafters"])) == ("eagle3", ["medusa", "eagle3"])
    assert after["drafters"]["eagle3"]["behind_best"] is None
    assert after["drafters"]["medusa"]["behind_best"] == bootstrap_tau([*FIRST.values()], [*BETTER.values()])
    assert after["drafters"]["medusa"]["behind_best"][1] < 0


@pytest.mark.parametrize("key", ["tokens", "target", "prompts"])
def test_what_cannot_be_compared_is_refused(key: str, tmp_path: Path) -> None:
    assert read_beside(None, FACTS) == {}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(FACTS))
    assert read_beside(file, FACTS) == FACTS
    with pytest.raises(UserError, match=f"has {key} {FACTS[key]}, but here it is other: both need the same"):
        read_beside(file, FACTS | {key: "other"})


def test_a_method_brings_keys_of_its_own() -> None:
    bench, method = Bench("tiny", Path("runs"), 1000, ("--seed", "1")), "eagle3 --head.layer_ids '[0, 2]'"
    words = bench.command(method, "--redo", "train")
    assert words[1:] == ["recipes/eagle3/tiny.yaml", "--seed", "1", "--head.layer_ids", "[0, 2]", "--redo", "train"]
    assert bench.run_dir(method, 0.5, 1.0) == Path("runs/eagle3-head.layer_ids-0-2-0.5-1")
    assert bench.run_dir("eagle3", 0.5, 1.0) == Path("runs/eagle3-0.5-1")
    assert methods_of("tiny", ["eagle3", method]) == ["eagle3", method]
    for named, why in (
        ([method], "name eagle3 alone too"),
        (["eagle9 --seed 1"], "no recipe recipes/\\*/tiny.yaml of eagle9"),
    ):
        with pytest.raises(UserError, match=why):
            methods_of("tiny", named)
