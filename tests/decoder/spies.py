"""Drafters that check themselves keep the texts of their rows on their own."""

from typing import Any

from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Prompts


class KnowsTexts:
    """Mixed into a drafter, in front of it: `known` holds each row's committed tokens."""

    known: list[list[int]]

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)  # type: ignore[misc]
        self.known = [[] for _ in range(rows)]

    def admit(self, prompts: Prompts) -> None:
        super().admit(prompts)  # type: ignore[misc]
        for place, row in enumerate(prompts.rows_b.tolist()):
            self.known[row] = prompts.ids_bL[place, : int(prompts.length_b[place])].tolist()

    def select(self, rows: Tensor) -> None:
        super().select(rows)  # type: ignore[misc]
        self.known = [self.known[row] for row in rows.tolist()]

    def remember(self, state: DecodeState) -> list[Any]:
        """Add the fresh tokens; return (row, its text) for every row that may still draft."""
        rows = []
        for row, known in enumerate(self.known):
            count = int(state.new_tokens.count_B[row])
            known += state.new_tokens.tokens_Bn[row, :count].tolist()
            if count and int(state.limit_B[row]) > 0:
                rows.append((row, known))
        return rows
