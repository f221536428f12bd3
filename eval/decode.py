"""The speculative decoding loop: propose -> one target pass -> verify -> commit -> emit.

The target alone runs through the same loop with an empty draft, so a speedup compares like with like.
Shapes: B rows, N nodes, D depth of the accepted path, V target vocab.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.cache import KVCache
from draftsmith.eval.clock import Stopwatch
from draftsmith.eval.draft import DecodeState, Draft, Drafter, Fresh
from draftsmith.eval.noise import EMIT, row_key
from draftsmith.eval.passes import run_draft
from draftsmith.eval.sampling import Sampling, draw, law
from draftsmith.eval.verify import Noise, Typical, Verdict, verify
from draftsmith.heads.target import Target, TargetOutput


@dataclass(frozen=True)
class Request:
    """A prompt to answer: its token ids, the most tokens to emit, and the key of its random numbers."""

    sample_id: str
    slice: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    key: int = 0

    @classmethod
    def seeded(
        cls, sample_id: str, slice_name: str, prompt_ids: Sequence[int], max_new_tokens: int, seed: int
    ) -> "Request":
        """Build a request whose random numbers depend on `seed` and `sample_id` only."""
        return cls(sample_id, slice_name, tuple(prompt_ids), max_new_tokens, row_key(seed, sample_id))


@dataclass(frozen=True)
class Round:
    """One target pass. root: index in the output of the last token known before it; drafted: tokens
    proposed; accepted: drafted tokens that were emitted (those cut by EOS do not count). levels: tokens proposed
    at each depth of a tree, empty for a chain."""

    root: int
    drafted: int
    accepted: int
    levels: tuple[int, ...] = ()


@dataclass
class Generation:
    """An answer: ids up to and including EOS, why it ended ("eos" or "length"), and its rounds."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    rounds: list[Round] = field(default_factory=list)

    def emit(self, tokens: Sequence[int], eos_ids: Sequence[int]) -> int:
        """Append tokens up to EOS or the limit; return how many were kept."""
        for count, token in enumerate(tokens, 1):
            self.output_ids.append(token)
            if token in eos_ids:
                self.finish_reason = "eos"
                return count
            if len(self.output_ids) == self.request.max_new_tokens:
                self.finish_reason = "length"
                return count
        return len(tokens)


@dataclass(frozen=True)
class Decoded:
    """Generations of one batch and the seconds spent: `ttft` (prefill and first token), then draft,
    verify, commit and other, which add up to the decode time. peak_bytes: GPU memory, where it was watched."""

    generations: list[Generation]
    seconds: dict[str, float]
    peak_bytes: int | None = None


@torch.no_grad()
def decode_batch(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    typical: Typical | None = None,
) -> Decoded:
    """Answer `requests` together; every row gets the text it would get alone (up to rounding in low precision).

    typical: accept drafts by this lossy rule instead of the exact one.
    """
    check_requests(target, requests, drafter.num_speculative_tokens)
    watch = Stopwatch(target.device)
    rows = [Generation(request) for request in requests]
    capacity = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + drafter.max_nodes
    cache = KVCache(target.num_layers, len(rows), capacity, target.device)
    state = _prefill(target, drafter, cache, requests, sampling)
    for row, token in zip(rows, state.root_B.tolist(), strict=True):
        row.emit([token], target.eos_ids)
    watch.lap("ttft")
    drafter.start(len(rows), capacity)
    active = list(range(len(rows)))
    while True:
        active, state = _drop_finished(rows, active, state, cache, drafter)
        if not active:
            break
        watch.lap("other")
        draft = drafter.propose(state)
        watch.lap("draft")
        output = run_draft(target, cache, draft, drafter.layer_ids)
        logits_BNV = target.head.logits(output.last)
        watch.lap("verify")
        verdict = verify(draft, logits_BNV, sampling, Noise(state.keys_B, state.length_B), typical)
        verdict = _freeze_finished(verdict, [bool(rows[index].finish_reason) for index in active])
        cache.commit(draft, verdict.path_BD)
        state = _advance(state, cache, draft, output, verdict)
        watch.lap("commit")
        state = _emit(rows, active, state, draft, verdict, target.eos_ids)
        watch.lap("other")
    return Decoded(rows, watch.seconds)


def decode(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, batch: int
) -> Iterator[Decoded]:
    """Answer `requests` in consecutive batches, yielding each one when it is done."""
    for start in range(0, len(requests), batch):
        yield decode_batch(target, drafter, requests[start : start + batch], sampling)


def check_requests(target: Target, requests: Sequence[Request], drafted: int = 0) -> None:
    """Refuse, before any work, prompts that the target cannot serve."""
    for request in requests:
        if not request.prompt_ids:
            raise UserError(f"Prompt {request.sample_id} is empty: give it at least one token.")
        if request.max_new_tokens < 1:
            raise UserError(
                f"max_new_tokens is {request.max_new_tokens} for {request.sample_id}: it must be at least 1."
            )
        if max(request.prompt_ids) >= target.vocab_size or min(request.prompt_ids) < 0:
            raise UserError(
                f"Prompt {request.sample_id} holds a token id outside the target's vocabulary of {target.vocab_size}: "
                "it was made with another tokenizer; use the target's own."
            )
        need = len(request.prompt_ids) + request.max_new_tokens + drafted
        if target.context_length is not None and need > target.context_length:
            raise UserError(
                f"Prompt {request.sample_id} needs {need} positions ({len(request.prompt_ids)} prompt + "
                f"{request.max_new_tokens} new + {drafted} drafted) but the target's context has {target.context_length}: "
                "shorten the prompt or lower max_new_tokens."
            )


def _prefill(
    target: Target, drafter: Drafter, cache: KVCache, requests: Sequence[Request], sampling: Sampling
) -> DecodeState:
    """Read the prompts (right-padded; padding slots are overwritten later) and choose the first tokens."""
    device = target.device
    lengths = [len(r.prompt_ids) for r in requests]
    longest = max(lengths)
    ids_BL = torch.tensor([[*r.prompt_ids, *[0] * (longest - len(r.prompt_ids))] for r in requests], device=device)
    length_B = torch.tensor(lengths, device=device)
    prompt = Draft.chain(ids_BL[:, 0], ids_BL[:, 1:])
    output = run_draft(target, cache, prompt, drafter.layer_ids)
    cache.lengths_B = length_B
    keys_B = torch.tensor([r.key for r in requests], device=device)
    row = torch.arange(len(requests), device=device)
    logits_BV = target.head.logits(output.last[row, length_B - 1])
    if sampling.greedy:
        root_B = logits_BV.argmax(-1)
    else:
        root_B = draw(law(logits_BV, sampling), Noise(keys_B, length_B - 1).draw(EMIT, 1)[:, 0])
    following_BL = torch.cat([ids_BL[:, 1:], root_B[:, None]], 1).scatter(1, length_B[:, None] - 1, root_B[:, None])
    limit_B = torch.tensor([r.max_new_tokens - 1 for r in requests], device=device)
    fresh = Fresh(following_BL, output.aux, output.last, length_B)
    return DecodeState(root_B, length_B, limit_B, keys_B, fresh, sampling)


def _freeze_finished(verdict: Verdict, finished: list[bool]) -> Verdict:
    """Finished rows that still sit in the batch commit nothing, so that their lengths stop growing."""
    if not any(finished):
        return verdict
    done_B1 = torch.tensor(finished, device=verdict.path_BD.device)[:, None]
    return replace(verdict, path_BD=verdict.path_BD.masked_fill(done_B1, -1))


def _advance(state: DecodeState, cache: KVCache, draft: Draft, output: TargetOutput, verdict: Verdict) -> DecodeState:
    """Pair the accepted tokens and the emitted one with the target's states, for the next proposal."""
    path_BD = verdict.path_BD
    count_B = (path_BD >= 0).sum(1)
    depth = path_BD.shape[1] if len(path_BD) > 1 else int(count_B.max())
    node_BD = path_BD[:, :depth].clamp(min=0)
    child_BD = torch.cat([node_BD[:, 1:], torch.zeros_like(node_BD[:, :1])], 1)
    tokens_BD = draft.tokens_BN.gather(1, child_BD)
    tokens_BD.scatter_(1, (count_B[:, None] - 1).clamp(min=0), verdict.next_B[:, None])

    def along_path(states_BNX: Tensor) -> Tensor:
        return states_BNX.gather(1, node_BD[..., None].expand(-1, -1, states_BNX.shape[-1]))

    fresh = Fresh(tokens_BD, along_path(output.aux), along_path(output.last), count_B)
    return replace(state, root_B=verdict.next_B, length_B=cache.lengths_B, fresh=fresh)


def _emit(
    rows: list[Generation],
    active: list[int],
    state: DecodeState,
    draft: Draft,
    verdict: Verdict,
    eos_ids: Sequence[int],
) -> DecodeState:
    """Append this round's tokens to the unfinished rows; return the state with the new limits."""
    tokens = state.fresh.tokens_Bn.tolist()
    accepted = verdict.accepted_B.tolist()
    drafted = (draft.count_B - 1).tolist()
    levels: list[tuple[int, ...]] = [()] * len(active) if draft.is_chain else _levels(draft)
    limits = []
    for place, index in enumerate(active):
        row = rows[index]
        if not row.finish_reason:
            root = len(row.output_ids) - 1
            kept = row.emit(tokens[place][: accepted[place] + 1], eos_ids)
            row.rounds.append(Round(root, drafted[place], min(kept, accepted[place]), levels[place]))
        limits.append(row.request.max_new_tokens - len(row.output_ids))
    return replace(state, limit_B=torch.tensor(limits, device=state.root_B.device))


def _levels(draft: Draft) -> list[tuple[int, ...]]:
    """Return, per row, how many tokens were proposed at depth 1, 2, ..."""
    depths = draft.depth_BN.tolist()
    counts = [Counter(row[1:count]) for row, count in zip(depths, draft.count_B.tolist(), strict=True)]
    return [tuple(count[depth] for depth in sorted(count)) for count in counts]


def _drop_finished(
    rows: list[Generation], active: list[int], state: DecodeState, cache: KVCache, drafter: Drafter
) -> "tuple[list[int], DecodeState]":
    """Shrink the batch once a quarter of its rows are done (each shrink copies the cache)."""
    alive = [place for place, index in enumerate(active) if not rows[index].finish_reason]
    if not alive or len(alive) > 0.75 * len(active):
        return (active if alive else []), state
    keep = torch.tensor(alive, device=state.root_B.device)
    cache.select(keep)
    drafter.select(keep)
    return [active[place] for place in alive], state.select(keep)
