"""Dataclasses of tensors in one piece of memory, which takes one copy to another device."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256
"""What addresses within a piece are multiples of, as torch's allocators have it."""


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a tensor changed, or a dataclass or tuple with all its tensors changed; anything else as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(change, x) for x in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: map_tensors(change, getattr(value, field.name)) for field in fields(value)}
        )
    return value


def lay(value: Any, take: Callable[[int], Tensor]) -> Any:
    """Return a dataclass whose tensors are copied into one piece of memory. take: returns a piece of so many bytes, uint8. Of tensors
    on the meta device there are places, without values."""
    places: dict[int, tuple[int, Tensor]] = {}
    size = 0

    def place(x: Tensor) -> Tensor:
        nonlocal size
        if id(x) not in places:
            places[id(x)] = (size, x)
            size += -(-x.numel() * x.itemsize // ALIGNMENT) * ALIGNMENT
        return x

    map_tensors(place, value)
    piece, laid = take(size), {}
    for key, (start, x) in places.items():
        laid[key] = _view(piece, start, x)
        if not x.is_meta:
            laid[key].copy_(x)
    return map_tensors(lambda x: laid[id(x)], value)


def upload(value: Any, piece: Tensor, device: torch.device) -> Any:
    """Return a dataclass that `lay` laid into `piece`, copied to a device as a whole; the host does not wait."""
    there = piece.to(device, non_blocking=True)
    return map_tensors(lambda x: _view(there, int(x.storage_offset()) * x.itemsize, x), value)


def _view(piece: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of a piece from byte `start` on, as a tensor of the dtype and shape of `like`."""
    return piece[start : start + prod(like.shape) * like.itemsize].view(like.dtype).view(like.shape)


def move(value: Any, device: torch.device | str) -> Any:
    """Return a dataclass with its tensors on `device`; what lies on the CPU goes to another device in one copy."""
    device, taken = torch.device(device), []

    def take(size: int) -> Tensor:
        taken.append(torch.empty(size, dtype=torch.uint8))
        return taken[0]

    # Towards the CPU a copy must be waited for: its memory would be read before it is filled.
    if device.type == "cpu" or any(x.device.type != "cpu" for x in tensors_of(value)):
        return map_tensors(lambda x: x.to(device, non_blocking=device.type != "cpu"), value)
    return upload(lay(value, take), taken[0], device)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a dataclass or tuple, and of those in it."""
    found: list[Tensor] = []
    map_tensors(lambda x: found.append(x) or x, value)  # type: ignore[func-returns-value]
    return found
