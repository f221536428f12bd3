"""Draft with a separate, smaller language model, which has a KV cache of its own; nothing is trained.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). Both models read the same ids, so
they must have the same tokens (draftsmith.target.tokens).

Shapes: B rows, b admitted rows, n tokens read at once, L tokens of a text, R supervised rows, K drafted tokens,
D hidden, W ids of the distribution, V target vocab.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache, with_room
from draftsmith.decoder.captured import make_draft
from draftsmith.decoder.draft import DecodeState, Draft, LengthRule, Prompts, numbers
from draftsmith.decoder.graphs import Graphs
from draftsmith.decoder.growth import chain_token_by_token
from draftsmith.decoder.slots import run_draft
from draftsmith.errors import UserError
from draftsmith.target.target import Target


class DraftModel:
    """Drafts chains of `num_speculative_tokens` tokens, sampled under the target's sampling settings.

    vocab_size: V of the target. Where the two models pad their vocabularies differently, tokens are drawn from the ids
    that both have. greedy_drafts: draft the argmax at every temperature. rule: drafts end where it says.
    """

    name = "draft model"
    layer_ids: tuple[int, ...] = ()
    cache: Any = None
    """Keys and values of the batch at work, from `start` on."""
    _graphs: Graphs
    _length = 0
    """Tokens of the last draft, where no rule ended it: the last of so many is not in the cache."""

    def __init__(
        self,
        model: Target,
        num_speculative_tokens: int,
        vocab_size: int,
        *,
        greedy_drafts: bool = False,
        rule: LengthRule | None = None,
    ) -> None:
        assert num_speculative_tokens >= 1
        self.model = model
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1
        self.greedy_drafts, self.rule = greedy_drafts, rule
        self.width = min(vocab_size, model.vocab_size)
        self.vocab_W = draft_vocab(model, vocab_size)

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the cache. Raises UserError where the texts do not fit the draft model's context."""
        capacity += self.num_speculative_tokens
        check_context(f"draft model {self.model.path}", self.model.context_length, capacity)
        self._length = 0
        if self.cache is None or not self.cache.restarted(rows, capacity):
            self.cache, model = None, self.model
            with torch.inference_mode(False):  # so that a graph may write to it
                self.cache = KVCache.for_target(model, rows, with_room(capacity, rows, model.device))
            most, captures = rows * self.max_nodes, model.plain_pass is not None and self.rule is None
            self._graphs = Graphs(model.device, model.dtype, "drafts", most, captures=captures, exact=False)

    def admit(self, prompts: Prompts) -> None:
        """Read the prompts; their first emitted tokens are read with the rows' next proposal."""
        self.cache.rollback(torch.zeros_like(prompts.length_b), prompts.rows_b)
        self._pass(prompts.ids_bL, 0, prompts.rows_b)
        self.cache.append(prompts.length_b, prompts.rows_b)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self.cache.select(rows)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the tokens that the cache lacks, then draft at most K tokens, and no more than a row may still emit."""
        length, ahead = min(self.num_speculative_tokens, state.tokens_left), self.num_speculative_tokens
        # The whole last draft was accepted somewhere, or nowhere: there are as many new tokens as the row with the most has.
        most = 2 if state.new_tokens.tokens_Bn.shape[1] > self._length > 0 else 1
        self._length = length
        make = partial(self._make, length=length, most=most)
        return make_draft(self._graphs, make, state, self.cache, length, ahead, most)

    def _make(self, state: DecodeState, length: int, most: int) -> Draft:
        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            if k == 0:
                last_BD = self._read(state, most)
            else:
                last_BD = self._pass(tokens_B[:, None], state.longest + k)[:, 0]
                self.cache.append(1)
            return self.model.head.logits(last_BD)[:, : self.width]

        return chain_token_by_token(
            state, length, next_logits, greedy=self.greedy_drafts, vocab_W=self.vocab_W, rule=self.rule
        )

    def _read(self, state: DecodeState, most: int) -> Tensor:
        """Read the tokens up to the root; return the state [B, D] at the root.

        Accepted draft tokens are in the cache already, except for the last one of a draft that was accepted whole;
        rejected ones are rolled back. So every row lacks the root and at most one token before it. most: what any row lacks.
        """
        cache, new_tokens = self.cache, state.new_tokens
        # A finished row may be longer than the capacity; its drafts are ignored.
        length_B = state.length_B.clamp(max=cache.capacity - self.num_speculative_tokens - 1)
        cache.rollback(length_B)
        lacks_B = length_B + 1 - cache.lengths_B
        step_n = numbers(0, most, lacks_B.device)
        # New tokens end with the root.
        index_Bn = ((new_tokens.count_B - lacks_B)[:, None] + step_n).clamp(0, new_tokens.tokens_Bn.shape[1] - 1)
        states_BnD = self._pass(new_tokens.tokens_Bn.gather(1, index_Bn), state.longest + 1 - most)
        cache.append(lacks_B)
        return states_BnD[numbers(0, len(lacks_B), lacks_B.device), lacks_B - 1]

    def _pass(self, tokens_Bn: Tensor, longest: int, rows_b: Tensor | None = None) -> Tensor:
        """Run the draft model over tokens behind its committed ones; return their states [B, n, D]."""
        known_Bn = readable(self.model, tokens_Bn)
        draft = Draft.chain(known_Bn[:, 0], known_Bn[:, 1:])
        return run_draft(self.model, self.cache, draft, rows_b=rows_b, longest=longest).last


def draft_vocab(model: Target, vocab_size: int) -> Tensor | None:
    """Return [W] the ids that a draft model and a target of `vocab_size` both have, None for all of the target's."""
    return None if model.vocab_size >= vocab_size else torch.arange(model.vocab_size, device=model.device)


def readable(model: Target, tokens: Tensor) -> Tensor:
    """Return token ids that a draft model can read: ids beyond its vocabulary, which the target has for padding, become
    its last one. That can only cost acceptance, since any distribution may be drafted from."""
    return tokens.clamp(max=model.vocab_size - 1)


def check_context(name: str, context_length: int, need: int) -> None:
    """Raise UserError where `need` tokens are more than the context of the drafter `name`."""
    if need > context_length:
        raise UserError(
            f"The {name} reads at most {context_length} tokens, but the longest text with its draft has {need}: take one "
            "with a longer context, shorten the prompts or lower max_new_tokens."
        )
