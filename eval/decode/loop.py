"""The speculative decoding loop: propose -> one target pass -> verify -> commit -> emit.

The target alone runs through the same loop with an empty draft, so a speedup compares like with like. Batches are
continuous: a row that has finished its answer takes the next prompt that waits.
Shapes: B rows, b rows that are admitted, N nodes, D depth of the accepted path, V target vocab.

Where a target's numbers stop being numbers: found by one plain pass over the text, when it is already too late.

Shapes: L tokens, H hidden.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decode.answers import Generation, Request, Round
from draftsmith.eval.decode.cache import KVCache, run_draft
from draftsmith.eval.decode.clock import Stopwatch
from draftsmith.eval.decode.draft import DecodeState, Draft, Drafter, NewTokens, Prompts
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.verify import Noise, NotFinite, Typical, Verdict, verify
from draftsmith.heads.target.target import Target, TargetOutput

_ENTERING = 8
"""Prompts wait until this part of the rows is free."""
_TOKENS_PER_PASS = 1 << 15
"""Most tokens of prompts, padding included, that are read together."""


class Loop:
    """The batch as it runs. places[b] is the answer that row b works on; a finished one keeps its row until a waiting
    prompt takes it or the batch shrinks, and commits nothing meanwhile."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        requests: Sequence[Request],
        sampling: Sampling,
        typical: Typical | None,
        rows: int,
        timed: bool = True,
    ) -> None:
        self.target, self.drafter, self.sampling, self.typical = target, drafter, sampling, typical
        self.answers = [Generation(request) for request in requests]
        self.waiting = deque(self.answers[rows:])
        self.places = self.answers[:rows]
        self.finished: list[Generation] = []
        capacity = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
        self.cache = KVCache.for_target(target, rows, capacity + drafter.max_nodes)
        drafter.start(rows, capacity)
        zeros_B = torch.zeros(rows, dtype=torch.long, device=target.device)
        nothing_B10 = torch.zeros(rows, 1, 0, device=target.device)
        new_tokens = NewTokens(zeros_B[:, None], nothing_B10, nothing_B10, zeros_B)
        self.state = DecodeState(zeros_B, zeros_B, zeros_B, zeros_B, new_tokens, sampling)
        # Which tokens a repetition penalty is for.
        self.seen_BV = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(rows, target.vocab_size, dtype=torch.bool, device=target.device)
        # Making room is no part of answering.
        self.watch = Stopwatch(target.device, wait=timed)
        self._admit(list(range(rows)))

    def fill(self) -> bool:
        """Give waiting prompts the free rows, or shrink the batch once a quarter of it is free (which copies the
        cache); return whether there is anything left to decode."""
        while free := [b for b, answer in enumerate(self.places) if answer.finish_reason]:
            if not self.waiting:
                return self._shrink(free)
            # In a large batch prompts enter a few at a time, since each pass that reads some holds up all other rows.
            if len(free) < min(len(self.places) // _ENTERING, len(self.waiting)):
                return True
            entering = free[: len(self.waiting)]
            for b in entering:
                self.places[b] = self.waiting.popleft()
            self._admit(entering)
        return True

    def take_finished(self) -> list[Generation]:
        """Return the answers that were finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def _shrink(self, free: list[int]) -> bool:
        alive = sorted(set(range(len(self.places))) - set(free))
        if alive and len(alive) <= 0.75 * len(self.places):
            keep = torch.tensor(alive, device=self.target.device)
            self.places = [self.places[b] for b in alive]
            self.cache.select(keep)
            self.drafter.select(keep)
            self.state = self.state.select(keep)
            self.seen_BV = None if self.seen_BV is None else self.seen_BV[keep]
            self.watch.lap("other")
        return bool(alive)

    def _admit(self, rows: list[int]) -> None:
        """Read the prompts of `rows`, as many in one pass as are no more than so many tokens, but at least one."""
        group: list[int] = []
        for b in rows:
            longest = max(len(self.places[a].request.prompt_ids) for a in (*group, b))
            if group and longest * (len(group) + 1) > _TOKENS_PER_PASS:
                self._read(group)
                group = []
            group.append(b)
        self._read(group)

    def _read(self, rows: list[int]) -> None:
        """Read the prompts of `rows` (padded at the end; padding slots are overwritten later), choose their first
        tokens and let the drafter read them too."""
        answers = [self.places[b] for b in rows]
        prompts = [answer.request.prompt_ids for answer in answers]
        device, longest = self.target.device, max(map(len, prompts))
        rows_b = torch.tensor(rows, device=device)
        ids_bL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        length_b = torch.tensor([len(p) for p in prompts], device=device)
        keys_b = torch.tensor([answer.request.key for answer in answers], device=device)
        self.cache.lengths_B = self.cache.lengths_B.index_fill(0, rows_b, 0)
        everyone = len(rows) == len(self.places)
        draft = Draft.chain(ids_bL[:, 0], ids_bL[:, 1:])
        output = run_draft(self.target, self.cache, draft, self.drafter.layer_ids, None if everyone else rows_b)
        self.cache.lengths_B = self.cache.lengths_B.index_copy(0, rows_b, length_b)
        last_b1 = (length_b - 1)[:, None]
        at_end = NewTokens(ids_bL[:, :1], _along(output.aux, last_b1, 1), _along(output.last, last_b1, 1), length_b)
        seen_bV = None if self.seen_BV is None else _seen(ids_bL, length_b, self.target.vocab_size)
        root_b = self._first(answers, at_end.last_BnD, Noise(keys_b, length_b - 1), seen_bV)
        following_bL = torch.cat([ids_bL[:, 1:], root_b[:, None]], 1).scatter(1, last_b1, root_b[:, None])
        for answer, token in zip(answers, root_b.tolist(), strict=True):
            answer.emit([token], self.target.eos_ids)
        self.finished += [answer for answer in answers if answer.finish_reason]
        self.watch.lap("ttft")
        for answer in answers:
            answer.ttft_s = self.watch.last
        self.drafter.admit(
            Prompts(rows_b, ids_bL, length_b, NewTokens(following_bL, output.aux, output.last, length_b))
        )
        self.watch.lap("draft")
        self._enter(rows_b, root_b, length_b, keys_b, at_end, seen_bV)

    def _first(self, answers: Sequence[Generation], last_b1D: Tensor, noise: Noise, seen_bV: Tensor | None) -> Tensor:
        """Choose the tokens after the prompts by the exact rule, also where drafts are accepted by a lossy one."""
        nothing = Draft.chain(noise.keys_B, noise.keys_B.new_zeros(len(answers), 0))
        logits_b1V = self.target.head.logits(last_b1D)
        try:
            return verify(nothing, logits_b1V, self.sampling, noise, seen_BV=seen_bV).next_B
        except NotFinite as found:
            prompt = answers[found.row].request
            raise explain(self.target, prompt.sample_id, list(prompt.prompt_ids)) from found

    def _enter(
        self,
        rows_b: Tensor,
        root_b: Tensor,
        length_b: Tensor,
        keys_b: Tensor,
        at_end: NewTokens,
        seen_bV: Tensor | None,
    ) -> None:
        """Put what is known of admitted rows into the state of the batch."""
        state, new_tokens = self.state, self.state.new_tokens
        pair = NewTokens(root_b[:, None], at_end.aux_BnF, at_end.last_BnD, torch.ones_like(length_b))
        if len(rows_b) < len(self.places):
            if new_tokens.last_BnD.shape[-1] != pair.last_BnD.shape[-1]:
                # The first prompts of a batch that reads them in several passes.
                kinds = (pair.tokens_Bn, pair.aux_BnF, pair.last_BnD)
                tokens, aux, last = (x.new_zeros(len(self.places), *x.shape[1:]) for x in kinds)
                new_tokens = NewTokens(tokens, aux, last, new_tokens.count_B)
            pair = NewTokens(
                _put(new_tokens.tokens_Bn, rows_b, pair.tokens_Bn),
                _put(new_tokens.aux_BnF, rows_b, pair.aux_BnF),
                _put(new_tokens.last_BnD, rows_b, pair.last_BnD),
                new_tokens.count_B.index_copy(0, rows_b, pair.count_B),
            )
        self.state = DecodeState(
            state.root_B.index_copy(0, rows_b, root_b),
            state.length_B.index_copy(0, rows_b, length_b),
            self._limits(),
            state.keys_B.index_copy(0, rows_b, keys_b),
            pair,
            self.sampling,
            *self._running(),
        )
        if self.seen_BV is not None and seen_bV is not None:
            self.seen_BV = self.seen_BV.index_copy(0, rows_b, seen_bV.scatter(1, root_b[:, None], True))
        self.watch.lap("other")

    def round(self) -> None:
        """Propose, run the target over the draft, verify, commit what was accepted, and emit it."""
        state, watch = self.state, self.watch
        draft = self.drafter.propose(state)
        watch.lap("draft")
        output = run_draft(self.target, self.cache, draft, self.drafter.layer_ids, longest=state.longest)
        logits_BNV = self.target.head.logits(output.last)
        watch.lap("verify")
        noise = Noise(state.keys_B, state.length_B)
        try:
            verdict = verify(draft, logits_BNV, self.sampling, noise, self.typical, self.seen_BV)
        except NotFinite as found:
            raise self._explain(found, draft) from found
        self._commit(draft, output, verdict)
        watch.lap("commit")

    def _commit(self, draft: Draft, output: TargetOutput, verdict: Verdict) -> None:
        """Keep the accepted paths in the cache, emit their tokens and pair them with the target's states.

        All that Python needs to know of the round comes from the device in one transfer.
        """
        path_BD = verdict.path_BD
        # The nodes of a chain are their own path.
        node_BD = None if draft.is_chain else path_BD.clamp(min=0)
        after_BN = F.pad(draft.tokens_BN[:, 1:], (0, 1))
        tokens_BD = after_BN if node_BD is None else draft.tokens_BN.gather(1, F.pad(node_BD[:, 1:], (0, 1)))
        tokens_BD = tokens_BD.scatter(1, verdict.accepted_B[:, None], verdict.next_B[:, None])
        counts_B2 = torch.stack([verdict.accepted_B, draft.count_B], 1)
        levels = [] if node_BD is None else [draft.levels_BD]
        facts = torch.cat([counts_B2, tokens_BD, *levels], 1).tolist()

        running = [not answer.finish_reason for answer in self.places]
        deepest = 1 + max(row[0] for row, alive in zip(facts, running, strict=True) if alive)
        path_BD, kept_B = path_BD[:, :deepest], verdict.accepted_B + 1
        if not all(running):
            running_B = torch.tensor(running, device=kept_B.device)
            path_BD, kept_B = path_BD.masked_fill(~running_B[:, None], -1), kept_B * running_B
        self.cache.commit(draft, path_BD, kept_B)
        if self.seen_BV is not None:
            emitted_BD = tokens_BD.where(verdict.path_BD >= 0, verdict.next_B[:, None])
            self.seen_BV = self.seen_BV.scatter(1, emitted_BD, True)
        for answer, row in zip(self.places, facts, strict=True):
            if not answer.finish_reason:
                self._emit(answer, row, 2 + tokens_BD.shape[1])
        if sum(not answer.finish_reason for answer in self.places) < sum(running):
            # What was accepted past the end is forgotten, so that a row which waits stays within its context.
            self.cache.rollback(torch.tensor([self._length(a) for a in self.places], device=kept_B.device))
        new_tokens = NewTokens(
            tokens_BD[:, :deepest],
            _along(output.aux, None if node_BD is None else node_BD[:, :deepest], deepest),
            _along(output.last, None if node_BD is None else node_BD[:, :deepest], deepest),
            kept_B,
        )
        state = self.state
        lengths_B, limit_B = self.cache.lengths_B, self._limits()
        self.state = DecodeState(
            verdict.next_B, lengths_B, limit_B, state.keys_B, new_tokens, self.sampling, *self._running()
        )

    def _limits(self) -> Tensor:
        """Tokens that each row may still emit."""
        limits = [answer.request.max_new_tokens - len(answer.output_ids) for answer in self.places]
        return torch.tensor(limits, device=self.target.device)

    def _running(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths and limits of the rows that are not finished; none if all are."""
        alive = [answer for answer in self.places if not answer.finish_reason]
        limits = (a.request.max_new_tokens - len(a.output_ids) for a in alive)
        return tuple(map(self._length, alive)), tuple(limits)

    @staticmethod
    def _length(answer: Generation) -> int:
        """Tokens that the target has read; the last one emitted is the next root, which it has not."""
        return len(answer.request.prompt_ids) + len(answer.output_ids) - 1

    def _emit(self, answer: Generation, facts: list[int], levels_from: int) -> None:
        """Append a row's tokens. facts: tokens accepted, nodes of the draft, the tokens, nodes at each depth of a tree."""
        accepted, nodes = facts[:2]
        levels = facts[levels_from:]
        root = len(answer.output_ids) - 1
        kept = answer.emit(facts[2 : 3 + accepted], self.target.eos_ids)
        deep = tuple(levels[: levels.index(0)] if 0 in levels else levels)
        answer.rounds.append(Round(root, nodes - 1, min(kept, accepted), deep))
        if answer.finish_reason:
            self.finished.append(answer)

    def _explain(self, found: NotFinite, draft: Draft) -> UserError:
        """Say where the target's numbers stopped being numbers."""
        answer = self.places[found.row]
        path = draft.ancestors_BNN[found.row, found.node].nonzero()[:, 0]
        above = draft.tokens_BN[found.row, path[1:]].tolist()
        text = [*answer.request.prompt_ids, *answer.output_ids, *above]
        return explain(self.target, answer.request.sample_id, text)


def _along(states_BNX: Tensor, node_BD: Tensor | None, deepest: int) -> Tensor:
    """Return the states [B, D, X] at the nodes of a path; None stands for the first `deepest` nodes."""
    if node_BD is None:
        return states_BNX[:, :deepest]
    return states_BNX.gather(1, node_BD[..., None].expand(-1, -1, states_BNX.shape[-1]))


def _put(into_Bn: Tensor, rows_b: Tensor, first_b1: Tensor) -> Tensor:
    """Return `into_Bn` with the first entries of `rows_b` replaced."""
    into_Bn = into_Bn.clone()
    into_Bn[rows_b, :1] = first_b1
    return into_Bn


def _seen(ids_bL: Tensor, length_b: Tensor, vocab_size: int) -> Tensor:
    """Return bool [b, V]: the tokens of each prompt."""
    inside_bL = torch.arange(ids_bL.shape[1], device=ids_bL.device) < length_b[:, None]
    counts_bV = torch.zeros(len(ids_bL), vocab_size, dtype=torch.int32, device=ids_bL.device)
    return counts_bV.scatter_add_(1, ids_bL, inside_bL.int()) > 0


@torch.no_grad()
def explain(target: Target, sample_id: str, text: list[int]) -> UserError:
    """Return the error for logits after `text` that are NaN or infinite: it names the position and the layer."""
    layers = tuple(range(target.num_layers))
    output = target.forward(torch.tensor([text], device=target.device), layer_ids=layers)
    streams_kLH = output.aux[0].unflatten(-1, (target.num_layers, -1)).transpose(0, 1)
    # Layer k's output is the stream that enters layer k + 1, the last one's is seen through the final norm.
    bad_kL = ~torch.cat([streams_kLH, output.last]).isfinite().all(-1)
    if bool(bad_kL.any()):
        # The layer first: through attention's zero weights its NaN reaches every position of the next.
        first = int(bad_kL.any(1).int().argmax())
        position = int(bad_kL[first].int().argmax())
        where = "in the embedding" if first == 0 else f"in layer {first - 1}"
    else:
        position, where = len(text) - 1, "in the output projection"
        if bool(target.head.logits(output.last[0, -1]).isfinite().all()):
            where = "in the pass over the draft alone (a plain pass over the same text has none)"
    return UserError(
        f"The target's logits for {sample_id} are not finite: NaN or infinity first appears at position {position}, "
        f"{where}; decode in a wider dtype, or check the target's weights."
    )
