"""A key-value cache with a length per row, written in place, committed and rolled back.

It speaks transformers' `Cache` protocol, so any causal LM that takes 4D masks can use it.
Shapes: B rows, N new tokens (tree nodes), S slots, h kv heads, d head dim.
A row's committed tokens sit in slots 0..length-1; node j of a tree is written to slot length + j.
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.eval.draft import Draft


class SlotBuffer:
    """Keys and values of one layer, allocated at the first write from the shapes that arrive."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys_BhNd: Tensor, values_BhNd: Tensor, slots_BN: Tensor, visible: int) -> tuple[Tensor, Tensor]:
        """Store N new entries per row at `slots_BN`; return views of the first `visible` slots."""
        if self.keys is None or self.values is None:
            self.keys = _allocate(keys_BhNd, self.capacity)
            self.values = _allocate(values_BhNd, self.capacity)
        row_B1 = torch.arange(slots_BN.shape[0], device=slots_BN.device)[:, None]
        self.keys.transpose(1, 2)[row_B1, slots_BN] = keys_BhNd.transpose(1, 2)
        self.values.transpose(1, 2)[row_B1, slots_BN] = values_BhNd.transpose(1, 2)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy entries from slots `source_BD` to slots `target_BD` (all read before any is written)."""
        assert self.keys is not None
        assert self.values is not None
        row_B1 = torch.arange(source_BD.shape[0], device=source_BD.device)[:, None]
        for buffer in (self.keys, self.values):
            slots = buffer.transpose(1, 2)
            slots[row_B1, target_BD] = slots[row_B1, source_BD]

    def select(self, rows: Tensor) -> None:
        """Keep only `rows`."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


def _allocate(like_BhNd: Tensor, capacity: int) -> Tensor:
    rows, heads, _, dim = like_BhNd.shape
    return like_BhNd.new_zeros(rows, heads, capacity, dim)


class _Layer(CacheLayerMixin):
    """One layer as transformers sees it: it hands back every visible slot and leaves masking to the given mask."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "KVCache") -> None:
        super().__init__()
        self.cache = cache
        self.buffer = SlotBuffer(cache.capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.buffer.write(key_states, value_states, self.cache.slots_BN, self.cache.visible)

    def get_seq_length(self) -> int:
        return self.cache.visible - self.cache.slots_BN.shape[1]

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers < 5.20

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.visible, 0


class KVCache(Cache):
    """The target's cache: `stage` places a draft, a forward writes it, `commit` keeps an accepted path."""

    def __init__(self, num_layers: int, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.slots_BN = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.visible = 0
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def stage(self, nodes: int) -> None:
        """Reserve slots length .. length+nodes-1 of every row for the next forward."""
        longest = int(self.lengths_B.max())
        assert longest + nodes <= self.capacity, f"cache of {self.capacity} slots is too small for {longest} + {nodes}"
        self.slots_BN = self.lengths_B[:, None] + torch.arange(nodes, device=self.lengths_B.device)
        self.visible = longest + nodes

    def commit(self, draft: Draft, path_BD: Tensor) -> None:
        """Keep the nodes of `path_BD` (-1 pads) as committed tokens; all other staged nodes are rolled back."""
        kept_B = (path_BD >= 0).sum(1)
        if not draft.is_chain:
            base_B1 = self.lengths_B[:, None]
            place_D = torch.arange(path_BD.shape[1], device=path_BD.device)
            # Padding copies a slot onto itself.
            source_BD = base_B1 + torch.where(path_BD >= 0, path_BD, place_D)
            for layer in self.layers:
                layer.buffer.move(source_BD, base_B1 + place_D)
        self.lengths_B = self.lengths_B + kept_B

    def rollback(self, lengths_B: Tensor) -> None:
        """Forget every token from `lengths_B` on (lengths only ever shrink here)."""
        assert bool((lengths_B <= self.lengths_B).all())
        self.lengths_B = lengths_B.clone()

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows `rows` (finished rows leave)."""
        self.lengths_B = self.lengths_B[rows]
        self.slots_BN = self.slots_BN[rows]
        for layer in self.layers:
            layer.buffer.select(rows)


def build_mask(lengths_B: Tensor, ancestors_BNN: Tensor, depth_BN: Tensor, visible: int, window: int | None) -> Tensor:
    """Return bool [B, 1, N, S]: node i sees the committed slots and its ancestors, within `window` positions.

    Windows count positions (length + depth), not slots, so that trees and chains see the same past.
    """
    rows, nodes = depth_BN.shape
    slot_S = torch.arange(visible, device=lengths_B.device)
    relative_BS = slot_S - lengths_B[:, None]
    committed_BS = relative_BS < 0
    node_BS = relative_BS.clamp(0, nodes - 1)
    in_tree_BS = (relative_BS >= 0) & (relative_BS < nodes)
    ancestor_BNS = ancestors_BNN.gather(2, node_BS[:, None].expand(rows, nodes, visible))
    mask_BNS = committed_BS[:, None] | (ancestor_BNS & in_tree_BS[:, None])
    if window is not None:
        key_position_BS = torch.where(committed_BS, slot_S, lengths_B[:, None] + depth_BN.gather(1, node_BS))
        query_position_BN = lengths_B[:, None] + depth_BN
        mask_BNS &= key_position_BS[:, None] > query_position_BN[:, :, None] - window
    return mask_BNS[:, None]


def attention_masks(
    config: PretrainedConfig, lengths_B: Tensor, draft: Draft, visible: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return the mask in the form the model takes: one tensor, or one per layer type of `config.layer_types`."""

    def build(window: int | None) -> Tensor:
        mask = build_mask(lengths_B, draft.ancestors_BNN, draft.depth_BN, visible, window)
        if config._attn_implementation == "eager":
            # Eager attention adds the mask to the scores.
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return mask

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return build(window)
    return {kind: build(window if kind == "sliding_attention" else None) for kind in dict.fromkeys(layer_types)}
