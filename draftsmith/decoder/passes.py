"""One pass of the target over a draft.

Shapes: B rows, b some of these rows, N nodes, A aux layers, H target hidden.
"""

from torch import Tensor

from draftsmith.decoder.cache import KVCache, attention_masks
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.slots import Slots, Tree, is_chain, visible_slots
from draftsmith.target.target import Target, TargetOutput


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
        tree = None if is_chain(target, draft) else Tree(draft.ancestors_BNN, draft.depth_BN)
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
