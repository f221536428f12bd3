"""One pass of the target over a draft; on a GPU its attention to cached keys whose number the device alone knows: every length has the
same operations.

Chains and single tokens go to a flash kernel, which is told how many keys each row has: no mask, no copy of keys for the query heads
that share them. It takes half precision and no trees. These, and float32, take a mask over the keys up to a multiple of 256, with the
queries of the heads that share keys as rows of one head.

Shapes: B rows, b some of these rows, N nodes, N heads of queries and G of keys in `attend` (n nodes there), P = heads / G, D head size,
S slots. In `run_draft`: A aux layers, H target hidden.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decoder.cache import BUCKET, KVCache, attention_masks, layer_shapes, place_mask
from draftsmith.decoder.draft import Draft
from draftsmith.progress import say
from draftsmith.target.target import Target, TargetOutput

_flash: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
_IN_ORDER = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
_OPTIONS = {"scale", "window_size_left", "window_size_right", "seqused_k"}


def visible_slots(cache: KVCache, used: int) -> int:
    """Return how many slots a mask covers where `used` ones are in use."""
    return min(cache.capacity, -(-used // BUCKET) * BUCKET)


def is_chain(target: Target, draft: Draft) -> bool:
    """Return whether a draft goes to the flash kernel."""
    shape = layer_shapes(target)[0]
    return bool(draft.linear) and shape is not None and reads_lengths(target.device, target.dtype, shape.keys.dim)


class Slots:
    """The slots behind the cached tokens that a pass over N nodes writes, and those that each node sees.

    lengths_B: cached tokens of each row, on the device. tree: depth_BN and ancestors_BNN of `Draft`, None for chains that
    `reads_lengths` holds for. visible: see `visible_slots`.
    """

    def __init__(
        self, kv: KVCache, config: Any, lengths_B: Tensor, nodes: int, visible: int, tree: tuple[Tensor, ...] | None
    ) -> None:
        self._kv, self._config, self._visible = kv, config, visible
        rows, device = len(lengths_B), lengths_B.device
        # Kept here: a graph reads their memory.
        self._row_B1 = torch.arange(rows, device=device)[:, None]
        self._slot_BN = lengths_B[:, None] + torch.arange(nodes, device=device)
        self._masks: dict[int | None, Tensor] = {}
        self._cached_B, self._tree, self._nodes = lengths_B, tree, nodes
        if tree is None:
            self._used_B = (lengths_B + nodes).int()
            starts = torch.arange(rows + 1, device=device, dtype=torch.int32)
            self._starts_q, self._starts_k = starts * nodes, starts * kv.capacity

    def attend(self, number: int, kind: str | None, attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write a layer's keys and values [B, n, G, D]; return what its queries [B, n, N, D] see, [B * n, N * D]."""
        indices = self._kv.layers[number].indices
        keys_BShD, values_BShD = (self._kv.buffers[shape][place].transpose(1, 2) for shape, place in indices)
        keys_BShD[self._row_B1, self._slot_BN] = k
        values_BShD[self._row_B1, self._slot_BN] = v
        window = getattr(self._config, "sliding_window", None)
        window = window if kind in (None, "sliding_attention") else None
        if self._tree is None:
            out = self._chain(q, keys_BShD, values_BShD, attention.scaling, window)
        else:
            out = self._under_mask(q, keys_BShD, values_BShD, attention.scaling, window)
        return out.reshape(q.shape[0] * q.shape[1], -1)

    def _chain(self, q: Tensor, keys_BShD: Tensor, values_BShD: Tensor, scale: float, window: int | None) -> Tensor:
        """Each node sees the keys up to its own: causal from the last key backwards, where there are more keys than queries."""
        return _flash_of(
            q.flatten(0, 1), keys_BShD.flatten(0, 1), values_BShD.flatten(0, 1), self._starts_q, self._starts_k, self._used_B,
            (self._nodes, self._kv.capacity), scale, window,
        )  # fmt: skip

    def _under_mask(
        self, q: Tensor, keys_BShD: Tensor, values_BShD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        B, n, heads, D = q.shape
        G = keys_BShD.shape[2]
        keys, values = (x.transpose(1, 2)[:, :, : self._visible] for x in (keys_BShD, values_BShD))
        folded = q.view(B, n, G, heads // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, -1, D)
        # Added to the scores of the P * n queries of a head of keys: the same in every layer of a kind.
        if window not in self._masks:
            assert self._tree is not None
            depth_BN, ancestors_BNN = self._tree
            sees = place_mask(self._cached_B, ancestors_BNN, self._visible, depth_BN, window)
            added = torch.zeros(sees.shape, dtype=q.dtype, device=sees.device)
            added = added.masked_fill(~sees, torch.finfo(q.dtype).min)
            self._masks[window] = added.expand(-1, heads // G, -1, -1).reshape(len(added), 1, -1, self._visible)
        out = F.scaled_dot_product_attention(folded, keys, values, self._masks[window], scale=scale)
        return out.view(B, G, heads // G, n, D).permute(0, 3, 1, 2, 4)


def _flash_of(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, used_B: Tensor, most: tuple[int, int], scale: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Return the flash kernel's output [B * n, N, D] of queries [B * n, N, D] over the first used_B keys of B rows [B * S, G, D]."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = _flash(q, k, v, starts_q, starts_k, *most, 0.0, True, False, scale=scale, seqused_k=used_B, **sides)[
        0
    ]
    return out


@cache
def reads_lengths(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a GPU's flash kernel takes such queries and as many keys as it is told; says why not where it should."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256 or _flash is None:
        return False
    if torch.cuda.get_device_capability(device)[0] < 8 or not torch.backends.cuda.is_flash_attention_available():
        return False
    arguments = _flash.default._schema.arguments
    known = [a.name for a in arguments if not a.kwarg_only] == _IN_ORDER.split()
    if not known or not {a.name for a in arguments if a.kwarg_only} >= _OPTIONS:
        return False
    # The operation is private to torch: tried before it is relied on.
    try:
        cases = [(nodes, window) for nodes in (1, 3) for window in (None, 4)]
        wrong = next((w for nodes, window in cases if (w := _flash_error(device, dtype, head_dim, nodes, window))), "")
    except RuntimeError as error:
        wrong = str(error).splitlines()[0]
    if wrong:
        say(
            f"warning: torch's flash attention does not read the lengths of cached keys here ({wrong}): decoding takes masks, which is slower."
        )
    return not wrong


def _flash_error(device: torch.device, dtype: torch.dtype, head_dim: int, nodes: int, window: int | None) -> str:
    """Return what is wrong with a small call, "" for nothing: two rows of 5 and 9 keys of 12 slots, with so many queries each."""
    generator, used, slots = torch.Generator().manual_seed(0), (5, 9), 12
    q, k, v = (
        torch.randn(2, n, heads, head_dim, generator=generator, device="cpu").to(device, dtype)
        for n, heads in ((nodes, 4), (slots, 2), (slots, 2))
    )
    starts, used_B = (
        torch.arange(3, device=device, dtype=torch.int32),
        torch.tensor(used, device=device, dtype=torch.int32),
    )
    out = _flash_of(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts * nodes, starts * slots, used_B, (nodes, slots), head_dim**-0.5, window
    )  # fmt: skip
    for row, count in enumerate(used):
        seen = torch.ones(nodes, count, dtype=torch.bool, device=device).tril(count - nodes)
        seen = seen if window is None else seen.triu(count - nodes - window + 1)
        keys, values = (x[row, :count].float().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = (q[row].float().transpose(0, 1) @ keys.transpose(1, 2)) * head_dim**-0.5
        expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        if not bool((out[row * nodes : (row + 1) * nodes].float() - expected).abs().max() < 0.05):
            return "its numbers are others"
    return ""


def run_draft(
    target: Target,
    cache: KVCache,
    draft: Draft,
    layer_ids: tuple[int, ...] = (),
    rows_b: Tensor | None = None,
    *,
    longest: int,
) -> TargetOutput:
    """Run the target over the nodes of a draft: aux [B, N, A*H] of `layer_ids` and last [B, N, H] at every node.

    Keys and values are written behind the cached ones; `cache.commit` or `cache.append` then decides which stay.
    rows_b: the rows of the cache that the draft's rows are, None for all. longest: see `KVCache.stage`.
    """
    at = cache.stage(draft.tokens_BN.shape[1], longest, rows_b)
    # Chains in empty rows are read as any text: a mask of all pairs of a prompt's tokens would be larger than its states.
    plain = longest == 0 and draft.linear
    if not plain and rows_b is None and target.device.type == "cuda" and target.plain_pass is not None:
        tree = None if is_chain(target, draft) else (draft.depth_BN, draft.ancestors_BNN)
        visible = visible_slots(cache, at.visible)
        slots = Slots(cache, target.config, at.lengths_B, at.count, visible, tree)
        return target.attend_by(slots.attend, draft.tokens_BN, layer_ids, at.lengths_B[:, None] + draft.depth_BN)
    masks = None if plain else attention_masks(target.config, at.lengths_B, draft, at.visible, target.dtype)
    return target.forward(
        draft.tokens_BN,
        layer_ids=layer_ids,
        attention_mask=masks,
        position_ids=at.lengths_B[:, None] + draft.depth_BN,
        past_key_values=cache,
    )
