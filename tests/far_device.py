"""A pretended second device: tensors that say they are on "cuda" and keep their values on the CPU.

Every operation that mixes them with ordinary tensors fails as it would on a real GPU, so a test finds a forgotten
`device=` without one. What it does not show: other rounding, other kernels, and products under autocast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("cuda", 0)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class FarTensor(Tensor):
    """A tensor on the pretended device. near: its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "FarTensor":
        far = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device="meta"
        )  # fmt: skip
        far.near = near
        return far

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What Python code sees; to torch's own code these are "meta", which needs no driver."""
        return FAR

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FarTensor({self.near})"

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return args[0].near.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    # What torch's own pretended tensors use: without it torch would try to start CUDA.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """torch.tensor copies its numbers to the device below the reach of _Operations."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == FAR.type:
            return FarTensor(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def far_device() -> Iterator[torch.device]:
    """Within it tensors can be made on, and moved to and from, the pretended device; yields its name."""
    with _Operations(), _Literals():
        yield FAR


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    flat, _ = tree_flatten((args, kwargs))
    far = [x for x in flat if isinstance(x, FarTensor)]
    near = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, FarTensor) and x.ndim > 0]
    if far and near and not _may_mix(name, args):
        shapes = [tuple(x.shape) for x in near]
        raise RuntimeError(f"{name}: expected all tensors on one device, but {shapes} are on the CPU")
    asked = kwargs.get("device")
    goes_far = bool(far) if asked is None else torch.device(asked).type in (FAR.type, "meta")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map(_near, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if not goes_far:
        return out
    if name == "_to_copy" and not far and asked is not None:
        out = out.clone() if out is inner_args[0] else out
    wrapped = tree_map(lambda x: FarTensor(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if far else wrapped


def _near(x: Any) -> Any:
    return x.near if isinstance(x, FarTensor) else x


def _may_mix(name: str, args: Any) -> bool:
    """A copy goes between devices, and a GPU's tensor takes indices from the CPU."""
    return name in ("_to_copy", "copy_", "copy") or (name in _INDEXING and isinstance(args[0], FarTensor))


def move_module(module: torch.nn.Module) -> torch.nn.Module:
    """Put a module's parameters (frozen) and buffers on the pretended device, in place; within far_device()."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.detach().to(FAR), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(FAR)
    return module
