"""What is said of a machine."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftsmith.machine import faster_in_bf16

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    faster_in_bf16.cache_clear()
    yield
    faster_in_bf16.cache_clear()


@pytest.mark.parametrize("slower", [torch.float32, torch.bfloat16])
def test_bf16_is_taken_where_its_products_are_faster(slower: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)

    def product(x: Tensor, weight: Tensor) -> None:
        assert x.dtype == weight.dtype
        time.sleep(0.02 if x.dtype == slower else 0.002)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert faster_in_bf16(CPU) == (slower == torch.float32)


def test_what_emulates_it_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    assert not faster_in_bf16(CPU)
