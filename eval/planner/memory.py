"""The memory that decoding takes, by formula: weights, and the keys and values of target and drafter.

Symbols: B texts decoded together, L tokens of a text and its answer, N most tokens of a draft, S slots of the drafter's own cache
beyond a text; c and d bytes that a token takes in the cache of the target and of the drafter.
"""

from dataclasses import dataclass

from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.results.result import TargetInfo


@dataclass(frozen=True)
class Memory:
    """Bytes held while a batch is decoded. What passes work with (states, logits, masks) comes on top.

    target, drafter: weights; a head's are those that it was trained with, as what it shares with the target is the target's.
    target_cache: B * (L + 1) * c, a text and the token read next. draft_entries: B * N * c, which the target's cache holds for a
    draft. draft_cache: B * (L + S) * d.
    """

    target: int
    target_cache: int
    draft_entries: int
    drafter: int
    draft_cache: int

    @property
    def alone(self) -> int:
        """What the target takes without speculation."""
        return self.target + self.target_cache

    @property
    def drafted(self) -> int:
        """What both take together."""
        return self.alone + self.draft_entries + self.drafter + self.draft_cache


def memory_at(target: TargetInfo, draft: DraftInfo | None, batch: int, context: int) -> Memory | None:
    """Return the memory at a batch of texts that are `context` tokens long with their answers; None where a size was not recorded."""
    if draft is None or target.weight_bytes is None or target.cache_bytes is None:
        return None
    if draft.weight_bytes is None or draft.cache_bytes is None or draft.cache_slots is None:
        return None
    return Memory(
        target=target.weight_bytes,
        target_cache=batch * (context + 1) * target.cache_bytes,
        draft_entries=batch * draft.nodes * target.cache_bytes,
        drafter=draft.weight_bytes,
        draft_cache=batch * (context + draft.cache_slots) * draft.cache_bytes,
    )
