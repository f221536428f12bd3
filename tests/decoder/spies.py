"""Drafters that check themselves keep the texts of their rows on their own; what all drafters are tested for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.answers import Generation, Request, Tally, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Drafter, Prompts, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.target.target import Target
from tests.models import tiny_model


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


def looping_target() -> Target:
    """Small weights make greedy texts run in loops, where drafters that look at the text find something."""
    return Target(tiny_model("llama", initializer_range=0.06), path="tiny", fingerprint="0")


def repeating_requests(count: int, new_tokens: int = 24) -> list[Request]:
    """Prompts of different lengths, each a text twice."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(5, 150, (n,), generator=generator).tolist() * 2 for n in (5, 9, 4, 12, 3, 7)[:count]]
    return [Request.seeded(f"p{i}", "ab"[i % 2], ids, new_tokens, 0) for i, ids in enumerate(found)]


def decode_together_and_alone(
    target: Target, spy: Drafter, make: Callable[[], Drafter], asked: Sequence[Request], sampling: Sampling, rows: int
) -> list[Generation]:
    """Decode in a batch that changes; texts and rounds are those of each request alone, greedy texts the target's."""
    together = decode_batch(target, spy, asked, sampling, rows=rows).generations
    for request, found in zip(asked, together, strict=True):
        (alone,) = decode_batch(target, make(), [request], sampling).generations
        assert (alone.output_ids, alone.rounds) == (found.output_ids, found.rounds)
        if sampling.greedy:
            (plain,) = decode_batch(target, TargetAlone(), [request], sampling).generations
            assert plain.output_ids == found.output_ids
    return together


def check_simulated(found: Sequence[Generation], tallies: Sequence[Sequence[Tally]], length: int) -> Tally:
    """Compare what was proposed and accepted with its simulation; return the sum of what was decoded."""
    decoded = total([tally_generation(g, length) for g in found], length)
    simulated = total([t[length - 1] for t in tallies], length)
    assert (decoded.tokens, decoded.rounds, decoded.drafted) == (simulated.tokens, simulated.rounds, simulated.drafted)
    assert decoded.accepted_K.tolist() == simulated.accepted_K.tolist()
    assert decoded.reached_K.tolist() == simulated.reached_K.tolist()
    return decoded
