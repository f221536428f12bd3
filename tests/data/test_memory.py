"""Dataclasses of tensors in one piece of memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.data.memory import ALIGNMENT, lay, move, tensors_of
from tests.pretended_gpu.cuda import pretended_gpu


@dataclass(frozen=True)
class Inner:
    some: tuple[Tensor, ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Outer:
    x: Tensor
    inner: Inner
    none: Tensor | None
    text: str


def example() -> Outer:
    x = torch.arange(12).view(3, 4)
    some = (x, torch.tensor([True, False, True]), torch.randn(3, 2).bfloat16().T, torch.empty(2, 0), torch.tensor(5))
    return Outer(x, Inner(some, ((1, 2), (3, 4))), None, "text")


def test_tensors_are_laid_into_one_piece_aligned_and_each_once() -> None:
    value, pieces = example(), []

    def take(size: int) -> Tensor:
        pieces.append(torch.full((size,), 7, dtype=torch.uint8))
        return pieces[0]

    laid = lay(replace(value, none=torch.empty(5, device="meta")), take)
    assert (laid.inner.pairs, laid.text) == (value.inner.pairs, "text")
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(laid.inner), tensors_of(value.inner), strict=True))
    assert laid.x is laid.inner.some[0]
    assert laid.none.shape == (5,)
    assert laid.none.device.type == "cpu"
    assert laid.none.view(torch.uint8).eq(7).all(), "a place without values is left alone"
    (piece,) = pieces
    assert len(piece) == 5 * ALIGNMENT
    for x in tensors_of(laid):
        assert x.untyped_storage().data_ptr() == piece.data_ptr()
        assert x.storage_offset() * x.itemsize % ALIGNMENT == 0


def test_what_lies_on_the_cpu_takes_one_copy_to_a_device() -> None:
    value = example()
    with pretended_gpu() as gpu:
        there = move(value, "cuda")
        assert all(x.is_cuda for x in tensors_of(there))
        assert len(gpu.counts.copies) == 1
        assert gpu.counts.waits == []
        back = move(there, "cpu")
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(back), tensors_of(value), strict=True))
        gpu.counts.clear()
        again = move(replace(there, none=torch.ones(2)), "cuda")
        assert again.none.is_cuda
        assert len(gpu.counts.copies) == 1
