"""The KV cache: keys and values of several sequences, each with its own length. A commit happens in `KVCache.commit`.

A row's cached tokens fill slots 0..length-1; node j of a draft is written to slot length + j. One forward over a
draft is `run_draft` of slots.py; afterwards `commit` keeps the accepted path. The class speaks transformers' `Cache` protocol, so
that any causal LM that takes 4D masks can use it; draft heads with layers of their own use the same class.

Shapes: B rows, b some of these rows, N nodes of a draft (or new tokens), T nodes of the whole tree, D nodes of a path,
S slots, h key/value heads, d head dim, M tensors of one shape (keys and values of all layers that share it).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from draftsmith.decoder.draft import Draft, numbers
from draftsmith.target.target import Target


@dataclass(frozen=True)
class WriteRange:
    """The slots that one forward writes: `count` entries of each row from slot lengths_B + skip on.

    lengths_B: a copy of the cache's. longest: the largest lengths_B + skip of a row that matters. rows_b: the rows of
    the buffers that are written, None for all. bucket: slots are visible up to a multiple of this.
    """

    lengths_B: Tensor
    count: int
    longest: int
    rows_b: Tensor | None = None
    skip: int = 0
    bucket: int = 1

    @cached_property
    def visible(self) -> int:
        """Slots that the longest row uses once its entries are written, and those up to a multiple of the bucket."""
        return -(-(self.longest + self.count) // self.bucket) * self.bucket

    @cached_property
    def single(self) -> bool:
        """Whether there is one row alone, whose new entries are then one slice."""
        return self.rows_b is None and len(self.lengths_B) == 1 and self.bucket == 1

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The rows [B, 1] of the buffers and their slots [B, N] that are written: the same in every layer."""
        device = self.lengths_B.device
        rows_B = numbers(0, len(self.lengths_B), device) if self.rows_b is None else self.rows_b
        return rows_B[:, None], self.lengths_B[:, None] + numbers(self.skip, self.skip + self.count, device)


class TensorShape(NamedTuple):
    """Heads, head dim and dtype of a layer's keys or values, and the GPU of the layer where that is another one than the cache's."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device | None = None


class LayerShape(NamedTuple):
    """Keys and values of one layer; they differ where attention is compressed (MLA)."""

    keys: TensorShape
    values: TensorShape


def layer_shapes(target: Target) -> tuple[LayerShape | None, ...]:
    """Return the shapes that each layer of `target` caches, None for a layer that shares another one's.

    A small forward finds them: compressed attention and heads of several sizes differ from the config.
    """
    known = _SHAPES.setdefault(target, {})
    if target.dtype not in known:
        cache = Cache(layers=[DynamicLayer() for _ in range(target.num_layers)])
        target.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device), past_key_values=cache)
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        known[target.dtype] = tuple(
            None if pair[0] is None else LayerShape(*(_shape_of(x, target.device) for x in pair)) for pair in pairs
        )
    return known[target.dtype]


def _shape_of(x: Tensor, device: torch.device) -> TensorShape:
    return TensorShape(x.shape[1], x.shape[3], x.dtype, None if x.device == device else x.device)


_SHAPES: WeakKeyDictionary[Target, dict[torch.dtype, tuple[LayerShape | None, ...]]] = WeakKeyDictionary()
"""Layer shapes by target and dtype, as long as the target is in memory."""


def llama_layer_shapes(config: LlamaConfig, layers: int, dtype: torch.dtype) -> tuple[LayerShape, ...]:
    """Return the shapes that `layers` Llama layers of `config` cache; for draft heads."""
    kind = TensorShape(config.num_key_value_heads, config.head_dim, dtype)
    return (LayerShape(kind, kind),) * layers


def entry_bytes(shapes: Sequence[LayerShape | None]) -> int:
    """Return the bytes that one token takes in a cache: the keys and values of all layers that have their own."""
    tensors = [tensor for shape in shapes if shape is not None for tensor in shape]
    return sum(tensor.heads * tensor.dim * tensor.dtype.itemsize for tensor in tensors)


class _Layer(CacheLayerMixin):
    """One layer of a KVCache in transformers' protocol: it returns every visible slot; the given mask hides some."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "KVCache", indices: "list[BufferIndex] | None") -> None:
        super().__init__()
        self.cache, self.indices = cache, indices

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        assert self.indices is not None
        keys, values = self.indices
        return self.cache.store(keys, key_states), self.cache.store(values, value_states)

    def get_seq_length(self) -> int:
        return self.cache.staged.longest

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers < 5.20

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.staged.visible, 0


BUCKET = 256
"""On a GPU keys under a mask are taken up to a multiple of this, so that few lengths differ."""
BufferIndex = tuple[TensorShape, int]
"""Where a layer's keys or values are: the shape that names a buffer, and the number of a tensor in it."""


def with_room(capacity: int, rows: int, device: torch.device) -> int:
    """Return a capacity that suffices for a next batch, too, where it costs little: on a GPU buffers stay with the graphs that use them."""
    step = 1 if device.type != "cuda" else 2048 if rows <= 8 else BUCKET
    return -(-capacity // step) * step


class KVCache(Cache):
    """Keys and values of B sequences, of the target, of a draft model or of a draft head's own layers.

    A forward is framed by two calls: `stage` reserves the slots behind the cached tokens, the layers write them, and
    a writer keeps some. What no writer keeps is overwritten by the next forward.

    `lengths_B` is the one true number of cached tokens of each row, read-only outside. Besides `resume` three methods write it:

    - `append` keeps the first entries of a forward (a prompt, or the tokens that a drafter reads);
    - `commit` keeps the accepted path of a draft;
    - `rollback` forgets the last tokens.

    `select` drops rows and changes no length. All other lengths derive from this one: `staged.lengths_B` is a copy for
    the forward under way; `DecodeState.length_B` is the target cache's `lengths_B` at the start of a round;
    `DecodeState.host_lengths` is the same number counted from the emitted tokens, which spares waiting for a GPU. A
    drafter's own cache follows the target's: rolled back to where a round's new tokens begin, it reads and appends them.

    Tensors of equal shape are views of one buffer [M, B, h, S, d], so that a commit is one gather and one scatter.
    """

    bucket = 1
    """Of the forwards over all rows, see `WriteRange`."""

    def __init__(
        self, shapes: Sequence[LayerShape | None], rows: int, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = capacity
        self.shapes = tuple(shapes)
        self._lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.staged = WriteRange(self._lengths_B, 0, 0)
        # Of the forward under way: the visible slots of every tensor of a shape, and those that a single row writes.
        self._views: dict[TensorShape, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        counts: dict[TensorShape, Iterator[int]] = defaultdict(itertools.count)
        indices = [None if s is None else [(kind, next(counts[kind])) for kind in s] for s in self.shapes]
        super().__init__(layers=[_Layer(self, pair) for pair in indices])
        self.buffers: dict[TensorShape, Tensor] = {}
        for kind, count in counts.items():
            # On a GPU heads lie within slots, as its flash kernel reads the keys of several rows.
            where = kind.device or torch.device(device)
            on_gpu = where.type == "cuda"
            inner = (capacity, kind.heads) if on_gpu else (kind.heads, capacity)
            buffer = torch.zeros(next(count), rows, *inner, kind.dim, dtype=kind.dtype, device=where)
            self.buffers[kind] = buffer.transpose(2, 3) if on_gpu else buffer
        self._whole = dict(self.buffers)

    @classmethod
    def for_target(cls, target: Target, rows: int, capacity: int) -> "KVCache":
        """Allocate `capacity` slots for each of `rows` sequences of `target`."""
        return cls(layer_shapes(target), rows, capacity, target.device)

    def restart(self) -> None:
        """Forget all rows; those that left are back, where they were."""
        self.buffers = dict(self._whole)
        for buffer in self.buffers.values():
            buffer.zero_()  # a mask does not keep out what is not finite
        self._lengths_B = self._lengths_B.new_zeros(len(next(iter(self.buffers.values()))[0]))
        self._views.clear()

    def restarted(self, rows: int, capacity: int) -> bool:
        """Forget all rows if it suffices for so many of such a length; return whether it does. On a CPU memory is had as fast."""
        whole = next(iter(self._whole.values()))
        if self._lengths_B.device.type == "cpu" or whole.shape[1] != rows or self.capacity < capacity:
            return False
        self.restart()
        return True

    @property
    def lengths_B(self) -> Tensor:
        """Cached tokens of each row."""
        return self._lengths_B

    def stage(self, count: int, longest: int, rows_b: Tensor | None = None, skip: int = 0) -> WriteRange:
        """Reserve `count` slots from length + skip on for the next forward, in all rows or in the rows `rows_b`.

        longest: the largest length of a row that matters, which the host counts: asking the device would be a wait.
        """
        lengths_B = self._lengths_B if rows_b is None else self._lengths_B[rows_b]
        self.staged = WriteRange(lengths_B, count, longest + skip, rows_b, skip, self.bucket if rows_b is None else 1)
        self._views.clear()
        assert self.staged.visible <= self.capacity, f"{self.staged.visible} slots, but the cache has {self.capacity}"
        return self.staged

    def write(self, layer: int, keys_bhNd: Tensor, values_bhNd: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values to the staged slots; return its visible ones, [b, h, S, d] each."""
        return self.layers[layer].update(keys_bhNd, values_bhNd)

    def store(self, index: BufferIndex, new_BhNd: Tensor) -> Tensor:
        """Write a layer's new keys or values to the staged slots; return the visible ones [b, h, S, d] of the rows written."""
        at, (kind, number) = self.staged, index
        if kind not in self._views:
            # Of all layers at once: a slice costs as much as a small product.
            buffer = self.buffers[kind]
            written = buffer.narrow(3, at.longest, at.count).unbind(0) if at.single else ()
            self._views[kind] = buffer.narrow(3, 0, at.visible).unbind(0), written
        visible_BhSd = self._views[kind][0][number]
        if at.single:
            self._views[kind][1][number].copy_(new_BhNd)
            return visible_BhSd
        # Rows that do not matter may write behind what is visible.
        places = tuple(x.to(new_BhNd.device) for x in at.places)
        self.buffers[kind][number].transpose(1, 2)[places] = new_BhNd.transpose(1, 2)
        return visible_BhSd if at.rows_b is None else visible_BhSd[at.rows_b.to(new_BhNd.device)]

    def append(self, count: Tensor | int, rows_b: Tensor | None = None) -> None:
        """Keep the first `count` entries that the last forward wrote to each row, or to each of `rows_b`."""
        if rows_b is None:
            self._lengths_B = self._lengths_B + count
        else:
            assert isinstance(count, Tensor)
            self._lengths_B = self._lengths_B.index_add(0, rows_b, count)

    def commit(self, draft: Draft, path_BD: Tensor, kept_B: Tensor) -> None:
        """Commit the nodes of `path_BD` (-1 pads), moved together behind the cached tokens; the others are dropped.

        kept_B: number of nodes of each path; 0 for rows that commit nothing. Everything stays on the device: do not call `int` or
        `tolist` on these tensors. Tokens past an answer's end are rolled back by the loop.
        """
        if not draft.is_chain:  # the accepted nodes of a chain are in place already
            base_B1 = self._lengths_B[:, None]
            step_D = torch.arange(path_BD.shape[1], device=path_BD.device)
            # Padding copies a slot onto itself.
            source_BD = base_B1 + torch.where(path_BD >= 0, path_BD, step_D)
            row_B1 = torch.arange(len(path_BD), device=path_BD.device)[:, None]
            for buffer in self.buffers.values():
                slots_MBShd = buffer.transpose(2, 3)
                rows, to, source = (x.to(buffer.device) for x in (row_B1, base_B1 + step_D, source_BD))
                slots_MBShd[:, rows, to] = slots_MBShd[:, rows, source]
        self._lengths_B = self._lengths_B + kept_B

    def rollback(self, lengths: Tensor, rows_b: Tensor | None = None) -> None:
        """Forget every token from position `lengths` on, in all rows or in `rows_b`; shorter rows stay as they are."""
        if rows_b is None:
            self._lengths_B = torch.minimum(self._lengths_B, lengths)
        else:
            self._lengths_B = self._lengths_B.index_copy(0, rows_b, torch.minimum(self._lengths_B[rows_b], lengths))

    def resume(self, lengths_B: Tensor) -> None:
        """Take the lengths that a graph has counted."""
        self._lengths_B = lengths_B

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows `rows`, which ascend (finished rows leave). They move up within the buffers: a copy beside
        these might not fit."""
        self._lengths_B = self._lengths_B[rows]
        kept = rows.tolist()
        assert kept == sorted(kept)
        for kind, buffer in self.buffers.items():
            for place, row in enumerate(kept):
                if place < row:
                    buffer[:, place].copy_(buffer[:, row])
            self.buffers[kind] = buffer[:, : len(kept)]
        self._views.clear()


def build_mask(
    lengths_B: Tensor, ancestors_BNT: Tensor, visible: int, depth_BT: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return the attention mask, bool [B, 1, N, S]: a node sees the cached tokens and its ancestors, itself included.

    ancestors_BNT: for each of the last N nodes of a tree, which of its T nodes are its ancestors or itself; node j sits
    in slot length + j. window: a node sees only the last so many positions. It counts positions (length + depth_BT),
    not slots, so that a tree sees what a chain sees.
    """
    rows, queries, nodes = ancestors_BNT.shape
    if window is None and visible == nodes:  # nothing is cached
        return ancestors_BNT[:, None]
    if rows == 1 and window is None and visible > nodes:
        # A single row has no slots between its cached tokens and its tree.
        cached = ancestors_BNT.new_ones(1, queries, visible - nodes)
        return torch.cat([cached, ancestors_BNT], 2)[:, None]
    return place_mask(lengths_B, ancestors_BNT, visible, depth_BT, window)


def place_mask(
    lengths_B: Tensor, ancestors_BNT: Tensor, visible: int, depth_BT: Tensor | None, window: int | None
) -> Tensor:
    """Return the mask of `build_mask` for any rows and any number of slots, by the same operations whatever the lengths."""
    rows, queries, nodes = ancestors_BNT.shape
    slot_S = torch.arange(visible, device=lengths_B.device)
    relative_BS = slot_S - lengths_B[:, None]
    cached_BS = relative_BS < 0
    node_BS = relative_BS.clamp(0, nodes - 1)
    in_tree_BS = (relative_BS >= 0) & (relative_BS < nodes)
    ancestor_BNS = ancestors_BNT.gather(2, node_BS[:, None].expand(rows, queries, visible))
    mask_BNS = cached_BS[:, None] | (ancestor_BNS & in_tree_BS[:, None])
    if window is not None:
        assert depth_BT is not None
        position_BT = lengths_B[:, None] + depth_BT
        key_position_BS = torch.where(cached_BS, slot_S, position_BT.gather(1, node_BS))
        query_position_BN = position_BT[:, nodes - queries :]
        mask_BNS &= key_position_BS[:, None] > query_position_BN[:, :, None] - window
    return mask_BNS[:, None]


def attention_masks(
    config: PretrainedConfig, lengths_B: Tensor, draft: Draft, visible: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return the draft's attention mask as the model takes it: one tensor, or one per type of `config.layer_types`."""
    # Eager attention adds the mask to the scores, as does the kernel of CPUs, which would convert it in every layer.
    added = config._attn_implementation == "eager" or lengths_B.device.type == "cpu"

    def build(window: int | None) -> Tensor:
        if added and window is None and draft.tokens_BN.numel() == 1:  # the target alone, which sees all
            return torch.zeros(1, 1, 1, visible, dtype=dtype, device=lengths_B.device)
        mask = build_mask(lengths_B, draft.ancestors_BNN, visible, draft.depth_BN, window)
        if added:
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return mask

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return build(window)
    return {kind: build(window if kind == "sliding_attention" else None) for kind in dict.fromkeys(layer_types)}
