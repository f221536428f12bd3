"""What a drafter really proposes while it decodes, noted round by round, for the checks of heads/conformance.py.

Shapes: B batch rows, b admitted rows, k drafted tokens, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.eval.answers import Decoded, Request
from draftsmith.eval.decode import decode_batch
from draftsmith.eval.draft import DecodeState, Draft, Drafter, Prompts
from draftsmith.eval.sampling import Sampling
from draftsmith.heads.target import Target


@dataclass(frozen=True)
class Drafted:
    """A round of one answer: the text up to the root, the tokens drafted after it, and the laws [k, W] that they were
    drawn from over the target ids `vocab_W`; None where they were chosen deterministically, and where W is the target's
    vocabulary."""

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    laws_kW: Tensor | None
    vocab_W: Tensor | None

    @property
    def sample(self) -> Tokenized:
        """The text with the draft behind it, to be learned from the root on: its first supervised row is the round's."""
        ids = torch.tensor([*self.text, *self.tokens])
        return Tokenized(ids, torch.arange(len(ids)) >= len(self.text) - 1, "", "")


class Recorder:
    """A drafter that lets another one work and keeps what it proposes, per prompt."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.layer_ids, self.max_nodes = drafter.name, drafter.layer_ids, drafter.max_nodes
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.found: dict[tuple[int, ...], list[tuple[tuple[int, ...], Tensor | None, Tensor | None]]] = {}
        self._prompts: list[tuple[int, ...]] = []

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch."""
        self._prompts = [()] * rows
        self.drafter.start(rows, capacity)

    def admit(self, prompts: Prompts) -> None:
        """Note which prompts took which rows."""
        for row, ids, length in zip(prompts.rows_b.tolist(), prompts.ids_bL, prompts.length_b, strict=True):
            self._prompts[row] = tuple(ids[: int(length)].tolist())
        self.drafter.admit(prompts)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._prompts = [self._prompts[row] for row in rows.tolist()]
        self.drafter.select(rows)

    def propose(self, state: DecodeState) -> Draft:
        """Note the draft of every row."""
        draft = self.drafter.propose(state)
        if not draft.is_chain:
            raise AssertionError(f"Without a tree {self.name} drafts something else than a chain.")
        for row, prompt in enumerate(self._prompts):
            count = int(draft.count_B[row]) - 1
            laws = None if draft.laws_BMW is None else draft.laws_BMW[row, :count].float().cpu()
            tokens = tuple(draft.tokens_BN[row, 1 : 1 + count].tolist())
            self.found.setdefault(prompt, []).append((tokens, laws, draft.vocab_W))
        return draft


def record(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None = None
) -> tuple[Decoded, list[list[Drafted]]]:
    """Answer `requests`, whose prompts differ, with chains; return the answers and the rounds of each."""
    recorder = Recorder(drafter)
    decoded = decode_batch(target, recorder, requests, sampling, rows=rows)
    answers = []
    for generation in decoded.generations:
        prompt = generation.request.prompt_ids
        text = (*prompt, *generation.output_ids)
        # Rows that are finished go on for a while; what they draft then is not used.
        rounds = zip(generation.rounds, recorder.found.get(prompt, ()), strict=False)
        answers.append([Drafted(text[: len(prompt) + r.root + 1], *found) for r, found in rounds])
    return decoded, answers
