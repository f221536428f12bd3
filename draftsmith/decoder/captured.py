"""The target's passes over the drafts of a batch: on a GPU CUDA graphs, which start a pass's kernels at once.

A pass is captured once its shape has been seen a few times: so many nodes in so many rows and, under a mask, so many slots. It reads
the draft and the lengths from memory of its own, and cached keys where they lie, so buffers stay from batch to batch.

Shapes: B rows, b some of these rows, N nodes, V target vocab.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.passes import run_draft
from draftsmith.decoder.slots import BUCKET, Slots, Tree, is_chain, visible_slots
from draftsmith.progress import say
from draftsmith.target.pretrained import is_close
from draftsmith.target.target import Target, TargetOutput

EAGER = 2
"""Passes of a shape that run kernel by kernel before it is captured, which takes longer than a few of them: the last drafts of an answer
are shorter than all others."""
MOST = 32
"""Graphs that are held; each takes memory for its kernels."""


@dataclass(frozen=True)
class Pass:
    """What the target says of a draft: its states at all nodes, and logits_BNV. Those of a graph stay until any next pass."""

    output: TargetOutput
    logits_BNV: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return aux, last and the logits."""
        return self.output.aux, self.output.last, self.logits_BNV


class Passes:
    """Passes of a target over drafts of the sequences in `cache`. Make them by `of`; `release` lets the next batch have their graphs."""

    def __init__(self, target: Target, rows: int, capacity: int, nodes: int) -> None:
        self._target, self.nodes = target, nodes
        self.captures = target.device.type == "cuda" and target.plain_pass is not None
        # With room to spare where it costs little, so that it suffices for the next batch.
        step = 1 if not self.captures else 2048 if rows <= 8 else BUCKET
        self.rows, self.capacity = rows, -(-capacity // step) * step
        with torch.inference_mode(False):  # so that another batch may write to them outside of it
            self.cache = KVCache.for_target(target, rows, self.capacity)
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._seen = Counter[tuple[Any, ...]]()

    @classmethod
    def of(cls, target: Target, rows: int, capacity: int, nodes: int) -> "Passes":
        """Return passes over drafts of at most `nodes` nodes for `rows` sequences of at most `capacity` tokens, drafts included: on a GPU
        the ones that were released, if they suffice."""
        kept, target.kept_passes = target.kept_passes, None
        if isinstance(kept, Passes) and kept.rows == rows and kept.capacity >= capacity and kept.nodes >= nodes:
            kept._target = target
            kept.cache.restart()
            return kept
        del kept  # before the next buffers are allocated
        return cls(target, rows, capacity, nodes)

    def release(self) -> None:
        """Leave graphs and buffers to the next batch; these passes end."""
        if self._graphs:
            self._target.kept_passes = self
            del self._target  # which would hold each other

    @torch.no_grad()
    def __call__(
        self, draft: Draft, longest: int, layer_ids: tuple[int, ...] = (), rows_b: Tensor | None = None
    ) -> Pass:
        """Run the target over the nodes of a draft, as `run_draft` does, and return its logits too."""
        nodes = draft.tokens_BN.shape[1]
        visible = (
            0 if not self.captures or is_chain(self._target, draft) else visible_slots(self.cache, longest + nodes)
        )
        key = (len(self.cache.lengths_B), nodes, visible, draft.linear, layer_ids)
        self._seen[key] += 1
        if not self.captures or longest == 0 or rows_b is not None or self._seen[key] <= EAGER:
            output = run_draft(self._target, self.cache, draft, layer_ids, rows_b, longest=longest)
            return Pass(output, self._target.head.logits(output.last))
        self.cache.stage(nodes, longest)
        if key not in self._graphs:
            if (
                key[0] not in {rows for rows, *_ in self._graphs} or len(self._graphs) >= MOST
            ):  # or of rows that have left
                self._graphs.clear()
                self._outputs, self._pool = _Outputs(self.rows * self.nodes), torch.cuda.graph_pool_handle()
            why = ""
            try:
                with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self._target.device):
                    self._graphs[key] = _Graph(
                        self._target, self.cache, draft, visible, layer_ids, self._outputs, self._pool
                    )
            except RuntimeError as error:
                why = str(error).splitlines()[0]
            if why:  # out of the exception, which holds what it had made
                self.captures = False
                self._graphs.clear()
                del self._outputs
                say(
                    f"warning: the target's passes cannot be captured as CUDA graphs ({why}): their kernels are started one by one, "
                    "which is slower.",
                    once=True,
                )
                return self(draft, longest, layer_ids)
        return self._graphs[key].run(draft, self.cache.lengths_B)


class _Outputs:
    """Memory for `most` nodes that all graphs of a batch write what they return to: a round has read it before the next pass."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._flat: dict[tuple[int, int], Tensor] = {}

    def like(self, made: Pass) -> Pass:
        """Return tensors of such shapes in it."""
        aux, last, logits_BNV = map(self._view, range(3), made.tensors())
        return Pass(TargetOutput(aux, last), logits_BNV)

    def _view(self, place: int, made: Tensor) -> Tensor:
        key = place, made.shape[2]
        if key not in self._flat:
            self._flat[key] = made.new_empty(self._most * made.shape[2])
        return self._flat[key][: made.numel()].view(made.shape)


class _Graph:
    """A captured pass over drafts like `draft`, over the first `visible` slots of the cache; 0 for chains that need no mask."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        draft: Draft,
        visible: int,
        layer_ids: tuple[int, ...],
        outputs: _Outputs,
        pool: Any,
    ) -> None:
        # Memory of its own, which a graph reads whatever becomes of the draft's.
        self._tokens_BN, self._used_B = draft.tokens_BN.clone(), cache.lengths_B.clone()
        self._depth_BN, self._tree = draft.depth_BN.clone(), None
        if visible:
            self._tree = Tree(draft.ancestors_BNN.clone(), self._depth_BN)
        self._static = draft.tree
        self._cache, self._visible, self._layer_ids = cache, visible, layer_ids
        now, aside = torch.cuda.current_stream(target.device), torch.cuda.Stream(target.device)
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            oracle = self._body(target)  # also lets libraries allocate what they keep
        now.wait_stream(aside)
        self._made = outputs.like(oracle)
        self._graph = torch.cuda.CUDAGraph()
        # The products' workspace lies in the graph's own memory then, which no other graph takes along when it goes.
        _forget_workspaces()
        # Other threads may go on meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            # What the pass makes itself goes back to the pool, for the next graph's.
            for kept, value in zip(self._made.tensors(), self._body(target).tensors(), strict=True):
                kept.copy_(value)
        _forget_workspaces()
        self._made.logits_BNV.fill_(torch.nan)  # what a graph without kernels would leave
        self._graph.replay()
        expected = oracle.logits_BNV.to(target.dtype)
        if bool(expected.isfinite().all()) and not is_close(self._made.logits_BNV, expected):
            raise RuntimeError("a graph's logits are not those of its kernels one by one")

    def _body(self, target: Target) -> Pass:
        nodes = self._tokens_BN.shape[1]
        slots = Slots(self._cache, target.config, self._used_B, nodes, self._visible, self._tree)
        positions_BN = self._used_B[:, None] + self._depth_BN
        output = target.attend_by(slots.attend, self._tokens_BN, self._layer_ids, positions_BN)
        return Pass(output, target.head.logits(output.last))

    def run(self, draft: Draft, lengths_B: Tensor) -> Pass:
        """Run the pass over a draft of this shape behind `lengths_B` cached tokens."""
        self._tokens_BN.copy_(draft.tokens_BN)
        self._used_B.copy_(lengths_B)
        if not draft.linear and (draft.tree is None or draft.tree is not self._static):
            self._static = draft.tree
            self._depth_BN.copy_(draft.depth_BN)
            if self._tree is not None:
                self._tree.ancestors_BNN.copy_(draft.ancestors_BNN)
        self._graph.replay()
        return self._made


def _forget_workspaces() -> None:
    if forget := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        forget()
