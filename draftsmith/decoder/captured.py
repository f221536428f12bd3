"""A round's draft, the target's pass over it and the verdict: on a GPU CUDA graphs.

So many nodes in so many rows have a graph and, under a mask, so many slots. It reads cached keys where they lie, so buffers stay from
batch to batch.

Shapes: B rows, b some of these rows, N nodes, V target vocab, D nodes of a path, X numbers of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decoder.cache import BUCKET, KVCache, with_room
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens
from draftsmith.decoder.graphs import Graphs
from draftsmith.decoder.sampling import Noise, Sampling
from draftsmith.decoder.slots import Slots, is_chain, run_draft, visible_slots
from draftsmith.decoder.verify import Typical, Verdict, verify
from draftsmith.target.target import Target, TargetOutput


@dataclass(frozen=True)
class Pass:
    """What the target says of a draft: its states at all nodes, and logits_BNV. Those of a graph stay until any next pass."""

    output: TargetOutput
    logits_BNV: Tensor


class Passes:
    """Passes of a target over drafts of the sequences in `cache`. Make them by `of`; `release` lets the next batch have their graphs."""

    def __init__(self, target: Target, rows: int, capacity: int, nodes: int) -> None:
        self._target, self.nodes = target, nodes
        self.captures = target.device.type == "cuda" and target.plain_pass is not None
        self._graphs = Graphs(target.device, target.dtype, "the target's passes", rows * nodes, captures=self.captures)
        self.verdicts = Graphs(target.device, target.dtype, "verdicts", rows * nodes)
        with torch.inference_mode(False):  # so that another batch may write to it outside of it
            slots = with_room(capacity, rows, target.device) if self.captures else capacity
            self.cache = KVCache.for_target(target, rows, slots)

    @classmethod
    def of(cls, target: Target, rows: int, capacity: int, nodes: int) -> "Passes":
        """Return passes over drafts of at most `nodes` nodes for `rows` sequences of at most `capacity` tokens, drafts included: on a GPU
        the ones that were released, if they suffice."""
        kept, target.kept_passes = target.kept_passes, None
        if isinstance(kept, Passes) and kept.nodes >= nodes and kept.cache.restarted(rows, capacity):
            kept._target = target
            return kept
        del kept  # before the next buffers are allocated
        return cls(target, rows, capacity, nodes)

    def release(self) -> None:
        """Leave graphs and buffers to the next batch; these passes end."""
        if self._graphs.held:
            self._target.kept_passes = self
            del self._target  # which would hold each other

    @torch.no_grad()
    def __call__(
        self, draft: Draft, longest: int, layer_ids: tuple[int, ...] = (), rows_b: Tensor | None = None
    ) -> Pass:
        """Run the target over the nodes of a draft, as `run_draft` does, and return its logits too."""
        if not self.captures or longest == 0 or rows_b is not None:
            output = run_draft(self._target, self.cache, draft, layer_ids, rows_b, longest=longest)
            return Pass(output, self._target.head.logits(output.last))
        nodes = draft.tokens_BN.shape[1]
        visible = 0 if is_chain(self._target, draft) else visible_slots(self.cache, longest + nodes)
        self.cache.stage(nodes, longest)
        shape = (draft.depth_BN, draft.ancestors_BNN)
        fixed = bool(draft.linear) or draft.tree is not None
        # It must not hold these passes, which would hold each other.
        target, cache = self._target, self.cache

        def body(_: Noise | None, tokens_BN: Tensor, lengths_B: Tensor, *given: Tensor) -> Pass:
            tree = given or shape
            slots = Slots(cache, target.config, lengths_B, nodes, visible, tree if visible else None)
            output = target.attend_by(slots.attend, tokens_BN, layer_ids, lengths_B[:, None] + tree[0])
            return Pass(output, target.head.logits(output.last))

        key = (visible, draft.linear, draft.tree, layer_ids)
        return self._graphs.run(key, body, draft.tokens_BN, self.cache.lengths_B, *(() if fixed else shape))


@dataclass(frozen=True)
class HostRow:
    """One row's round on the host. fault: see `refuse`. accepted, drafted: numbers of draft tokens. emitted: the accepted tokens and
    the target's own. levels: draft tokens at each depth of a tree, empty for a chain."""

    fault: int
    accepted: int
    drafted: int
    emitted: list[int]
    levels: tuple[int, ...]


@dataclass(frozen=True)
class Judged:
    """The verdict on a draft. tokens_BD: a round's accepted tokens, then the target's own; what follows is padding. host_BX: all that the
    host needs of it, in one transfer."""

    verdict: Verdict
    tokens_BD: Tensor
    host_BX: Tensor

    def to_host(self) -> list[HostRow]:
        """Copy what the host needs from the device."""
        rows, width = [], self.tokens_BD.shape[1]
        for fault, accepted, nodes, *rest in self.host_BX.tolist():
            deep = rest[width:]
            deep = deep[: deep.index(0)] if 0 in deep else deep
            rows.append(HostRow(fault, accepted, nodes - 1, rest[: accepted + 1], tuple(deep)))
        return rows


def judge(
    graphs: Graphs,
    draft: Draft,
    logits_BNV: Tensor,
    sampling: Sampling,
    noise: Noise,
    typical: Typical | None,
    seen_BV: Tensor | None,
) -> Judged:
    """Verify a draft, see `verify`, and put together what a round emits."""
    chain = draft.is_chain
    given: dict[str, Any] = {"tokens_BN": draft.tokens_BN, "nodes_B": draft.nodes_B}
    if not chain and draft.tree is None:
        given["parents_BN"] = draft.parents_BN
    if draft.draft_probs_BMW is not None:
        given["draft_probs_BMW"] = draft.draft_probs_BMW
    if draft.vocab_W is not None:
        given["vocab_W"] = draft.vocab_W
    like = replace(draft, linear=chain, listen=None)

    def body(noise: Noise, logits_BNV: Tensor, *tensors: Tensor) -> Judged:
        fields: dict[str, Any] = dict(zip(given, tensors, strict=False))
        here = replace(like, **fields)
        verdict = verify(here, logits_BNV, sampling, noise, typical, tensors[-1] if len(tensors) > len(given) else None)
        if chain:
            tokens_BD = F.pad(here.tokens_BN[:, 1:], (0, 1))
        else:
            tokens_BD = here.tokens_BN.gather(1, F.pad(verdict.path_BD.clamp(min=0)[:, 1:], (0, 1)))
        tokens_BD = tokens_BD.scatter(1, verdict.accepted_B[:, None], verdict.next_B[:, None])
        counts_B3 = torch.stack([verdict.fault_B, verdict.accepted_B, here.nodes_B], 1)
        return Judged(verdict, tokens_BD, torch.cat([counts_B3, tokens_BD, *([] if chain else [here.levels_BD])], 1))

    key = (sampling, typical, chain, draft.tree, draft.depth, *given)
    return graphs.run(key, body, logits_BNV, *given.values(), *(() if seen_BV is None else (seen_BV,)), noise=noise)


def make_draft(
    graphs: Graphs,
    make: Callable[[DecodeState], Draft],
    state: DecodeState,
    cache: KVCache | None,
    depth: int,
    entries: int,
    *key: object,
) -> Draft:
    """Return make(state), by a graph where these capture.

    It may depend on what the host knows only by `depth`, the most tokens that are drafted, and `key`, and keeps nothing from round to
    round but what is in `cache`, where it writes at most so many `entries` behind the text.
    """
    if not graphs.captures:
        return make(state)
    # Powers of two: a draft's few layers read slots in vain more cheaply than a graph is captured.
    visible = max(BUCKET, 1 << (state.longest + entries - 1).bit_length())
    if cache is not None:
        visible = min(visible, cache.capacity)
    new = state.new_tokens

    def body(noise: Noise, *given: Tensor) -> tuple[Draft, Tensor | None]:
        root_B, length_B, limit_B, tokens_Bn, aux_BnF, last_BnD, count_B, *lengths = given
        here = replace(
            state,
            root_B=root_B,
            length_B=length_B,
            limit_B=limit_B,
            new_tokens=NewTokens(tokens_Bn, aux_BnF, last_BnD, count_B),
            host_lengths=(visible - entries,),
            host_limits=(depth,),
        )
        vars(here)["noise"] = noise  # in place of this round's
        if cache is None:
            return make(here), None
        cache.resume(lengths[0])
        return make(here), cache.lengths_B

    given = (state.root_B, state.length_B, state.limit_B, new.tokens_Bn, new.aux_BnF, new.last_BnD, new.count_B)
    lengths = () if cache is None else (cache.lengths_B,)
    # The draft, and how much the drafter's cache then holds of each row.
    draft, lengths_B = graphs.run((visible, depth, state.sampling, *key), body, *given, *lengths, noise=state.noise)
    if cache is not None and lengths_B is not None:
        cache.resume(lengths_B)
    return draft
