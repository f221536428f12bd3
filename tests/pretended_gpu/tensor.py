"""A tensor of a pretended GPU, and what an operation of torch does with the tensors that it is given."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.pretended_gpu.order import Actor, Memory


class GpuTensor(Tensor):
    """A tensor of the device. values: the CPU tensor behind it. memory: shared by its views. index: of the device."""

    values: Tensor
    memory: Memory
    index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, memory: Memory, index: int) -> "GpuTensor":
        # To torch's own code it is on the CPU, which needs no driver.
        made = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
        )  # fmt: skip
        made.values, made.memory, made.index = values, memory, index
        return made

    def __init__(self, *_arguments: object) -> None:
        super().__init__()

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GpuTensor({self.values}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)  # files hold values

    def get_device(self) -> int:
        """The number of the device."""
        return self.index

    def data_ptr(self) -> int:
        """The address of the first value."""
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        """The storage of the values."""
        return self.values.untyped_storage()

    def record_stream(self, stream: Actor) -> None:
        """Let the allocator wait for `stream` before the memory is used again."""
        self.memory.kept_for.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return SWITCHED_ON[-1].run(func, args, kwargs or {})


SWITCHED_ON: list[Any] = []
"""The PretendedGpu that is switched on; tensors outlive it."""


def leaves_of(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return arguments, those in lists one by one."""
    found: list[Any] = []
    for x in (*args, *kwargs.values()):
        found.extend(x) if isinstance(x, list | tuple) else found.append(x)
    return found


def map_leaves(change: Callable[[Any], Any], x: Any) -> Any:
    """Return x, or the list or tuple of x, changed."""
    return type(x)(map_leaves(change, y) for y in x) if isinstance(x, list | tuple) else change(x)


def values_of(x: Any) -> Any:
    return x.values if isinstance(x, GpuTensor) else x


def index_of(x: Tensor) -> int | None:
    """Return the number of a tensor's device; None for the CPU."""
    return x.index if isinstance(x, GpuTensor) else None


def device_index(device: torch.device | str | int, current: int) -> int | None:
    """Return the number of the device that is meant; None for the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return current if device.index is None else device.index


@cache
def is_free(func: Any) -> bool:
    """Whether an operation returns a view and computes nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def changed_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    wanted = [named.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in leaves_of(wanted, {}) if isinstance(x, Tensor)]
