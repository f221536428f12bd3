"""Products with packed weights: those of `F.linear` up to rounding, after any change of the weights, and never where gradients flow."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.target import products
from draftsmith.target.products import ROWS, PackedLinear, linear, pack_linears


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The products with packed weights, by rows."""
    found: list[int] = []
    packs = products._packs

    def counted(x: torch.Tensor, weight: torch.Tensor) -> bool:
        if packed := packs(x, weight):
            found.append(x.numel() // x.shape[-1])
        return packed

    monkeypatch.setattr(products, "_packs", counted)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33])
@torch.no_grad()
def test_a_product_is_that_of_pytorch(rows: int, bias: bool, calls: list[int]) -> None:
    layer = nn.Linear(48, 80, bias=bias)
    x = torch.randn(rows, 48)
    torch.testing.assert_close(linear(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias))
    assert calls == ([rows] if rows in ROWS else [])


@torch.no_grad()
def test_states_may_have_any_shape_and_strides(calls: list[int]) -> None:
    weight = torch.randn(80, 48)
    for x in (torch.randn(2, 3, 48), torch.randn(48, 5).t(), torch.randn(2, 6, 48)[:, ::2]):
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert calls == [6, 5, 6]


@torch.no_grad()
def test_changed_weights_are_packed_again() -> None:
    weight, x = torch.randn(80, 48), torch.randn(4, 48)
    before = linear(x, weight)
    torch.testing.assert_close(linear(x, weight), before, rtol=0, atol=0)
    weight.mul_(2)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    weight.data = torch.randn(80, 48)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_a_copy_goes_with_its_weights() -> None:
    products._packed.clear()
    weight: Any = torch.randn(80, 48)
    with torch.no_grad():
        linear(torch.randn(4, 48), weight)
    assert len(products._packed) == 1
    del weight
    assert len(products._packed) == 0


def test_gradients_and_other_dtypes_take_the_usual_way(calls: list[int]) -> None:
    layer, x = PackedLinear(48, 80), torch.randn(4, 48)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer.bfloat16()(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            PackedLinear(48, 80)(x)
    assert calls == []


def test_plain_layers_of_a_model_are_packed_if_their_copies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Conv1d(1, 1, 1))
    monkeypatch.setattr(products, "_MEMORY_SHARE", 0.0)
    pack_linears(model)
    assert [type(m) for m in model] == [nn.Linear, Own, nn.Conv1d]
    monkeypatch.setattr(products, "_MEMORY_SHARE", 1.0)
    pack_linears(model)
    assert [type(m) for m in model] == [PackedLinear, Own, nn.Conv1d]
