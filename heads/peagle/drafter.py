"""How P-EAGLE heads propose: one pass a round, over the fresh tokens and a mask row for each further token of the draft.

The mask rows stand right behind the last fresh row and see what is before them, as all rows do; their keys are overwritten
by the next round's fresh tokens. Shapes: B rows, n fresh rows, K drafted tokens, H hidden, F width of the aux streams.
"""

import torch
from torch import Tensor

from draftsmith.eval.decode.cache import WriteRange
from draftsmith.eval.decode.draft import DecodeState, Draft, chain_above, numbers
from draftsmith.eval.decode.trees import StaticTree
from draftsmith.heads.eagle.drafter import EagleDrafter
from draftsmith.heads.peagle.head import PEagleHead
from draftsmith.heads.static_drafts import draft_chain, draft_tree


class PEagleDrafter(EagleDrafter):
    """Drafts a chain, token k from the distribution of depth k, or a static tree of the most likely tokens of each depth, or (drawn)
    of tokens sampled from it without replacement. greedy_drafts: a chain of argmaxes at every temperature."""

    head: PEagleHead

    def __init__(
        self,
        head: PEagleHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        super().__init__(head, num_speculative_tokens, tree=tree, drawn=drawn, greedy_drafts=greedy_drafts)
        with torch.no_grad():
            self._mask_hidden_1H = head.mask_inputs()[1]

    def _sizes(self) -> tuple[int, int]:
        """Nodes of a draft, the root included; and rows behind the committed ones: mask rows, and as many of padding."""
        nodes = len(self.tree.choices) if isinstance(self.tree, StaticTree) else self.num_speculative_tokens
        return 1 + nodes, 2 * self.num_speculative_tokens

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the fresh tokens and the mask rows, then draft no deeper than any row may still emit."""
        depth = min(self.num_speculative_tokens, state.room)
        logits_BKW = self.head.logits(self._parallel(state, depth))
        if isinstance(self.tree, StaticTree):
            return draft_tree(state, logits_BKW, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKW, self.head, greedy=self.greedy_drafts)

    def _parallel(self, state: DecodeState, depth: int) -> Tensor:
        """Return the outputs [B, K, H] of the last fresh row and of the mask rows behind it."""
        new_tokens, device = state.new_tokens, state.root_B.device
        rows, count = new_tokens.tokens_Bn.shape
        total, mask = count + depth - 1, self.head.options.mask_token_id
        assert mask is not None
        place_n = numbers(0, total, device)
        real_Bn = place_n < new_tokens.count_B[:, None]
        tokens_Bn = torch.nn.functional.pad(new_tokens.tokens_Bn, (0, depth - 1)).masked_fill(~real_Bn, mask)
        hidden_BnH = torch.nn.functional.pad(self.head.begin(new_tokens), (0, 0, 0, depth - 1))
        hidden_BnH = torch.where(real_Bn[..., None], hidden_BnH, self._mask_hidden_1H)
        base_B = state.length_B - new_tokens.count_B
        first = state.longest - count if rows == 1 else state.longest
        position_Bn, turn = self._positions(base_B, first, total)
        above_BnT = chain_above(total, device).expand(rows, -1, -1)
        at = WriteRange(base_B, total, first)
        out_BnH = self.forward(tokens_Bn, hidden_BnH, position_Bn, turn, at, above_BnT, range(total))
        last_B1 = (new_tokens.count_B - 1).clamp(min=0)[:, None]
        return out_BnH[numbers(0, rows, device)[:, None], last_B1 + numbers(0, depth, device)]
