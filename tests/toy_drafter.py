"""A whole drafter as another package would bring it: a bigram table, row x the logits of what follows token x.

The package's entry points say `[draftsmith.methods]` and `bigram = "tests.toy_drafter:METHOD"`; nothing else is touched.
"""

from dataclasses import asdict, dataclass
from itertools import islice

import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft, StatelessDrafter
from draftsmith.decoder.growth import chain_token_by_token
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, Trains, iterate_supervised_rows, shift_left
from draftsmith.heads.registry import Method
from draftsmith.target.target import Target


@dataclass(frozen=True)
class BigramOptions:
    """The `head:` section of a recipe."""

    depth: int = 2
    """Steps that training sums over."""


class BigramHead(DraftHead):
    """table: [V, V]."""

    method = "bigram"

    def __init__(self, options: BigramOptions, vocab_size: int) -> None:
        super().__init__()
        self.options, self.trains = options, Trains(options.depth)
        self.table = torch.nn.Parameter(torch.zeros(vocab_size, vocab_size))

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        steps = []
        for k, mask_BL in enumerate(islice(iterate_supervised_rows(batch), num_steps)):
            rows = mask_BL.flatten().nonzero().flatten()
            steps.append(StepOutput(k, rows, self.table[shift_left(batch.ids, 1 + k, 0).flatten()[rows]]))
        return HeadOutput(tuple(steps))

    def describe(self) -> dict:
        return {"options": asdict(self.options)}


def build(options: BigramOptions, target: Target, draft_vocab: None) -> BigramHead:
    return BigramHead(options, target.vocab_size).to(target.device)


def load(spec: dict, target: Target, draft_vocab: None) -> BigramHead:
    return build(BigramOptions(**spec["options"]), target, draft_vocab)


class BigramDrafter(StatelessDrafter):
    """Looks each next token up under the one before it."""

    name = "bigram"

    def __init__(self, head: BigramHead, num_speculative_tokens: int) -> None:
        self.head, self.num_speculative_tokens = head.eval(), num_speculative_tokens
        self.max_nodes = 1 + num_speculative_tokens

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        length = min(self.num_speculative_tokens, state.tokens_left)
        return chain_token_by_token(state, length, lambda k, tokens_B: self.head.table[tokens_B])


METHOD = Method(__name__, options=":BigramOptions", drafter=":BigramDrafter", head="")
