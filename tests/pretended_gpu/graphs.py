"""CUDA graphs on a pretended GPU: captured operations run again on the same memory, as a graph's replay does.

A capture computes nothing: what it would have changed stays, what it would have made holds nothing of use. Waits and
copies of ordinary host memory within it are errors. `Recording` lists operations instead, to compare two rounds.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.pretended_gpu.counts import here
from tests.pretended_gpu.order import Memory, Stream


class CaptureError(RuntimeError):
    """Something that a graph cannot hold."""


@dataclass
class Launch:
    """An operation on the CPU tensors behind the device's, what it made, and which memory it reads (False) or writes (True)."""

    call: Callable[[], Any]
    made: list[Tensor]
    touched: list[tuple[Memory, bool]]

    def again(self, stream: Stream) -> None:
        """Run it on the memory that it was captured with."""
        for memory, write in self.touched:
            memory.touch(stream, here(), write=write)
        for kept, value in zip(self.made, tensors_of(self.call()), strict=True):
            if kept is not value:
                kept.copy_(value)


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors that an operation returned."""
    return [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, Tensor)]


@dataclass
class Capture:
    """A capture under way. started: what the stream had done at its beginning."""

    stream: Stream
    started: int
    launches: list[Launch] = field(default_factory=list)
    streams: set[Stream] = field(default_factory=set)

    def run(
        self, call: Callable[[], Any], stream: Stream, changed: list[Tensor], touched: list[tuple[Memory, bool]]
    ) -> Any:
        """Take up a launch; return its output without its values. Raises CaptureError on a stream that was not forked off."""
        if stream is not self.stream and stream.knows(self.stream) < self.started:
            raise CaptureError(f"{stream.name} is used while {self.stream.name} is captured, and does not wait for it")
        self.streams.add(stream)
        with torch._C._DisableTorchDispatch():
            before = [(x, x.clone()) for x in changed]
            out = call()
            made = tensors_of(out)
            for x, value in before:
                x.copy_(value)
            for x in made:
                if all(x is not kept for kept in changed):
                    x.fill_(torch.nan if x.is_floating_point() else 0)
        self.launches.append(Launch(call, made, touched))
        return out

    def keep(self, memory: Memory) -> None:
        """Let memory that was allocated within stay as long as the graph, which its last launch made it in."""
        self.launches[-1].touched.append((memory, True))

    def check_joined(self) -> None:
        """Raise CaptureError where work on another stream was not joined again."""
        for stream in self.streams - {self.stream}:
            if self.stream.knows(stream) < stream.done:
                raise CaptureError(f"the capture ended, and {self.stream.name} has not waited for {stream.name}")


class Graph:
    """torch.cuda.CUDAGraph, captured by `with torch.cuda.graph(graph)`. gpu: the PretendedGpu."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.launches: list[Launch] = []

    @contextmanager
    def capturing(self, stream: Stream | None = None) -> Iterator[None]:
        """Capture what is launched within, on a stream of its own unless one is given."""
        gpu = self.gpu
        gpu.wait("the beginning of a capture", *(other.now() for other in gpu.streams))
        stream = stream or gpu.side_stream(gpu.index)
        with gpu.launching(stream):
            stream.done += 1
            gpu.capture = Capture(stream, stream.done)
            try:
                yield
                gpu.capture.check_joined()
                self.launches = gpu.capture.launches
            finally:
                # Nothing was done, so nobody needs to wait for it.
                for other in gpu.streams:
                    gpu.host.learn(other.now())
                gpu.capture = None

    def replay(self) -> None:
        """Launch what was captured, on the current stream."""
        if self.gpu.capture:
            raise CaptureError("a graph is replayed while another one is captured")
        self.gpu.counts.kernel("graph", here())
        stream = self.gpu.stream_of(self.gpu.index)
        stream.done += 1
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for launch in self.launches:
                launch.again(stream)


class Recording:
    """The operations of some work: names, shapes, strides, numbers, and the addresses of the memory that was there before.

    Two rounds whose lists are equal can be one graph. What a round allocates itself is named by its order.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self._since = Memory("", None, []).born
        self._new: dict[int, int] = {}

    def note(self, name: str, arguments: Iterable[Any]) -> None:
        """Append an operation; arguments: pairs of a CPU tensor and its Memory, and plain values."""
        self.operations.append((name, *map(self._describe, arguments)))

    def _describe(self, x: Any) -> Any:
        if not (isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], Memory)):
            return repr(x)
        tensor, memory = x
        place: Any = ("kept", tensor.data_ptr())
        if memory.born > self._since:
            place = ("new", self._new.setdefault(memory.born, len(self._new)), tensor.storage_offset())
        return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), place
