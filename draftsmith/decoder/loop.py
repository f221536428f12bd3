"""The speculative decoding loop: propose -> one target pass -> verify -> commit -> emit (`Loop.round`).

The target alone runs through the same loop with an empty draft, so a speedup compares like with like. Batches are
continuous: a row whose answer is finished takes the next waiting prompt.

Shapes: B rows, b rows that are admitted, L tokens of a prompt, N nodes of a draft, D nodes of an accepted path, V
target vocab, X features of a state.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.decoder.answers import Decoded, Generation, Request, Round
from draftsmith.decoder.captured import Passes, judge
from draftsmith.decoder.draft import DecodeState, Draft, Drafter, NewTokens, Prompts
from draftsmith.decoder.sampling import Noise, NoiseTable, Sampling
from draftsmith.decoder.selfcheck import explain_not_finite
from draftsmith.decoder.slots import run_draft
from draftsmith.decoder.verify import NotFinite, Typical, Verdict, refuse, verify
from draftsmith.target.kernels import upload
from draftsmith.target.target import Target, TargetOutput

_ADMISSION_FRACTION = 1 / 8
"""Waiting prompts are admitted once this part of the rows is free: every prefill holds up all other rows."""
_SHRINK_FRACTION = 3 / 4
"""The batch shrinks, which moves rows of the cache, once no more than this part of its rows is active."""
_TOKENS_PER_PASS = 1 << 15
"""Most prompt tokens, padding included, that one prefill reads."""


class Stopwatch:
    """Sum up the seconds of laps by name; `last` is the latest lap.

    wait: wait for a GPU before reading the clock; without it laps mean little there, but nothing is slowed down."""

    def __init__(self, device: torch.device | str = "cpu", wait: bool = True) -> None:
        self.device, self.wait = torch.device(device), wait
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = 0.0
        self._last = self._now()

    def _now(self) -> float:
        if self.wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = self._now()
        self.last = now - self._last
        self.seconds[name] += self.last
        self._last = now

    def skip(self) -> None:
        """Forget the time since the last lap."""
        self._last = self._now()


class Loop:
    """A batch at work. rows[b] is the answer of row b; a finished one keeps its row, and commits nothing, until a
    waiting prompt takes the row or the batch shrinks."""

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
        self.rows = self.answers[:rows]
        self.finished: list[Generation] = []
        capacity = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
        self._passes = Passes.of(target, rows, capacity + drafter.max_nodes, drafter.max_nodes)
        self.cache, self._verdicts = self._passes.cache, self._passes.verdicts
        drafter.start(rows, capacity)
        zeros_B = torch.zeros(rows, dtype=torch.long, device=target.device)
        state_B1D = torch.zeros(rows, 1, target.hidden_size, dtype=target.dtype, device=target.device)
        new_tokens = NewTokens(zeros_B[:, None], state_B1D.repeat(1, 1, len(drafter.layer_ids)), state_B1D, zeros_B)
        self.state = DecodeState(zeros_B, zeros_B, zeros_B, zeros_B, new_tokens, sampling)
        # How long each row's text in the cache may become; a finished one's stays as it is.
        self._ends_B = zeros_B
        # The tokens of each row's prompt and answer, for a repetition penalty.
        self.seen_BV = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(rows, target.vocab_size, dtype=torch.bool, device=target.device)
        self.passes = 0
        # Allocation is not part of answering.
        self.watch = Stopwatch(target.device, wait=timed)
        self._admit(list(range(rows)))

    @torch.no_grad()
    def run(self) -> Iterator[Decoded]:
        """Yield the answers so far, the same objects growing, after the first tokens and after every round.

        What the caller does in between is on no clock.
        """
        yield Decoded(self.answers, self.watch.seconds)
        self.watch.skip()
        while self.fill():
            self.round()
            yield Decoded(self.answers, self.watch.seconds, self.passes)
            self.watch.skip()
        self._passes.release()

    def round(self) -> None:
        """Run one round: propose -> one target pass -> verify -> commit -> emit."""
        state, watch = self.state, self.watch
        draft = self.drafter.propose(state)
        watch.lap("draft")

        passed = self._passes(draft, state.longest, self.drafter.layer_ids)
        output, logits_BNV = passed.output, passed.logits_BNV
        watch.lap("verify")

        if draft.listen is not None:
            draft.listen(logits_BNV)
            watch.lap("draft")
        judged = judge(self._verdicts, draft, logits_BNV, self.sampling, state.noise, self.typical, self.seen_BV)
        verdict, tokens_BD, host_rows = judged.verdict, judged.tokens_BD, judged.to_host()
        faults = (0 if answer.finish_reason else row.fault for answer, row in zip(self.rows, host_rows, strict=True))
        self._refuse(self.rows, draft, [*faults])
        active = [not answer.finish_reason for answer in self.rows]
        depth = 1 + max(row.accepted for row, runs in zip(host_rows, active, strict=True) if runs)
        path_BD, kept_B = verdict.path_BD[:, :depth], verdict.accepted_B + 1
        if not all(active):
            active_B = self.state.limit_B > 0
            path_BD, kept_B = path_BD.masked_fill(~active_B[:, None], -1), kept_B * active_B
        self.cache.commit(draft, path_BD, kept_B)
        if self.seen_BV is not None:
            emitted_BD = tokens_BD.where(verdict.path_BD >= 0, verdict.next_B[:, None])
            self.seen_BV = self.seen_BV.scatter(1, emitted_BD, True)
        finished = len(self.finished)
        for answer, row in zip(self.rows, host_rows, strict=True):
            if answer.finish_reason:
                continue
            root = len(answer.output_ids) - 1
            emitted = answer.emit(row.emitted, self.target.eos_ids)
            answer.rounds.append(Round(root, row.drafted, min(emitted, row.accepted), row.levels))
            if answer.finish_reason:
                self.finished.append(answer)
        if len(self.finished) > finished:
            # Tokens accepted past the end are forgotten, so that a row that waits stays within its context.
            self._set_ends()
            self.cache.rollback(self._ends_B)
        self._set_state(verdict.next_B, state.keys_B, _new_tokens(draft, output, verdict, tokens_BD, depth, kept_B))
        self.passes += 1
        watch.lap("commit")

    def fill(self) -> bool:
        """Admit waiting prompts to free rows, or shrink the batch where none wait; return whether any row is at work."""
        while free := [b for b, answer in enumerate(self.rows) if answer.finish_reason]:
            if not self.waiting:
                active = sorted(set(range(len(self.rows))) - set(free))
                if active and len(active) <= _SHRINK_FRACTION * len(self.rows):
                    keep = torch.tensor(active, device=self.target.device)
                    self.rows = [self.rows[b] for b in active]
                    self.cache.select(keep)
                    self.drafter.select(keep)
                    self.state, self._ends_B = self.state.select(keep), self._ends_B[keep]
                    self.state = replace(self.state, table=self._noise_table())
                    self.seen_BV = None if self.seen_BV is None else self.seen_BV[keep]
                    self.watch.lap("other")
                return bool(active)
            if len(free) < min(int(len(self.rows) * _ADMISSION_FRACTION), len(self.waiting)):
                return True
            admitted = free[: len(self.waiting)]
            for b in admitted:
                self.rows[b] = self.waiting.popleft()
            self._admit(admitted)
        return True

    def take_finished(self) -> list[Generation]:
        """Return the answers that were finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def _refuse(self, answers: Sequence[Generation], draft: Draft, faults: Sequence[int]) -> None:
        """Raise UserError for what `verify` found; where the target's numbers are not finite, it says where and of which answer."""
        try:
            refuse(faults, draft.tokens_BN.shape[1])
        except NotFinite as found:
            answer = answers[found.row]
            path = draft.ancestors_BNN[found.row, found.node].nonzero()[:, 0]
            drafted = draft.tokens_BN[found.row, path[1:]].tolist()
            text = [*answer.request.prompt_ids, *answer.output_ids, *drafted]
            raise explain_not_finite(self.target, answer.request.sample_id, text) from found

    def _set_state(self, root_B: Tensor, keys_B: Tensor, new_tokens: NewTokens) -> None:
        """Set what the next proposal reads."""
        active = [answer for answer in self.rows if not answer.finish_reason]
        self.state = DecodeState(
            root_B,
            self.cache.lengths_B,
            self._ends_B - self.cache.lengths_B,
            keys_B,
            new_tokens,
            self.sampling,
            tuple(answer.tokens_read for answer in active),
            tuple(answer.tokens_left for answer in active),
            self._noise_table(),
        )

    def _noise_table(self) -> NoiseTable:
        """Return random numbers for the rows' next round, those at hand where they suffice."""
        keys, lengths = [a.request.key for a in self.rows], [a.tokens_read for a in self.rows]
        table = self.state.table
        return table if table and table.covers(keys, lengths) else NoiseTable(keys, lengths, self.target.device)

    def _set_ends(self) -> None:
        """Upload where the rows end; once for each answer that begins or ends."""
        ends = [a.tokens_read + (0 if a.finish_reason else a.tokens_left) for a in self.rows]
        self._ends_B = upload(ends, self.target.device)

    def _admit(self, rows: list[int]) -> None:
        """Prefill the prompts of `rows`, in groups of at most _TOKENS_PER_PASS tokens or one prompt."""
        group: list[int] = []
        for b in rows:
            longest = max(len(self.rows[a].request.prompt_ids) for a in (*group, b))
            if group and longest * (len(group) + 1) > _TOKENS_PER_PASS:
                self._prefill(group)
                group = []
            group.append(b)
        self._prefill(group)

    def _prefill(self, rows: list[int]) -> None:
        """Read the prompts of `rows`, padded at the end, emit their first tokens, and let the drafter read them too."""
        answers = [self.rows[b] for b in rows]
        prompts = [answer.request.prompt_ids for answer in answers]
        device, longest = self.target.device, max(map(len, prompts))
        rows_b = torch.tensor(rows, device=device)
        ids_bL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        length_b = torch.tensor([len(p) for p in prompts], device=device)
        keys_b = torch.tensor([answer.request.key for answer in answers], device=device)
        draft = Draft.chain(ids_bL[:, 0], ids_bL[:, 1:])
        everyone = len(rows) == len(self.rows)
        self.cache.rollback(torch.zeros_like(length_b), rows_b)
        written_b = None if everyone else rows_b
        output = run_draft(self.target, self.cache, draft, self.drafter.layer_ids, written_b, longest=0)
        self.cache.append(length_b, rows_b)
        last_b1 = (length_b - 1)[:, None]
        aux_b1F, last_b1D = _at_nodes(output.aux, last_b1), _at_nodes(output.last, last_b1)
        seen_bV = None
        if self.seen_BV is not None:  # the tokens that each prompt holds
            inside_bL = torch.arange(longest, device=device) < length_b[:, None]
            counts_bV = torch.zeros(len(rows), self.target.vocab_size, dtype=torch.int32, device=device)
            seen_bV = counts_bV.scatter_add_(1, ids_bL, inside_bL.int()) > 0
        # The token after a prompt is chosen by the exact rule even where drafts are accepted by a lossy one.
        nothing = Draft.chain(keys_b, keys_b.new_zeros(len(answers), 0))
        logits_b1V = self.target.head.logits(last_b1D)
        verdict = verify(nothing, logits_b1V, self.sampling, Noise(keys_b, length_b - 1), seen_BV=seen_bV)
        root_b = verdict.next_B
        host_b2 = torch.stack([root_b, verdict.fault_B], 1).tolist()
        self._refuse(answers, nothing, [fault for _, fault in host_b2])
        following_bL = torch.cat([ids_bL[:, 1:], root_b[:, None]], 1).scatter(1, last_b1, root_b[:, None])
        for answer, (token, _) in zip(answers, host_b2, strict=True):
            answer.emit([token], self.target.eos_ids)
        self.finished += [answer for answer in answers if answer.finish_reason]
        self.watch.lap("ttft")
        for answer in answers:
            answer.ttft_s = self.watch.last
        self.drafter.admit(
            Prompts(rows_b, ids_bL, length_b, NewTokens(following_bL, output.aux, output.last, length_b))
        )
        self.watch.lap("draft")
        self._enter(rows_b, keys_b, NewTokens(root_b[:, None], aux_b1F, last_b1D, torch.ones_like(root_b)))
        if self.seen_BV is not None and seen_bV is not None:
            self.seen_BV = self.seen_BV.index_copy(0, rows_b, seen_bV.scatter(1, root_b[:, None], True))
        self.watch.lap("other")

    def _enter(self, rows_b: Tensor, keys_b: Tensor, first: NewTokens) -> None:
        """Put admitted rows into the state of the batch. first: the first tokens of their answers."""
        state, before = self.state, self.state.new_tokens
        width = 1 if len(rows_b) == len(self.rows) else before.tokens_Bn.shape[1]

        def put(entries_Bn: Tensor, first_b1: Tensor) -> Tensor:
            entries_Bn = entries_Bn[:, :width].clone()
            entries_Bn[rows_b, :1] = first_b1
            return entries_Bn

        new_tokens = NewTokens(
            put(before.tokens_Bn, first.tokens_Bn),
            put(before.aux_BnF, first.aux_BnF),
            put(before.last_BnD, first.last_BnD),
            before.count_B.index_copy(0, rows_b, first.count_B),
        )
        root_B = state.root_B.index_copy(0, rows_b, first.tokens_Bn[:, 0])
        self._set_ends()
        self._set_state(root_B, state.keys_B.index_copy(0, rows_b, keys_b), new_tokens)


def _new_tokens(
    draft: Draft, output: TargetOutput, verdict: Verdict, tokens_BD: Tensor, depth: int, kept_B: Tensor
) -> NewTokens:
    """Pair the emitted tokens with the target's states along the accepted paths, at most `depth` nodes long."""
    if draft.is_chain:  # its nodes are the path
        return NewTokens(tokens_BD[:, :depth], output.aux[:, :depth], output.last[:, :depth], kept_B)
    node_BD = verdict.path_BD[:, :depth].clamp(min=0)
    return NewTokens(tokens_BD[:, :depth], _at_nodes(output.aux, node_BD), _at_nodes(output.last, node_BD), kept_B)


def _at_nodes(states_BNX: Tensor, node_BD: Tensor) -> Tensor:
    """Return the states [B, D, X] at these nodes."""
    return states_BNX.gather(1, node_BD[..., None].expand(-1, -1, states_BNX.shape[-1]))
