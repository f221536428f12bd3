"""A key-value cache with a length per row, written in place, committed and rolled back.

It speaks transformers' `Cache` protocol, so any causal LM that takes 4D masks can use it.
Shapes: B rows, b of them, N new tokens (tree nodes), T tree nodes in all, S slots, h kv heads, d head dim,
M tensors of one shape (keys and values of all layers that share it).
A row's committed tokens sit in slots 0..length-1; node j of a tree is written to slot length + j.

One pass of the target over the nodes of a draft, through the cache.

Shapes: B rows, N nodes, A aux layers, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import UserError
from draftsmith.eval.decode.draft import Draft
from draftsmith.heads.target.target import Target, TargetOutput


@dataclass(frozen=True)
class WriteRange:
    """Where the next `count` entries of each row go: behind its first `lengths_B` + `skip`. longest: the most of these.

    rows_b: the rows of the buffers that are written to; None for all of them."""

    lengths_B: Tensor
    count: int
    longest: int
    rows_b: Tensor | None = None
    skip: int = 0

    @property
    def visible(self) -> int:
        """WriteRange in use by the longest row."""
        return self.longest + self.count

    @property
    def single(self) -> bool:
        """Whether the buffers have a single row, whose new entries are then one slice."""
        return self.rows_b is None and len(self.lengths_B) == 1

    def store(self, buffer_BhSd: Tensor, new_BhNd: Tensor) -> Tensor:
        """Write the new entries into a buffer; return the visible slots of the rows written to."""
        visible_BhSd = buffer_BhSd[:, :, : self.visible]
        if self.single:
            visible_BhSd[:, :, self.longest :] = new_BhNd
            return visible_BhSd
        device = self.lengths_B.device
        rows_B = torch.arange(len(self.lengths_B), device=device) if self.rows_b is None else self.rows_b
        slots_BN = self.lengths_B[:, None] + torch.arange(self.skip, self.skip + self.count, device=device)
        buffer_BhSd.transpose(1, 2)[rows_B[:, None], slots_BN] = new_BhNd.transpose(1, 2)
        return visible_BhSd if self.rows_b is None else visible_BhSd[self.rows_b]


class TensorShape(NamedTuple):
    """Heads, head dim and dtype of a layer's keys or values."""

    heads: int
    dim: int
    dtype: torch.dtype


class LayerShape(NamedTuple):
    """Keys and values of one layer; they differ where attention is compressed (MLA)."""

    keys: TensorShape
    values: TensorShape


class _Recorder(CacheLayerMixin):
    """Notes the shapes that a layer hands over, and caches nothing."""

    is_sliding = False
    is_compileable = False
    shape: LayerShape | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = (TensorShape(x.shape[1], x.shape[3], x.dtype) for x in (key_states, value_states))
        self.shape = LayerShape(keys, values)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers < 5.20

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def layer_shapes(target: Target) -> tuple[LayerShape | None, ...]:
    """Return what each layer of `target` caches, None where it caches nothing of its own; found by one small forward.

    The real shapes, not the config's: they differ with compressed attention and with heads of several sizes.
    """
    known = _SHAPES.setdefault(target, {})
    if target.dtype not in known:
        cache = Cache(layers=[_Recorder() for _ in range(target.num_layers)])
        target.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device), past_key_values=cache)
        known[target.dtype] = tuple(layer.shape for layer in cache.layers)
    return known[target.dtype]


_SHAPES: WeakKeyDictionary[Target, dict[torch.dtype, tuple[LayerShape | None, ...]]] = WeakKeyDictionary()
"""What was found for the targets that are in memory, by their dtype."""


class _Layer(CacheLayerMixin):
    """One layer as transformers sees it: it hands back every visible slot and leaves masking to the given mask."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "KVCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        at = self.cache.staged
        return at.store(self.keys, key_states), at.store(self.values, value_states)

    def get_seq_length(self) -> int:
        return self.cache.staged.longest

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers < 5.20

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.staged.visible, 0


class KVCache(Cache):
    """The target's cache: `stage` places a draft, a forward writes it, `commit` keeps an accepted path.

    Tensors of equal shape are views of one buffer [M, B, h, S, d], so that a commit is one gather and one scatter.
    """

    def __init__(
        self, shapes: Sequence[LayerShape | None], rows: int, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = capacity
        self.shapes = tuple(shapes)
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.staged = WriteRange(self.lengths_B, 0, 0)
        super().__init__(layers=[_Layer(self) for _ in shapes])
        tensors = [tensor for shape in self.shapes if shape is not None for tensor in shape]
        self.buffers: dict[TensorShape, Tensor] = {
            kind: torch.zeros(
                tensors.count(kind), rows, kind.heads, capacity, kind.dim, dtype=kind.dtype, device=device
            )
            for kind in dict.fromkeys(tensors)
        }
        self._hand_out()

    @classmethod
    def for_target(cls, target: Target, rows: int, capacity: int) -> "KVCache":
        """Allocate `capacity` slots for each of `rows` sequences of `target`."""
        return cls(layer_shapes(target), rows, capacity, target.device)

    def _hand_out(self) -> None:
        """Give every layer its views of the buffers."""
        views = {kind: iter(buffer.unbind(0)) for kind, buffer in self.buffers.items()}
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            layer.keys = None if shape is None else next(views[shape.keys])
            layer.values = None if shape is None else next(views[shape.values])

    def stage(self, nodes: int, rows_b: Tensor | None = None, longest: int | None = None) -> WriteRange:
        """Reserve slots length .. length+nodes-1 for the next forward, over all rows or over the rows `rows_b`.

        longest: the largest length of a row that matters, where it is known."""
        lengths_B = self.lengths_B if rows_b is None else self.lengths_B[rows_b]
        longest = int(lengths_B.max()) if longest is None else longest
        self.staged = WriteRange(lengths_B, nodes, longest, rows_b)
        assert self.staged.visible <= self.capacity, f"{self.staged.visible} slots, but the cache has {self.capacity}"
        return self.staged

    def commit(self, draft: Draft, path_BD: Tensor, kept_B: Tensor | None = None) -> None:
        """Keep the nodes of `path_BD` (-1 pads) as committed tokens; all other staged nodes are rolled back.

        kept_B: how many nodes these are, where the caller knows."""
        kept_B = (path_BD >= 0).sum(1) if kept_B is None else kept_B
        if not draft.is_chain:
            base_B1 = self.lengths_B[:, None]
            place_D = torch.arange(path_BD.shape[1], device=path_BD.device)
            # Padding copies a slot onto itself.
            source_BD = base_B1 + torch.where(path_BD >= 0, path_BD, place_D)
            row_B1 = torch.arange(len(path_BD), device=path_BD.device)[:, None]
            for buffer in self.buffers.values():
                slots_MBShd = buffer.transpose(2, 3)
                slots_MBShd[:, row_B1, base_B1 + place_D] = slots_MBShd[:, row_B1, source_BD]
        self.lengths_B = self.lengths_B + kept_B

    def rollback(self, lengths_B: Tensor) -> None:
        """Forget every token from `lengths_B` on; a row that is shorter stays as it is."""
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows `rows` (finished rows leave)."""
        self.lengths_B = self.lengths_B[rows]
        self.buffers = {kind: buffer[:, rows] for kind, buffer in self.buffers.items()}
        self._hand_out()


def build_mask(
    lengths_B: Tensor, ancestors_BNT: Tensor, visible: int, depth_BT: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return bool [B, 1, N, S]: a query node sees the committed slots and its ancestors, within `window` positions.

    ancestors_BNT: for each of the last N nodes of a tree, which of its T nodes are above it or itself; node j sits in
    slot length + j. depth_BT is needed for a window, which counts positions (length + depth), not slots, so that trees
    and chains see the same past.
    """
    rows, queries, nodes = ancestors_BNT.shape
    if rows == 1 and window is None and visible > nodes:
        # A single row has no slots between its committed ones and its tree.
        committed = ancestors_BNT.new_ones(1, queries, visible - nodes)
        return torch.cat([committed, ancestors_BNT], 2)[:, None]
    slot_S = torch.arange(visible, device=lengths_B.device)
    relative_BS = slot_S - lengths_B[:, None]
    committed_BS = relative_BS < 0
    node_BS = relative_BS.clamp(0, nodes - 1)
    in_tree_BS = (relative_BS >= 0) & (relative_BS < nodes)
    ancestor_BNS = ancestors_BNT.gather(2, node_BS[:, None].expand(rows, queries, visible))
    mask_BNS = committed_BS[:, None] | (ancestor_BNS & in_tree_BS[:, None])
    if window is not None:
        assert depth_BT is not None
        position_BT = lengths_B[:, None] + depth_BT
        key_position_BS = torch.where(committed_BS, slot_S, position_BT.gather(1, node_BS))
        query_position_BN = position_BT[:, nodes - queries :]
        mask_BNS &= key_position_BS[:, None] > query_position_BN[:, :, None] - window
    return mask_BNS[:, None]


def attention_masks(
    config: PretrainedConfig, lengths_B: Tensor, draft: Draft, visible: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return the mask in the form the model takes: one tensor, or one per layer type of `config.layer_types`."""

    def build(window: int | None) -> Tensor:
        mask = build_mask(lengths_B, draft.ancestors_BNN, visible, draft.depth_BN, window)
        if config._attn_implementation == "eager":
            # Eager attention adds the mask to the scores.
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return mask

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return build(window)
    if unknown := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise UserError(
            f"A target of type {config.model_type!r} has layers of type {unknown[0]}, whose past a draft tree cannot be given "
            "yet: choose another target."
        )
    return {kind: build(window if kind == "sliding_attention" else None) for kind in dict.fromkeys(layer_types)}


def run_draft(
    target: Target,
    cache: KVCache,
    draft: Draft,
    layer_ids: tuple[int, ...] = (),
    rows_b: Tensor | None = None,
    longest: int | None = None,
) -> TargetOutput:
    """Return the target's states at every node: aux [B, N, A*D] of `layer_ids`, last [B, N, D].

    The nodes' keys and values are written behind the committed ones; `cache.commit` decides which stay. rows_b: the
    rows of the cache that the draft's rows are; None for all of them. longest: see `KVCache.stage`.
    """
    visible = cache.stage(draft.tokens_BN.shape[1], rows_b, longest).visible
    lengths_B = cache.lengths_B if rows_b is None else cache.lengths_B[rows_b]
    return target.forward(
        draft.tokens_BN,
        layer_ids=layer_ids,
        attention_mask=attention_masks(target.config, lengths_B, draft, visible, target.dtype),
        position_ids=lengths_B[:, None] + draft.depth_BN,
        past_key_values=cache,
    )
