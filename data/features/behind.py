"""Work behind the passes of a device: a thread that writes what they computed, and copies that nobody waits for."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Behind:
    """One thread that does pieces of work in order behind its caller, who waits as soon as `most` of them are left to do.

    An error of the thread ends its work; it is raised by the next `put`, or at the end of the context.
    """

    def __init__(self, most: int) -> None:
        self._most, self._stopped = most, False
        self._left: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "Behind":
        return self

    def put(self, work: Callable[[], Any]) -> None:
        """Have `work` done after all that was put before."""
        while self._left and (len(self._left) >= self._most or self._left[0].done()):
            self._left.popleft().result()
        self._left.append(self._thread.submit(self._do, work))

    def _do(self, work: Callable[[], Any]) -> None:
        if not self._stopped:  # else what came before is missing
            try:
                work()
            except BaseException:
                self._stopped = True
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._stopped = self._stopped or kind is not None
        try:
            while self._left and kind is None:
                self._left.popleft().result()
        finally:
            self._stopped = True  # also where the wait was interrupted
            self._thread.shutdown()


class HostCopies:
    """Copies from a device behind the passes that it computes next; on the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def begin(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return the tensors in pinned memory, and what waits until they are there."""
        if self._device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}, lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.record_stream(self._stream)
        return copies, self._stream.record_event().synchronize
