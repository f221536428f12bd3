"""Known-bad engines of targets and heads that nothing was tuned on are named, by whatever an engine tells of its drafts."""

import pytest
import torch

from draftsmith.eval.parity.diagnose import WEIGHTS
from scripts.bench.parity import LEVELS, METHODS, judge, make_case

pytestmark = pytest.mark.full
FEW = ("eagle3", "dflash")


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in FEW else pytest.mark.slow) for m in METHODS])
def test_what_a_method_can_have_is_named(method: str) -> None:
    torch.set_num_threads(1)
    rows = list(judge(make_case(method, seed=41)))
    wrong = [(row.fault, row.tells, row.causes, row.difference) for row in rows if row.named is False]
    # A foreign embedding cannot be foretold: where drafted tokens are not told, another fault may happen to have its counts.
    assert [one for one in wrong if one[1] == LEVELS[0] or one[0] != WEIGHTS or method in FEW] == []
    assert len(wrong) <= 2
    seen = [row for row in rows if row.tells == LEVELS[0] and row.named]
    assert len({row.fault for row in seen}) >= {"eagle3": 18, "dflash": 14}.get(method, 5)
    # By drafted tokens, what is foretold is told apart.
    assert sum(row.causes == (row.fault,) for row in seen) >= {"eagle3": 14, "dflash": 10}.get(method, 3)
