"""One pass of the target over the nodes of a draft, through the cache.

Shapes: B rows, N nodes, A aux layers, D hidden.
"""

from torch import Tensor

from draftsmith.eval.cache import KVCache, attention_masks
from draftsmith.eval.draft import Draft
from draftsmith.heads.target import Target, TargetOutput


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
