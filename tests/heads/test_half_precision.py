"""Under autocast to half precision, as a GPU trains, attention gets what its flash kernel takes."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.ttt_attention import Own, ttt_attention
from draftsmith.heads.registry import find_method
from tests.batches import documents_of, pack
from tests.gpu.support import OPTIONS, make_target

CALLERS = [import_module(f"draftsmith.heads.{name}") for name in ("block.base", "layers.training_pass")]


@pytest.mark.parametrize("method", sorted(set(OPTIONS) - {"medusa", "medusa2", "draft_model"}))
def test_queries_and_keys_reach_the_attention_in_half_precision(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 it would fall back to whole matrices of scores, in silence."""
    seen: set[torch.dtype] = set()

    def note(q: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Own, own_v: Own, plan: Any, scale: float) -> Tensor:
        seen.update(x.dtype for x in (q, k_BLGD, v_BLGD, *own_k, *own_v))
        return ttt_attention(q, k_BLGD, v_BLGD, own_k, own_v, plan, scale)

    for caller in CALLERS:
        monkeypatch.setattr(caller, "ttt_attention", note)
    target = make_target("cpu")
    head = find_method(method).build(OPTIONS[method], target, None).train()
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    with torch.autocast("cpu", torch.bfloat16):
        head(batch, head.trains.steps)
    assert seen == {torch.bfloat16}


def test_no_rows_cost_nothing_and_leave_gradients_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.heads.layers.ttt_attention.merged_attention", None)
    monkeypatch.setattr("draftsmith.heads.layers.ttt_attention.eager_ttt_attention", None)
    documents = torch.zeros(1, 6, dtype=torch.int64)
    plan = plan_rows(documents, torch.zeros(1, 6, dtype=torch.bool))
    shapes = ((0, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8), (3, 0, 2, 8), (3, 0, 2, 8))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, 0.5)
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in inputs)
