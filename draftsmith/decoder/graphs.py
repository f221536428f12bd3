"""CUDA graphs of a round's work: its kernels are started at once.

Work is a function of tensors that returns a dataclass of tensors. It is captured once work of its key has been seen a few times: what
the host decides, and shapes. A graph reads what it is given from memory of its own, or where another graph leaves it.

Shapes: B rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.data.memory import map_tensors, tensors_of
from draftsmith.decoder.sampling import Noise
from draftsmith.progress import say
from draftsmith.target.pretrained import is_close

EAGER = 2
"""Times that work of a shape runs kernel by kernel before it is captured, which takes longer than a few of them: the last drafts of an
answer are shorter than all others."""
MOST = 64
"""Graphs that are held, those run last; each takes memory for its kernels. A batch that empties has a few at every number of rows, and
the next one goes through them again."""

T = TypeVar("T")
Body = Callable[..., T]
"""Work: (random numbers, tensors) -> a dataclass of tensors."""
_STAYING: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Memory that graphs write what they return to, by its address."""


class Graphs:
    """Graphs by key. what: their work, in a warning. dtype: of its products, which another order of sums may round otherwise. most: of a
    returned tensor's first two dimensions together, for all keys.

    exact: whether integers must be those of the kernels one by one; else such a rounding may choose others.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        what: str,
        most: int,
        *,
        captures: bool = True,
        exact: bool = True,
    ) -> None:
        self._device, self._dtype, self._what, self._most, self._exact = device, dtype, what, most, exact
        self.captures = captures and device.type == "cuda"
        self.held: dict[tuple[Any, ...], Graph[Any]] = {}
        self._seen = Counter[tuple[Any, ...]]()

    def run(self, key: tuple[Any, ...], body: Body[T], *given: Tensor, noise: Noise | None = None) -> T:
        """Return body(noise, *given). key: all that the work depends on besides the tensors' values.

        What a graph returns stays until any next graph of these. Rows are the first dimension of the first tensor."""
        if not self.captures:
            return body(noise, *given)
        key = (len(given[0]), *key, *((x.shape, x.stride()) for x in given))
        self._seen[key] += 1
        if self._seen[key] <= EAGER:
            return body(noise, *given)
        if key not in self.held and (why := self._capture(key, body, given, noise)):
            self.captures = False
            self.held.clear()
            say(
                f"warning: {self._what} cannot be captured as CUDA graphs ({why}): their kernels are started one by one, which is "
                "slower.",
                once=True,
            )
            return body(noise, *given)
        self.held[key] = graph = self.held.pop(key)  # the last one run
        made: T = graph.run(given, noise)
        return made

    def _capture(self, key: tuple[Any, ...], body: Body[T], given: Sequence[Tensor], noise: Noise | None) -> str:
        """Capture a graph; return why it cannot be, "" where it is."""
        if not self.held:
            self._outputs, self._pool = _Outputs(self._most), torch.cuda.graph_pool_handle()
        elif len(self.held) >= MOST:  # what it took of the pool serves the next
            del self.held[next(iter(self.held))]
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self._device):
                graph = Graph(body, given, noise, self._outputs, self._pool)
                graph.check(self._dtype, exact=self._exact)
                self.held[key] = graph
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""  # out of the exception, which holds what it had made


class Graph(Generic[T]):
    """A captured body."""

    def __init__(
        self, body: Body[T], given: Sequence[Tensor], noise: Noise | None, outputs: "_Outputs", pool: Any
    ) -> None:
        # Memory of its own, which it reads whatever becomes of what is given.
        self._given = [x if outputs.reads_in_place(x) else x.clone() for x in given]
        self._noise = None if noise is None else _Held(noise.keys_B, noise.counter_B, noise.table, noise.counter)
        device = given[0].device
        now, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            self._oracle = body(self._noise, *self._given)  # also lets libraries allocate what they keep
        now.wait_stream(aside)
        kept = [outputs.like(place, x) for place, x in enumerate(tensors_of(self._oracle))]
        places = iter(kept)
        self.made: T = map_tensors(lambda _: next(places), self._oracle)
        self._graph, reads = torch.cuda.CUDAGraph(), _Reads()
        # The products' workspace lies in the graph's own memory then, which no other graph takes along when it goes.
        _forget_workspaces()
        # Other threads may go on meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"), reads:
            # What the work makes itself goes back to the pool, for the next graph's.
            for into, value in zip(kept, tensors_of(body(self._noise, *self._given)), strict=True):
                into.copy_(value)
        self._reads = reads.found
        _forget_workspaces()

    def check(self, dtype: torch.dtype, *, exact: bool) -> None:
        """Raise RuntimeError where it does not compute what its kernels do one by one. See `Graphs`."""
        made = tensors_of(self.made)
        for ours in made:  # with what a graph without kernels would leave
            ours.fill_(torch.nan if ours.is_floating_point() else -1)
        self._graph.replay()
        for ours, theirs in zip(made, tensors_of(self._oracle), strict=True):
            if theirs.is_floating_point():
                expected = theirs.to(dtype)
                same = not expected.numel() or not bool(expected.isfinite().all()) or is_close(ours, expected)
            else:
                same = bool(((ours == theirs) if exact else (ours >= 0) | (theirs < 0)).all())
            if not same:
                raise RuntimeError("a graph's numbers are not those of its kernels one by one")
        del self._oracle

    def run(self, given: Sequence[Tensor], noise: Noise | None) -> T:
        """Run the body over what is given, of the shapes that it was captured with."""
        for kept, x in zip(self._given, given, strict=True):
            if kept.data_ptr() != x.data_ptr():
                kept.copy_(x)
        if self._noise is not None and noise is not None:
            self._noise.copy_(noise)
        self._graph.replay()
        return self.made


class _Outputs:
    """Memory that all graphs of a holder write what they return to: a round has read it before the next graph."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._flat: dict[tuple[Any, ...], Tensor] = {}

    def like(self, place: int, made: Tensor) -> Tensor:
        """Return a tensor of such a shape in it."""
        key = (place, made.dtype, *made.shape[2:])
        if key not in self._flat or self._flat[key].numel() < made.numel():
            most = max(made.numel(), self._most * made.shape[2:].numel())
            self._flat[key] = made.new_empty(most)
            _STAYING[self._flat[key].data_ptr()] = self._flat[key]
        return self._flat[key][: made.numel()].view(made.shape)

    def reads_in_place(self, x: Tensor) -> bool:
        """Whether it lies where the graphs of another holder leave it."""
        home = _STAYING.get(x.data_ptr())
        return home is not None and all(home is not own for own in self._flat.values())


@dataclass(frozen=True)
class _Held(Noise):
    """Random numbers in memory that stays. They are those of the last round that was copied."""

    drawn: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def draw(self, stream: int, count: int) -> Tensor:
        """As `Noise.draw`."""
        if (stream, count) not in self.drawn:
            self.drawn[stream, count] = super().draw(stream, count).clone()
        return self.drawn[stream, count]

    def copy_(self, noise: Noise) -> None:
        """Take the numbers of another round."""
        for (stream, count), kept in self.drawn.items():
            kept.copy_(noise.draw(stream, count))


class _Reads(TorchDispatchMode):
    """found: what is read that was there before, such as numbers that a cache may drop. A graph must keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _leaves((args, kwargs or {})):
            if (at := x.untyped_storage().data_ptr()) not in self._made:
                self.found[at] = x
        out = func(*args, **(kwargs or {}))
        for x in _leaves(out):
            if (at := x.untyped_storage().data_ptr()) not in self.found:
                self._made.add(at)
        return out


def _leaves(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    for y in x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ():
        yield from _leaves(y)


def _forget_workspaces() -> None:
    if forget := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        forget()
