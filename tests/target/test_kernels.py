"""Products with packed weights, attention with fewer key heads and a mask, and norms in one operation: the numbers of PyTorch and
transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.slots import run_draft
from draftsmith.target import kernels
from draftsmith.target.kernels import GROUPED, HALF_ROWS, ROWS, PackedLinear, RMSNorm, fuse_norms, linear, pack_linears
from draftsmith.target.target import load_target
from tests.models import save_tiny_target, tiny_model


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The products with packed weights, by rows."""
    found: list[int] = []
    packs = kernels._packs

    def counted(x: torch.Tensor, weight: torch.Tensor) -> bool:
        if packed := packs(x, weight):
            found.append(x.numel() // x.shape[-1])
        return packed

    monkeypatch.setattr(kernels, "_packs", counted)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33])
@torch.no_grad()
def test_a_product_is_that_of_pytorch(rows: int, bias: bool, calls: list[int]) -> None:
    layer = nn.Linear(48, 80, bias=bias)
    x = torch.randn(rows, 48)
    torch.testing.assert_close(linear(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias))
    assert calls == ([rows] if rows in ROWS or rows in HALF_ROWS else [])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 24, 25])
@pytest.mark.parametrize("size", [1e-30, 0.02, 1e30])
@torch.no_grad()
def test_weights_that_were_bfloat16_are_read_as_float16(size: float, rows: int, bias: bool) -> None:
    if not kernels._has_fbgemm():
        pytest.skip("FBGEMM has no kernel for this processor")
    weight = (torch.randn(80, 48).clamp(min=1e-3) * size).bfloat16().float()
    x, added = torch.randn(2, rows, 48)[0], torch.randn(80) * size if bias else None
    kernels._packed.clear()
    found, expected = linear(x, weight, added), F.linear(x.double(), weight.double()) + (0 if added is None else added)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * size)
    if rows in HALF_ROWS:
        kept = kernels._packed[weight]
        assert kept.made.keys() == {kernels._halves}
        assert torch.equal(linear(x[-1:], weight, added), found[-1:]), "a row's product depends on no other"


@pytest.mark.parametrize("number", [1 + 2**-11, 2**-40])
@torch.no_grad()
def test_weights_that_float16_does_not_hold_are_not_rounded(number: float) -> None:
    weight = torch.ones(80, 48)
    weight[3, 5] = number
    assert kernels._halves(weight) is None
    x = torch.zeros(4, 48)
    x[:, 5] = 1
    assert linear(x, weight)[0, 3] == number


@torch.no_grad()
def test_the_largest_bfloat16_weight_may_be_next_to_the_largest_float16() -> None:
    """And the smallest beside it has 31 bits less."""
    weight = torch.full((80, 48), 65280.0)
    weight[3, 5] = 2**-17 * (1 + 127 / 128)
    x = torch.zeros(4, 48)
    x[:, 5] = 1
    assert kernels._halves(weight) is not None or not kernels._has_fbgemm()
    assert linear(x, weight)[0, 3] == weight[3, 5]
    assert linear(x, weight)[0, 4] == 65280


@torch.no_grad()
def test_many_rows_alone_make_no_float16_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ROWS", range(1, 1000))
    weight = torch.randn(80, 48).bfloat16().float()
    linear(torch.randn(500, 48), weight)
    assert kernels._packed[weight].made.keys() == {kernels._laid_out}


@torch.no_grad()
def test_states_may_have_any_shape_and_strides(calls: list[int]) -> None:
    weight = torch.randn(80, 48).bfloat16().float()
    torch.testing.assert_close(linear(torch.ones(48), weight), weight.sum(1))
    calls.clear()
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
    kernels._packed.clear()
    weight: Any = torch.randn(80, 48)
    with torch.no_grad():
        linear(torch.randn(4, 48), weight)
    assert len(kernels._packed) == 1
    del weight
    assert len(kernels._packed) == 0


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
    monkeypatch.setattr(kernels, "_MEMORY_SHARE", 0.0)
    pack_linears(model)
    assert [type(m) for m in model] == [nn.Linear, Own, nn.Conv1d]
    assert _product_without_a_copy()
    monkeypatch.setattr(kernels, "_MEMORY_SHARE", 1.0)
    pack_linears(model)
    assert [type(m) for m in model] == [PackedLinear, Own, nn.Conv1d]
    # A draft with weights of its own, made of packed layers, has copies of its own to find room for.
    view = copy.copy(model[0])
    view._parameters = {"weight": nn.Parameter(torch.randn(4, 4), requires_grad=False), "bias": None}
    monkeypatch.setattr(kernels, "_MEMORY_SHARE", 0.0)
    pack_linears(view)
    assert [type(view), type(model[0])] == [nn.Linear, PackedLinear]


@torch.no_grad()
def _product_without_a_copy() -> bool:
    weight, x = torch.randn(80, 48), torch.randn(4, 48)
    found = linear(x, weight)
    return torch.equal(found, F.linear(x, weight)) and not any(kernels._packed[weight].made.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_a_draft_gets_the_states_of_transformers_attention(kind: str, dtype: str, tmp_path: Path) -> None:
    """A text, without a mask; several tokens behind a cached one, and one token, of rows of different lengths, which have a mask,
    and of one alone, which has none."""
    target = load_target(str(save_tiny_target(tmp_path / kind, kind)), dtype=dtype)
    assert target.model.config._attn_implementation == GROUPED
    ids_BN = torch.randint(3, target.vocab_size, (2, 9))

    def states(implementation: str, rows: int) -> torch.Tensor:
        target.model.set_attn_implementation(implementation)
        cache, found = KVCache.for_target(target, rows, 16), [target.forward(ids_BN).last[:rows]]
        run_draft(target, cache, Draft.chain(ids_BN[:rows, 0], ids_BN[:rows, 1:5]), longest=0)
        cache.append(torch.tensor([5, 3])[:rows] if rows > 1 else 5)
        for start, count in ((5, 3), (8, 1)):
            chain = Draft.chain(ids_BN[:rows, start], ids_BN[:rows, start + 1 : start + count])
            found.append(run_draft(target, cache, chain, longest=start).last)
            cache.append(count)
        return torch.cat(found, 1)

    for rows in (1, 2):
        loose = {"atol": 0.02, "rtol": 0.02} if dtype == "bfloat16" else {}
        torch.testing.assert_close(states(GROUPED, rows), states("sdpa", rows), **loose)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3"])
def test_a_target_with_fused_norms_is_the_same(kind: str) -> None:
    plain = tiny_model(kind).requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    assert any(isinstance(m, RMSNorm) for m in fused.modules()) is not kind.startswith("gemma"), (
        "Gemma's multiply by 1 + w"
    )
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(fused(ids).logits, plain(ids).logits)
    assert torch.equal(fused(ids).logits, plain(ids).logits), "under gradients"


def test_a_norm_with_a_gate_stays() -> None:
    gated = Qwen3_5RMSNormGated(16)
    fuse_norms(gated)
    x, gate = torch.randn(2, 3, 16).unbind(0)
    assert gated(x, gate).shape == x.shape


def test_a_norm_of_other_numbers_stays() -> None:
    """In bf16 the single operation rounds once where Llama's rounds twice."""
    model = tiny_model("llama").to(torch.bfloat16)
    before = [type(m) for m in model.modules()]
    fuse_norms(model)
    assert [type(m) for m in model.modules()] == before
    assert RMSNorm not in before
