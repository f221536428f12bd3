"""A drafter of known acceptance, for tests and benchmarks: it proposes the target's own next tokens and spoils some.

So the decoder can be measured apart from the quality of a head.

Shapes: B rows, L tokens of a text, K drafted tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, Prompts
from draftsmith.decoder.sampling import DRAFT
from draftsmith.errors import UserError


class KnownAcceptance:
    """Drafts chains of which each token is, with probability `alpha`, the next one of a known greedy answer.

    answers: the target's greedy output ids by prompt ids. vocab_size: of the target; a spoiled token is the next id.
    Which tokens are spoiled depends on a row's noise key and its length only, not on the batch. Away from the ends of
    the answers the expected tau is (1 - alpha^(K+1)) / (1 - alpha).
    """

    name = "known acceptance"
    layer_ids: tuple[int, ...] = ()
    _texts_BL: Tensor
    _length_B: Tensor

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        alpha: float,
        num_speculative_tokens: int,
        vocab_size: int,
    ) -> None:
        assert 0 <= alpha <= 1
        assert vocab_size >= 2
        self.answers, self.alpha, self.vocab_size = answers, alpha, vocab_size
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the texts, with padding that may be read past their ends."""
        self._texts_BL = torch.zeros(rows, capacity + self.max_nodes, dtype=torch.long)
        self._length_B = torch.zeros(rows, dtype=torch.long)

    def admit(self, prompts: Prompts) -> None:
        """Look up the prompts' answers. Raises UserError for a prompt without one."""
        device = prompts.ids_bL.device
        self._texts_BL, self._length_B = self._texts_BL.to(device), self._length_B.to(device)
        pairs = zip(prompts.ids_bL.tolist(), prompts.length_b.tolist(), strict=True)
        for row, (ids, length) in zip(prompts.rows_b.tolist(), pairs, strict=True):
            prompt = tuple(ids[:length])
            if prompt not in self.answers:
                raise UserError("A prompt has no known answer to draft from: decode it with the target alone first.")
            text = [*prompt, *self.answers[prompt]][: self._texts_BL.shape[1]]
            self._texts_BL[row, : len(text)] = torch.tensor(text, device=device)
            self._length_B[row] = len(text)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._texts_BL, self._length_B = self._texts_BL[rows], self._length_B[rows]

    def propose(self, state: DecodeState) -> Draft:
        """Propose the tokens of the known answers after the roots, some of them spoiled at random."""
        length = self.num_speculative_tokens
        position_BK = state.length_B[:, None] + torch.arange(1, length + 1, device=state.length_B.device)
        known_BK = self._texts_BL.gather(1, position_BK.clamp(max=self._texts_BL.shape[1] - 1))
        spoiled_BK = state.noise.draw(DRAFT, length) >= self.alpha
        drafted_BK = torch.where(spoiled_BK, (known_BK + 1) % self.vocab_size, known_BK)
        left_B = torch.minimum(self._length_B - 1 - state.length_B, state.limit_B)
        return Draft.chain(state.root_B, drafted_BK, left_B.clamp(0, length))
