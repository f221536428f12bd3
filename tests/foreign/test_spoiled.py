"""Each value of results, costs and published heads, replaced by any other: a sentence or an answer, never a traceback."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.cli.compatibility import run_fit
from draftsmith.errors import UserError
from draftsmith.eval.gate.compare import compare_results
from draftsmith.eval.report.comparison import comparison_markdown
from draftsmith.eval.report.report import headline_table, render_markdown
from draftsmith.eval.results.result import read_result
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.recognise import load_head
from draftsmith.stages.planning import plan_stage
from tests.bad_inputs.test_bad_inputs import check_sentence
from tests.exports import PLAIN, make_target

pytestmark = pytest.mark.full

RUN = Path(__file__).parents[2] / "docs" / "results" / "smollm2" / "eagle3"
RESULT, COSTS = RUN / "t0" / "result.json", RUN / "costs.json"
OTHERS = (
    *(None, True, False, -1, 0, 2.5, 2**31, 10**12, 10**30, 1e308, -1e308, math.nan, math.inf),
    *("", "x", "12", "\u202e\x1b[2J", [], {}, [None], [1], [[1]], {"a": 1}, {"a": None}),
)
TARGET = make_target()
MANY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value of a JSON value, of a list that of its first."""
    yield place
    for key in value if isinstance(value, dict) else range(len(value[:1])) if isinstance(value, list) else ():
        yield from places(value[key], (*place, key))


def spoilt(value: Any) -> st.SearchStrategy[str]:
    """Return JSON texts in which one value is another one."""

    def put(drawn: tuple[tuple[Any, ...], Any]) -> str:
        (*way, last), other = drawn
        whole = copy.deepcopy(value)
        inner = whole
        for key in way:
            inner = inner[key]
        inner[last] = other
        return json.dumps(whole)

    return st.tuples(st.sampled_from([one for one in places(value) if one]), st.sampled_from(OTHERS)).map(put)


def survives(use: Callable[[], object]) -> None:
    """Use what is spoilt: it may be refused, in a sentence."""
    try:
        use()
    except UserError as error:
        check_sentence(str(error))


@MANY
@given(text=spoilt(json.loads(RESULT.read_text(encoding="utf-8"))))
def test_results(text: str, tmp_path: Path) -> None:
    path, good = tmp_path / "result.json", read_result(RESULT)
    path.write_text(text, encoding="utf-8")

    def use() -> None:
        result = read_result(path)
        headline_table([result])
        render_markdown([result])
        survives(lambda: comparison_markdown(compare_results(good, result)))
        survives(lambda: comparison_markdown(compare_results(result, good)))
        plan_stage([result], COSTS, tmp_path / "plan")

    survives(use)


@MANY
@given(text=spoilt(json.loads(COSTS.read_text(encoding="utf-8"))))
def test_costs(text: str, tmp_path: Path) -> None:
    path, good = tmp_path / "costs.json", read_result(RESULT)
    path.write_text(text, encoding="utf-8")
    survives(lambda: render_markdown([good], plan_stage([good], path, tmp_path / "plan")))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    TARGET.model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("file", ["config.json", "draftsmith.json"])
@pytest.mark.parametrize("layout", sorted(layouts()))
def test_heads(layout: str, file: str, target_folder: Path, tmp_path: Path) -> None:
    """A head of others is known by its configuration, one of ours by its record."""
    folder = tmp_path / "head"
    head = PLAIN[layouts()[layout].method](TARGET)
    export_head(head, TARGET, folder, layout=layout, dtype="float32", num_speculative_tokens=3)
    if file == "config.json":
        (folder / "draftsmith.json").unlink()
    if not (folder / file).exists():
        pytest.skip("this layout has no configuration")

    @settings(MANY, max_examples=20)
    @given(text=spoilt(json.loads((folder / file).read_text(encoding="utf-8"))))
    def check(text: str) -> None:
        (folder / file).write_text(text, encoding="utf-8")
        survives(lambda: load_head(folder, TARGET))
        survives(lambda: run_fit(folder, str(target_folder)))

    check()
