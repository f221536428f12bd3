"""Drive a drafter over a text that is known already: what it would draft in every round, at temperature 0, without a pass of the target.

The target's states of all tokens come from one pass, and only the drafter runs; so an engine that is wrong in twenty ways costs little to
foretell. `Engine` is a drafter with a head that can be spoiled; unspoiled it gives what our decoder gives.

Shapes: n new tokens, F width of the aux streams, D hidden of the target, T tokens of a text, K drafted tokens, W draft vocab.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, Prompts
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.engines.agreement import EngineRound
from draftsmith.heads.base import DraftHead
from draftsmith.heads.layers.from_target import pass_with_norm
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target


@dataclass(frozen=True)
class Text:
    """A prompt, the target's greedy continuation past its end, and the target's states of all of it.

    prompt: how many of the ids [T] are the prompt's. end: how many the answer has. streams: what enters each layer, [T, D], and behind the
    last one's what enters the final norm. last: [T, D] the states behind that norm.
    """

    ids: Tensor
    prompt: int
    end: int
    streams: tuple[Tensor, ...]
    last: Tensor


@torch.no_grad()
def read_text(target: Target, prompt: Sequence[int], answer: Sequence[int], end: int) -> Text:
    """Return a text with the states of one pass over it."""
    ids = torch.tensor([*prompt, *answer], device=target.device)
    output, given = pass_with_norm(target, ids[None], tuple(range(target.num_layers)))
    before = next(iter(given), output.last)
    streams = output.aux[0].split(target.hidden_size, -1)
    return Text(ids, len(prompt), end, (*streams, before[0]), output.last[0])


@dataclass
class Engine:
    """A head and how it is served; faults change it before `start`.

    K: num_speculative_tokens. layer_ids: the streams that it is fed, counted as `Text.streams`. last: which states it takes for the last
    ones. read: changes what it reads of new tokens. root: changes the state of a round, given the draft before. started: changes the
    drafter once its cache is there. drafted: follows every draft. room: times the usual slots of its cache. other: reads the prompt before
    in place of its own. make: (head, K) -> drafter.
    """

    head: Any
    K: int
    layer_ids: tuple[int, ...]
    make: Callable[..., Any]
    last: Callable[[Text], Tensor] = lambda text: text.last
    read: Callable[[NewTokens], NewTokens] = lambda new: new
    root: Callable[[DecodeState, Draft | None], DecodeState] = lambda state, before: state
    started: Callable[[Any], None] = lambda drafter: None
    drafted: Callable[[Any, Draft], None] = lambda drafter, draft: None
    room: int = 1
    other: bool = False
    _drafter: Any = field(default=None, init=False)
    _before: Draft | None = field(default=None, init=False)
    _prompts: Prompts | None = field(default=None, init=False)
    name: str = "spoiled"

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens of a draft."""
        return self.K

    @property
    def max_nodes(self) -> int:
        """The same, and the root."""
        return self.K + 1

    @classmethod
    def of(cls, head: DraftHead, tokens: int) -> "Engine":
        """Return a right one, whose head is a copy that shares all weights."""
        shared = {id(x): x for x in (*head.parameters(), *head.buffers())}
        shared |= {id(x): x for x in getattr(head, "_target_head", ()) if x is not None}
        return cls(copy.deepcopy(head, shared), tokens, head.reads.layer_ids, find_method(head.method).make_drafter)

    def start(self, rows: int, capacity: int) -> None:
        """Begin a text; see `Drafter`."""
        if self._drafter is None:
            self._drafter = self.make(self.head, self.K)
        self._before = None
        self._drafter.start(rows, capacity * self.room)
        self.started(self._drafter)

    def admit(self, prompts: Prompts) -> None:
        """Read a prompt; see `Drafter`."""
        own = replace(prompts, new_tokens=self.read(prompts.new_tokens))
        other, self._prompts = self._prompts, own
        if len(own.rows_b) > 1:  # the row above
            back = torch.arange(len(own.rows_b), device=own.rows_b.device).sub(1).clamp(min=0)
            ids, lengths, new = own.ids_bL[back], own.length_b[back], own.new_tokens.select(back)
            other = replace(own, ids_bL=ids, length_b=lengths, new_tokens=new)
        self._drafter.admit(_in_place_of(own, other) if self.other and other is not None else own)

    def propose(self, state: DecodeState) -> Draft:
        """Draft; see `Drafter`."""
        given = self.root(replace(state, new_tokens=self.read(state.new_tokens)), self._before)
        draft: Draft = self._drafter.propose(given)
        draft = replace(draft, tokens_BN=torch.cat([state.root_B[:, None], draft.tokens_BN[:, 1:]], 1))
        self.drafted(self._drafter, draft)
        self._before = draft
        return draft

    def select(self, rows: Tensor) -> None:
        """Keep rows; see `Drafter`."""
        self._drafter.select(rows)


def _in_place_of(own: Prompts, other: Prompts) -> Prompts:
    """Return the tokens and states of other prompts, over again up to the lengths of these."""
    place_bL = torch.arange(own.ids_bL.shape[1], device=own.ids_bL.device) % other.length_b[:, None]
    new = other.new_tokens
    row_b1 = torch.arange(len(place_bL), device=place_bL.device)[:, None]
    tokens, aux, last = (x[row_b1, place_bL] for x in (new.tokens_Bn, new.aux_BnF, new.last_BnD))
    moved = NewTokens(tokens, aux, last, own.length_b)
    return replace(own, ids_bL=other.ids_bL[row_b1, place_bL], new_tokens=moved)


class _Argmaxes(TorchFunctionMode):
    """Keeps what tokens are chosen among while a drafter drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "argmax" and args[0].is_floating_point():
            self.logits.append(args[0].detach().float())
        return func(*args, **(kwargs or {}))

    def of_tokens(self, tokens: int) -> Tensor | None:
        """Return the logits [B, K, W] of so many tokens, None where something else was chosen too."""
        if len(self.logits) == 1 and self.logits[0].dim() == 3 and self.logits[0].shape[1] == tokens:
            return self.logits[0]
        chain = len(self.logits) == tokens and all(x.dim() == 2 for x in self.logits)
        return torch.stack(self.logits, 1) if chain else None


@dataclass(frozen=True)
class Replayed:
    """rounds: of a text, the last one as if the text went on. logits: of each round [K, W] what its tokens were chosen among, None where that
    was not seen or not asked for."""

    rounds: tuple[EngineRound, ...]
    logits: tuple[Tensor | None, ...]


@torch.no_grad()
def replay(engine: Engine, texts: Sequence[Text], *, watched: bool = False) -> list[Replayed]:
    """Let an engine draft along texts, a row each, round behind round until all answers have ended. watched: keep the logits.

    Raises UserError for a text that is longer than what it can read.
    """
    streams = [_streams(engine, text) for text in texts]
    capacity, device = max(len(text.ids) for text in texts), texts[0].ids.device
    row_B = torch.arange(len(texts), device=device)
    engine.start(len(texts), capacity)
    length_B = torch.tensor([text.prompt for text in texts], device=device)
    ids_BL = pad_sequence([text.ids[: text.prompt] for text in texts], True)
    first = _new_tokens(texts, streams, [(0, text.prompt) for text in texts])
    engine.admit(Prompts(row_B, ids_BL, length_B, first))
    known, spans = [1] * len(texts), [(text.prompt - 1, text.prompt) for text in texts]
    rounds: list[list[EngineRound]] = [[] for _ in texts]
    logits: list[list[Tensor | None]] = [[] for _ in texts]
    while any(n < text.end for n, text in zip(known, texts, strict=True)):
        lengths = tuple(after for _, after in spans)
        root_B = torch.stack([text.ids[at] for text, at in zip(texts, lengths, strict=True)])
        at_B, room = torch.tensor(lengths, device=device), (capacity,) * len(texts)
        new = _new_tokens(texts, streams, spans)
        state = DecodeState(root_B, at_B, at_B * 0 + capacity, row_B, new, Sampling(0.0), lengths, room)
        with _Argmaxes() if watched else nullcontext() as chosen:
            draft = engine.propose(state)
        drafted = draft.tokens_BN[:, 1:].tolist()
        seen = None if chosen is None else chosen.of_tokens(len(drafted[0]))
        for row, text in enumerate(texts):
            if known[row] >= text.end:
                continue  # the row drafts the same again, which nobody reads
            length = lengths[row]
            tokens = drafted[row][: int(draft.nodes_B[row]) - 1]
            pairs = zip(tokens, text.ids[length + 1 :].tolist(), strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
            rounds[row].append(EngineRound(tuple(tokens), accepted))
            logits[row].append(None if seen is None else seen[row, : len(tokens)])
            spans[row] = (length, length + accepted + 1)
            known[row] += accepted + 1
    return [Replayed(tuple(r), tuple(x)) for r, x in zip(rounds, logits, strict=True)]


def _streams(engine: Engine, text: Text) -> tuple[Tensor, Tensor]:
    """Return the aux streams [T, F] and last states [T, D] that an engine is fed."""
    none = text.last[:, :0]
    return torch.cat([none, *(text.streams[k] for k in engine.layer_ids)], -1), engine.last(text)


def _new_tokens(
    texts: Sequence[Text], streams: Sequence[tuple[Tensor, Tensor]], spans: Sequence[tuple[int, int]]
) -> NewTokens:
    """Return the tokens first + 1 .. after of each text, with the states of those before them."""
    count = torch.tensor([after - first for first, after in spans], device=texts[0].ids.device)
    parts = zip(texts, streams, spans, strict=True)
    rows = [(text.ids[a + 1 : b + 1], aux[a:b], last[a:b]) for text, (aux, last), (a, b) in parts]
    tokens, aux, last = (pad_sequence(list(column), True) for column in zip(*rows, strict=True))
    return NewTokens(tokens, aux, last, count)
