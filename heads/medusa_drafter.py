"""How Medusa's heads propose: all of them read the target's state at the last token, so there is nothing to run
between two drafted tokens and nothing to keep between two rounds.

Shapes: B rows, K drafted tokens (heads used), H target hidden, V target vocab.
"""

import torch
from torch import Tensor

from draftsmith.eval.draft import DecodeState, Draft, Prompts
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.medusa import MedusaHead
from draftsmith.heads.slot_drafts import draft_chain, draft_tree


class MedusaDrafter:
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head, or (drawn) of tokens sampled from it without replacement.

    num_speculative_tokens: heads used. tree: at most that deep. greedy_drafts: a chain of argmaxes at every
    temperature (as vLLM drafts).
    """

    name = "medusa"
    layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        head: MedusaHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        assert tree is not None or not drawn
        assert 1 <= num_speculative_tokens <= head.options.num_heads
        assert tree is None or tree.depth <= num_speculative_tokens
        self.head = head.eval()
        self.num_speculative_tokens = num_speculative_tokens
        self.tree, self.drawn = tree, drawn
        self.max_nodes = 1 + (num_speculative_tokens if tree is None else len(tree.choices))
        self.greedy_drafts = greedy_drafts

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: Prompts) -> None:
        """Nothing to read."""

    def select(self, rows: Tensor) -> None:
        """Nothing to keep."""

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Draft no deeper than any row may still emit."""
        depth = self.num_speculative_tokens if self.tree is None else self.tree.depth
        depth = min(depth, state.room)
        rows = torch.arange(len(state.root_B), device=state.root_B.device)
        last_BH = state.fresh.last_BnD[rows, (state.fresh.count_B - 1).clamp(min=0)]
        logits_BKV = torch.stack([self.head.logits(k, last_BH) for k in range(depth)], 1)
        if self.tree is not None:
            return draft_tree(state, logits_BKV, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKV, self.head, greedy=self.greedy_drafts)
