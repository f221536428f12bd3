"""Switches a pretended GPU on: what torch, its CUDA module and Accelerate are told while it is there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.nn import functional as F
from torch.optim import optimizer
from torch.utils._device import _device_constructors

from tests.pretended_gpu import kernels
from tests.pretended_gpu.device import Operations, PretendedGpu
from tests.pretended_gpu.graphs import Graph
from tests.pretended_gpu.order import Event, Stream
from tests.pretended_gpu.tensor import SWITCHED_ON, GpuTensor, device_index, index_of

MEMORY = 141 * 10**9
"""Bytes of a device."""


@contextmanager
def pretended_gpu(devices: int = 1) -> Iterator[PretendedGpu]:
    """Let torch have `devices` CUDA devices within. Raises AssertionError at the end where memory was freed too early."""
    gpu = PretendedGpu(devices)
    _device_constructors()  # torch remembers its functions, for `with device:`, and must not remember ours
    with ExitStack() as stack:
        for owner, replacements in _patches(gpu):
            for name, value in replacements.items():
                stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(_swapped_parameters())
        stack.enter_context(_autocast_to_fp32())
        stack.callback(forget_accelerator)
        forget_accelerator()
        SWITCHED_ON.append(gpu)
        stack.callback(SWITCHED_ON.remove, gpu)
        stack.enter_context(Operations())
        yield gpu
    for stream in gpu.streams:
        stream.over = True
    assert not gpu.faults, gpu.faults


def _patches(gpu: PretendedGpu) -> list[tuple[Any, dict[str, Any]]]:
    return [
        (torch.cuda, _cuda_module(gpu)),
        (Tensor, _tensor_methods(gpu)),
        (torch, {"tensor": _literal(gpu, torch.tensor), "as_tensor": _literal(gpu, torch.as_tensor), "load": _load, "compile": kernels.compile_, **_autocast_flags()}),
        (torch.amp.autocast_mode.autocast, {"__init__": _autocast_init()}),
        (F, {"scaled_dot_product_attention": kernels.attention, "rms_norm": kernels.rms_norm}),
        (torch.backends.cuda, {"is_flash_attention_available": lambda: True}),
        (optimizer, {"_foreach_supported_types": [*optimizer._foreach_supported_types, GpuTensor]}),
        (torch._C, {"_group_tensors_by_device_and_dtype": _grouped(torch._C._group_tensors_by_device_and_dtype)}),
        (threading.Thread, {"_bootstrap_inner": _thread(threading.Thread._bootstrap_inner)}),
    ]  # fmt: skip


def forget_accelerator() -> None:
    """Accelerate remembers its first device for a whole process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@contextmanager
def _swapped_parameters() -> Iterator[None]:
    """Let `module.to` keep its Parameter objects, as it does between real devices."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# --- Threads, precision, optimizers ---


def _thread(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def with_operations(self: threading.Thread) -> None:
        with Operations() if SWITCHED_ON else nullcontext():
            run(self)

    return with_operations


def _grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    """What optimizers and the clipping of gradients do to many tensors at once goes by their devices."""

    def by_device(lists: Any, with_indices: bool = False) -> Any:
        found = {}
        for (_, dtype), (tensors, indices) in group(lists, with_indices).items():
            device = next(x.device for x in tensors[0] if x is not None)
            found[device, dtype] = (tensors, indices)
        return found

    return by_device


def _autocast_flags() -> dict[str, Any]:
    """Autocast for the device is that of the CPU, which its tensors seem to be on."""

    def translated(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda kind="cpu", *rest: function("cpu" if kind == "cuda" else kind, *rest)

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    return {name: translated(getattr(torch, name)) for name in names}


def _autocast_init() -> Any:
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *rest: Any, **options: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *rest, **options)

    return init


WIDE = (
    "exp", "log", "log1p", "expm1", "rsqrt", "reciprocal", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "softmax.int", "log_softmax.int", "logsumexp", "cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm",
    "norm.Scalar", "norm.ScalarOpt_dim", "layer_norm", "nll_loss_nd", "cosine_similarity", "dist",
)  # fmt: skip
"""What autocast takes to fp32 on CUDA, and leaves as it is on a CPU."""


@contextmanager
def _autocast_to_fp32() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def wide(call: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):
                return call(
                    *(x.float() if isinstance(x, GpuTensor) and x.dtype in kernels.HALF else x for x in args), **kwargs
                )

        return run

    for name in WIDE:
        packet, _, overload = name.partition(".")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"), name
        library.impl(name, wide(getattr(getattr(torch.ops.aten, packet), overload or "default")), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


# --- Tensors ---


def _tensor_methods(gpu: PretendedGpu) -> dict[str, Any]:
    to, tolist, numpy = Tensor.to, Tensor.tolist, Tensor.numpy

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, copy = _parse_to(args, kwargs)
        if device is None or torch.device(device).type not in ("cpu", "cuda"):
            return to(self, *args, **kwargs)
        index = device_index(device, gpu.index)
        if index == index_of(self):
            return to(self, dtype or self.dtype, copy=copy)
        return _Move.apply(self, index, dtype, non_blocking)

    def as_list(self: Tensor) -> Any:
        if isinstance(self, GpuTensor):
            gpu.counts.copy("device to host, pageable", self.values.nbytes)
            self.memory.check(stream := gpu.stream_of(self.index), write=False)
            gpu.wait("tolist", stream.now())
            return tolist(self.values)
        gpu.touch_by_host(self, write=False)
        return tolist(self)

    def as_array(self: Tensor, **options: Any) -> Any:
        if isinstance(self, GpuTensor):
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        gpu.touch_by_host(self, write=False)
        return numpy(self, **options)

    def pinned(self: Tensor, *_: Any) -> Tensor:
        if isinstance(self, GpuTensor):
            raise RuntimeError(f"cannot pin a tensor of {self.device}")
        return self if gpu.pinned_memory(self) else gpu.pin(self.clone())

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"device": self.device, "dtype": self.dtype, **options})

    return {
        "to": moved,
        "tolist": as_list,
        "numpy": as_array,
        "pin_memory": pinned,
        "is_pinned": lambda self, *_: not isinstance(self, GpuTensor) and gpu.pinned_memory(self) is not None,
        "new_tensor": new_tensor,
        "cpu": lambda self, *_, **__: moved(self, "cpu"),
        "cuda": lambda self, device=None, **options: moved(self, "cuda" if device is None else torch.device(device), **options),
    }  # fmt: skip


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool, bool]:
    """Return device, dtype, non_blocking and copy of a call of `Tensor.to`."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = [x for x in args if isinstance(x, bool)]
    for x in args:
        if isinstance(x, Tensor):
            device, dtype = x.device, x.dtype
        elif isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, str | torch.device) or (isinstance(x, int) and not isinstance(x, bool)):
            device = x
    return device, dtype, kwargs.get("non_blocking", any(flags[:1])), kwargs.get("copy", any(flags[1:2]))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int | None, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        ctx.back = (index_of(x), x.dtype)
        return SWITCHED_ON[-1].move(x, index, dtype, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        index, dtype = ctx.back
        return SWITCHED_ON[-1].move(grad, index, dtype, non_blocking=index is not None), None, None, None


def _literal(gpu: PretendedGpu, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor and torch.as_tensor copy numbers to a device below the reach of Python."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, GpuTensor):
            return data.to(device or data.device, options.get("dtype") or data.dtype)
        # A context may say where tensors are made.
        device = torch.empty(0).device if device is None else torch.device(device)
        if device.type != "cuda":
            return make(data, *args, device=device, **options)
        return make(data, *args, device="cpu", **options).to(device)

    return made


_torch_load = torch.load


def _load(file: Any, map_location: Any = None, **options: Any) -> Any:
    """torch.load, which makes storages below the reach of Python; of a dictionary of tensors."""
    if map_location is None or torch.device(map_location).type != "cuda":
        return _torch_load(file, map_location=map_location, **options)
    loaded = _torch_load(file, map_location="cpu", **options)
    return {name: value.to(map_location) if isinstance(value, Tensor) else value for name, value in loaded.items()}


# --- torch.cuda ---


# Classes, since annotations and isinstance name them.


class CudaStream(Stream):
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, **_options: Any) -> None:
        gpu: PretendedGpu = SWITCHED_ON[-1]
        index = _index(gpu, device)
        super().__init__(f"stream {len(gpu.streams)} of cuda:{index}", gpu, index)
        gpu.streams.append(self)


class CudaEvent(Event):
    """torch.cuda.Event."""

    def __init__(self, **_options: Any) -> None:
        super().__init__(SWITCHED_ON[-1])


class CudaGraph(Graph):
    """torch.cuda.CUDAGraph."""

    def __init__(self, **_options: Any) -> None:
        super().__init__(SWITCHED_ON[-1])


def _cuda_module(gpu: PretendedGpu) -> dict[str, Any]:
    return {
        **_facts(gpu),
        **_random_numbers(),
        "set_device": lambda device: setattr(gpu, "index", _index(gpu, device)),
        "current_device": lambda: gpu.index,
        "device": _current_device(gpu),
        "synchronize": lambda device=None: gpu.wait("synchronize", *(stream.now() for stream in gpu.streams)),
        "Stream": CudaStream,
        "Event": CudaEvent,
        "stream": lambda stream: gpu.launching(stream) if stream else nullcontext(),
        "current_stream": lambda device=None: gpu.stream_of(_index(gpu, device)),
        "default_stream": lambda device=None: gpu.defaults[_index(gpu, device)],
        "CUDAGraph": CudaGraph,
        "graph": lambda graph, pool=None, stream=None, **_options: graph.capturing(stream),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: gpu.capture is not None,
    }


def _index(gpu: PretendedGpu, device: Any) -> int:
    if device is None:
        return gpu.index
    index = device if isinstance(device, int) else device_index(device, gpu.index)
    assert index is not None, f"{device} is no GPU"
    return index


def _facts(gpu: PretendedGpu) -> dict[str, Any]:
    def nothing(*_arguments: Any, **_options: Any) -> None:
        pass

    def forget_peak(*_arguments: Any) -> None:
        gpu.most_bytes = gpu.bytes_used

    return {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpu.devices,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(
            major=9, minor=0, total_memory=MEMORY, multi_processor_count=132
        ),
        "get_device_name": lambda *_: "a pretended GPU",
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY - gpu.bytes_used, MEMORY),
        "memory_allocated": lambda *_: gpu.bytes_used,
        "max_memory_allocated": lambda *_: gpu.most_bytes,
        "reset_peak_memory_stats": forget_peak,
        "empty_cache": nothing,
    }


def _random_numbers() -> dict[str, Any]:
    """The device draws from the CPU's generator."""
    return {
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, *_: None,
        "set_rng_state_all": lambda states: None,
    }


def _current_device(gpu: PretendedGpu) -> type:
    """Return torch.cuda.device, a class, since torch asks what is an instance of it."""

    class Device:
        def __init__(self, device: Any) -> None:
            self.index = self.before = _index(gpu, device)

        def __enter__(self) -> None:
            self.before, gpu.index = gpu.index, self.index

        def __exit__(self, *_error: object) -> None:
            gpu.index = self.before

    return Device
