"""How an EAGLE-3 head proposes a chain: the decode side of its training-time test.

Row t pairs token x_{t+1} with the target's streams at t. Before drafting, the rows of the newly committed
tokens are run with the target's true streams (they overwrite the keys that drafting left there); then the
last row drafts K tokens, each step adding its own key. Shapes: B rows, n fresh rows, K drafted tokens,
H hidden, W draft vocab, S slots.
"""

import torch
from torch import Tensor

from draftsmith.eval.cache import SlotBuffer
from draftsmith.eval.draft import DecodeState, Draft
from draftsmith.eval.noise import DRAFT, uniforms
from draftsmith.eval.sampling import draw, law
from draftsmith.heads.eagle3 import Eagle3Head


class Eagle3Drafter:
    """Drafts chains of `num_speculative_tokens` tokens, sampled under the target's sampling settings.

    greedy_drafts: draft the argmax at every temperature (as vLLM does by default); lossless too, but
    accepted less often above temperature 0.
    """

    name = "eagle3"

    def __init__(self, head: Eagle3Head, num_speculative_tokens: int, *, greedy_drafts: bool = False) -> None:
        self.head = head.eval()
        self.layer_ids = head.layer_ids
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1
        self.greedy_drafts = greedy_drafts
        self._buffer = SlotBuffer(0)

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch; keys are allocated at the first proposal."""
        self._buffer = SlotBuffer(capacity + self.num_speculative_tokens)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._buffer.select(rows)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the fresh tokens, then draft as many tokens as any row may still emit, at most K."""
        out_BH = self._read(state)
        length = min(self.num_speculative_tokens, max(1, int(state.limit_B.max())))
        greedy = self.greedy_drafts or state.sampling.greedy
        uniform_BK = None if greedy else uniforms(state.keys_B, state.length_B, DRAFT, length)
        tokens, laws = [], []
        for k in range(length):
            logits_BW = self.head.logits(out_BH)
            if uniform_BK is None:
                choice_B = logits_BW.argmax(-1)
            else:
                laws.append(law(logits_BW, state.sampling))
                choice_B = draw(laws[-1], uniform_BK[:, k])
            tokens.append(self.head.target_ids(choice_B))
            if k + 1 < length:
                # Row t = length - 1 goes on, at position t + k + 1, from its own output.
                position_B1 = state.length_B[:, None] + k
                hidden_B1H = self.head.feedback(out_BH)[:, None]
                out_BH = self._layer(tokens[-1][:, None], hidden_B1H, position_B1)[:, 0]
        return Draft.chain(
            state.root_B,
            torch.stack(tokens, 1),
            state.limit_B.clamp(0, length),
            torch.stack(laws, 1) if laws else None,
            self.head.draft_vocab if laws else None,
        )

    def _read(self, state: DecodeState) -> Tensor:
        """Run the rows of the fresh tokens; return the output [B, H] of each sequence's last row."""
        fresh = state.fresh
        rows, count = fresh.tokens_Bn.shape
        position_Bn = (state.length_B - fresh.count_B)[:, None] + torch.arange(count, device=fresh.tokens_Bn.device)
        out_BnH = self._layer(fresh.tokens_Bn, self.head.fuse(fresh.aux_BnF), position_Bn)
        last_B = (fresh.count_B - 1).clamp(min=0)
        return out_BnH[torch.arange(rows, device=last_B.device), last_B]

    def _layer(self, tokens_Bn: Tensor, hidden_BnH: Tensor, position_Bn: Tensor) -> Tensor:
        """One call of the head's layer; the key of position i sits in slot i."""
        visible = int(position_Bn.max()) + 1
        if position_Bn.numel() == 1:
            mask = None
        else:
            mask = (torch.arange(visible, device=position_Bn.device) <= position_Bn[..., None])[:, None]

        def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return self._buffer.write(keys, values, position_Bn, visible)

        return self.head.layer(tokens_Bn, hidden_BnH, position_Bn, update, mask)
