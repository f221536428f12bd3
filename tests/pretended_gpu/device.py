"""A pretended CUDA device, on a machine without one: tensors that say `cuda:0` and keep their values on the CPU.

Code takes its GPU branches; an operation that mixes devices, or memory in no certain order, fails and names its place;
kernels, waits and copies are counted. `pretended_gpu` of tests/pretended_gpu/cuda.py switches it on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended_gpu import kernels
from tests.pretended_gpu.counts import Counts, here
from tests.pretended_gpu.graphs import Capture, CaptureError, Recording
from tests.pretended_gpu.order import Actor, Memory, Stream
from tests.pretended_gpu.tensor import (
    SWITCHED_ON,
    GpuTensor,
    changed_by,
    device_index,
    index_of,
    is_free,
    leaves_of,
    map_leaves,
    values_of,
)

NO_KERNEL = {
    "_unsafe_view", "lift_fresh", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_",
    "_local_scalar_dense", "is_same_size", "_has_compatible_shallow_copy_type", "record_stream",
}  # fmt: skip
"""Besides views: what only looks, or asks the allocator."""
WAITS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "bincount",
    "equal", "histc",
}  # fmt: skip
"""What returns a number, or a tensor whose size depends on values."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
REPLACED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._flash_attention_forward.default: kernels.flash_forward,
    torch.ops.aten._flash_attention_backward.default: kernels.flash_backward,
}


class MixedDevicesError(RuntimeError):
    """An operation on tensors of several devices."""


class Operations(TorchDispatchMode):
    """Brings the operations of a thread to the device, also those that take no tensor of it yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = SWITCHED_ON[-1], kwargs or {}
        if not (types or gpu.pinned or "device" in kwargs or "pin_memory" in kwargs):
            return func(*args, **kwargs)
        return gpu.run(func, args, kwargs)


class PretendedGpu:
    """The devices, their streams and what they have counted."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.counts = Counts()
        self.faults: list[str] = []
        self.host = Actor("the host")
        self.defaults = [Stream(f"cuda:{i}", self, i) for i in range(devices)]
        self.streams = list(self.defaults)
        self.capture: Capture | None = None
        self.recording: Recording | None = None
        self.bytes_used, self.most_bytes = 0, 0
        # Storages of pinned memory by address, kept so that no address is given out twice.
        self.pinned: dict[int, tuple[Any, Memory]] = {}
        self._here = threading.local()

    # --- Where this thread is ---

    @property
    def index(self) -> int:
        """The current device of this thread."""
        return getattr(self._here, "index", 0)

    @index.setter
    def index(self, index: int) -> None:
        if not 0 <= index < self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}, there are {self.devices}")
        self._here.index = index

    def stream_of(self, index: int) -> Stream:
        """Return the current stream of a device in this thread."""
        return getattr(self._here, f"stream{index}", self.defaults[index])

    def side_stream(self, index: int) -> Stream:
        """Return another stream of a device."""
        self.streams.append(Stream(f"stream {len(self.streams)} of cuda:{index}", self, index))
        return self.streams[-1]

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[None]:
        """Let this thread launch on `stream` within."""
        before, name = self.stream_of(stream.index), f"stream{stream.index}"
        setattr(self._here, name, stream)
        try:
            yield
        finally:
            setattr(self._here, name, before)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """List the operations within."""
        self.recording = Recording()
        try:
            yield self.recording
        finally:
            self.recording = None

    # --- Waits ---

    def wait(self, what: str, *seen: dict[Actor, int]) -> None:
        """Let the host wait for what streams were given. Raises CaptureError within a capture."""
        if self.capture:
            raise CaptureError(f"{what} at {here()} waits for the device while a graph is captured")
        self.counts.wait(what)
        for work in seen:
            self.host.learn(work)

    # --- Memory ---

    def wrap(self, values: Tensor, index: int, memory: Memory | None = None) -> GpuTensor:
        """Return values as a tensor of a device, in new memory unless it is given."""
        if memory is None:
            size = values.untyped_storage().nbytes()
            memory = _Allocated(self, f"memory of {tuple(values.shape)}", self.stream_of(index), size)
        return GpuTensor(values, memory, index)

    def pin(self, values: Tensor) -> Tensor:
        """Let a CPU tensor's memory be pinned, and return the tensor."""
        storage = values.untyped_storage()
        self.pinned[storage.data_ptr()] = (
            storage,
            Memory(f"pinned memory of {tuple(values.shape)}", None, self.faults),
        )
        return values

    def pinned_memory(self, x: Tensor) -> Memory | None:
        """Return the pinned memory of a CPU tensor; None where it is ordinary."""
        if not self.pinned or x.is_meta:
            return None
        found = self.pinned.get(x.untyped_storage().data_ptr())
        return found[1] if found else None

    def touch_by_host(self, x: Tensor, *, write: bool) -> None:
        """Let the host read or write a CPU tensor now."""
        if memory := self.pinned_memory(x):
            memory.check(self.host, write=write)

    # --- Operations ---

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch where its tensors are."""
        name = func.overloadpacket.__name__
        leaves = leaves_of(args, kwargs)
        far = [x for x in leaves if isinstance(x, GpuTensor)]
        asked = kwargs.get("device")
        if name == "copy_" and index_of(args[0]) != index_of(args[1]):
            return self.move_into(args[0], args[1], non_blocking=bool(kwargs.get("non_blocking", args[2:] and args[2])))
        index = None if asked is None else device_index(asked, self.index)
        if index is None and far:
            # Where it asks for the CPU, it is torch's own code, which believes its tensor to be there.
            index = far[0].index
        if name == "_to_copy" and index != index_of(args[0]):
            return self.move(args[0], index, kwargs.get("dtype"), non_blocking=bool(kwargs.get("non_blocking")))
        if index is None:
            return self._run_on_host(func, args, kwargs, leaves)
        if asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if any(isinstance(x, torch.Generator) for x in leaves):
            raise MixedDevicesError(f"{name} at {here()}: a generator of the CPU draws numbers for cuda:{index}")
        if far:
            self._check_devices(func, name, args, kwargs, leaves, index)
        return self._launch(func, name, args, kwargs, leaves, index)

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        pin = kwargs.get("pin_memory")
        if pin:
            kwargs = {**kwargs, "pin_memory": False}
        if self.pinned:
            changed = {id(x) for x in changed_by(func, args, kwargs)}
            is_view = is_free(func)
            for x in leaves:
                if isinstance(x, Tensor) and not is_view:
                    self.touch_by_host(x, write=id(x) in changed)
        out = func(*args, **kwargs)
        return self.pin(out) if pin else out

    def _check_devices(self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any], index: int) -> None:
        """Raise MixedDevicesError as CUDA does; numbers of the CPU may meet the tensors of an operation that goes number by number,
        its indices are copied over."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        meets_numbers = torch.Tag.pointwise in func.tags or name in INDEXING
        changed = {id(x) for x in changed_by(func, args, kwargs)}
        if name in INDEXING and isinstance(args[0], GpuTensor):
            for x in args[1]:
                if isinstance(x, Tensor) and not isinstance(x, GpuTensor):
                    self.counts.copy("host to device, pageable", x.nbytes)
                    self.wait("an index of the CPU", self.stream_of(index).now())
            indices = {id(x) for x in args[1]}
            tensors = [x for x in tensors if id(x) not in indices or isinstance(x, GpuTensor)]
        for x in tensors:
            other = index_of(x)
            number = other is None and x.dim() == 0 and meets_numbers and id(x) not in changed
            if other != index and not number:
                where = "the CPU" if other is None else f"cuda:{other}"
                raise MixedDevicesError(
                    f"{name} at {here()}: expected all tensors on cuda:{index}, but one of {tuple(x.shape)} {x.dtype} is on "
                    f"{where}"
                )

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any], index: int) -> Any:
        """Count an operation of a device, put it in order, and compute it."""
        stream, free, place = self.stream_of(index), is_free(func) or name in NO_KERNEL, here()
        changed = {id(x): x for x in changed_by(func, args, kwargs) if isinstance(x, GpuTensor)}
        far = {id(x.values): x for x in leaves if isinstance(x, GpuTensor)}
        if not free or name in WAITS:
            stream.done += 1
            for x in far.values():
                x.memory.touch(stream, place, write=id(x) in changed)
        if what := _waits(name, args, kwargs):
            self.wait(what, stream.now())
        if self.recording and not free:
            pairs = ((x.values, x.memory) if isinstance(x, GpuTensor) else x for x in leaves)
            self.recording.note(name, pairs)
        inner_args = map_leaves(values_of, args)
        inner_kwargs = {
            k: map_leaves(values_of, v) for k, v in kwargs.items() if k not in ("pin_memory", "non_blocking")
        }

        def call() -> Any:
            return REPLACED.get(func, func)(*inner_args, **inner_kwargs)

        if free:
            out = call()
        else:
            self.counts.kernel(name, place)
            if self.capture:
                touched = [(x.memory, id(x) in changed) for x in far.values()]
                out = self.capture.run(call, stream, [x.values for x in changed.values()], touched)
            else:
                out = call()
        if name == "_local_scalar_dense":
            return out
        by_storage = {x.values.untyped_storage().data_ptr(): x.memory for x in far.values() if x.values.numel()}

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in far:
                return far[id(x)]
            memory = by_storage.get(x.untyped_storage().data_ptr())
            made = self.wrap(x, index, memory)
            if memory is None and self.capture:
                made.memory.home = None  # the graph's
            if memory is None and not free:
                made.memory.touch(stream, place, write=True)
                if self.capture:
                    self.capture.keep(made.memory)
            return made

        return map_leaves(outer, out)

    # --- Transfers ---

    def move(self, x: Tensor, index: int | None, dtype: torch.dtype | None, *, non_blocking: bool) -> Tensor:
        """Return a copy of x on a device, or on the CPU where `index` is None."""
        with torch.no_grad():
            made = torch.empty_like(values_of(x), dtype=dtype or x.dtype)
            if index is not None:
                made = self.wrap(made, index)
            elif non_blocking and isinstance(x, GpuTensor):
                made = self.pin(made)  # as torch does, so that the copy need not be waited for
            return self.move_into(made, x, non_blocking=non_blocking)

    def move_into(self, out: Tensor, x: Tensor, *, non_blocking: bool) -> Tensor:
        """Copy x to another device."""
        source, place = values_of(x), here()
        plain = x.dtype == out.dtype and source.is_contiguous()
        if isinstance(x, GpuTensor) and not plain:
            self.counts.kernel("copy before a transfer", place)
        near = out if isinstance(x, GpuTensor) else x
        pinned = None if isinstance(near, GpuTensor) else self.pinned_memory(near)
        if pinned and not plain and near is x:
            pinned = None  # the CPU converts it into ordinary memory first
        kind = "pinned" if pinned else "pageable"
        names = ["device" if isinstance(side, GpuTensor) else "host" for side in (x, out)]
        way = " to ".join(names) + ("" if isinstance(near, GpuTensor) else f", {kind}")
        self.counts.copy(way, out.numel() * out.element_size())
        if self.capture and not isinstance(near, GpuTensor) and not (pinned and non_blocking):
            raise CaptureError(f"a copy from {way} at {here()} while a graph is captured")
        streams = [self.stream_of(side.index) for side in (x, out) if isinstance(side, GpuTensor)]
        for stream in streams:
            stream.done += 1
        touched = []
        for side, write in ((x, False), (out, True)):
            if isinstance(side, GpuTensor):
                touched.append((side.memory, write))
                side.memory.touch(self.stream_of(side.index), place, write=write)
            elif pinned and non_blocking:
                touched.append((pinned, write))
                pinned.touch(streams[0], place, write=write)
            else:
                self.touch_by_host(side, write=write)
        if len(streams) == 2:
            streams[1].learn(streams[0].now())
        target = values_of(out)

        def call() -> Tensor:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                return target.copy_(source)

        if self.capture:
            self.capture.run(call, streams[0], [target], touched)
        else:
            call()
        if not isinstance(near, GpuTensor) and (not non_blocking or (near is out and not pinned)):
            self.wait(f"a copy from {way}", *(stream.now() for stream in streams))
        return out


class _Allocated(Memory):
    """Memory of a device, which is counted as long as it lives."""

    def __init__(self, gpu: PretendedGpu, name: str, home: Actor, size: int) -> None:
        super().__init__(name, home, gpu.faults, size)
        self.gpu = gpu
        gpu.bytes_used += size
        gpu.most_bytes = max(gpu.most_bytes, gpu.bytes_used)

    def __del__(self) -> None:
        self.gpu.bytes_used -= self.size
        super().__del__()


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return what the host waits for in an operation; None where it goes on."""
    if name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return f"{name} by a mask"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return name
    return name if name in WAITS else None
