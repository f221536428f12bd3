"""Simulate drafters on finished answers: one pass of the target, and one of each head or draft model, give their expected tallies;
of those that read texts the text alone does.

Shapes: B answers of a pass, L tokens, A aux layers, H hidden size, K speculative tokens, R supervised rows, T roots, W ids of the
distribution. Of trees that grow: K depths, R rows of the flat [B*L], J candidates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import check_samples, compute_features
from draftsmith.decoder.answers import Generation, Tally
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.drafters.draft_model import draft_vocab, readable
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixRules, speculate
from draftsmith.decoder.drafters.texts import MAX_NGRAM, Branches, find_continuation
from draftsmith.decoder.growth import Beam, Ranking, start_beam
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.eval.simulate.acceptance import (
    Acceptance,
    acceptance,
    check_drafted,
    expected_tallies,
    find_answers,
    simulate,
    text_probs,
)
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, drafting, supervised_rows
from draftsmith.target.target import Target, TargetHead

_TEXTS_PER_PASS = 8


@dataclass(frozen=True)
class Simulation:
    """Expected tallies of each generation for K = 1..max_k (entry K-1). off_text: see `Acceptance`. by_budget: the tallies of each
    generation for the simulator's `budgets`, empty without any."""

    tallies: list[list[Tally]]
    off_text: int
    by_budget: list[list[Tally]]


def to_sample(generation: Generation) -> Tokenized:
    """Return an answer as ids and a mask of its output tokens."""
    prompt, output = generation.request.prompt_ids, generation.output_ids
    mask = torch.zeros(len(prompt) + len(output), dtype=torch.bool)
    mask[len(prompt) :] = True
    ids = torch.tensor([*prompt, *output])
    return Tokenized(ids, mask, generation.request.sample_id, generation.request.slice)


@dataclass(frozen=True)
class Simulator:
    """How the acceptance of a drafter follows from passes of the target over finished answers.

    accept: from the target, what a pass gave, the tokens that each row's answer might have gone on for, the sampling settings and
    max_k to the acceptance of 1..max_k drafts, and behind these of a tree of max_k levels for each of `budgets`.
    layer_ids: the aux layers that it reads. levels: tokens at each depth of its tree, None for a chain and a tree that grows. budgets:
    total_tokens of trees that grow, to simulate them too.
    """

    accept: Callable[[Target, TrainBatch, Sequence[int], Sampling, int], list[Acceptance]]
    layer_ids: tuple[int, ...] = ()
    levels: tuple[int, ...] | None = None
    budgets: tuple[int, ...] = ()

    def __call__(self, target: Target, generations: Sequence[Generation], sampling: Sampling, max_k: int) -> Simulation:
        """Simulate drafts of 1..max_k tokens on finished answers, see `simulate_together`."""
        return simulate_together(target, generations, sampling, [(self, max_k)])[0]


def head_simulator(
    head: DraftHead,
    *,
    tree: StaticTree | DynamicTree | None = None,
    greedy_drafts: bool = False,
    budgets: Sequence[int] = (),
    rule: LengthRule | None = None,
) -> Simulator:
    """Return the simulator of chains, or of a tree cut at depth 1..max_k.

    greedy_drafts: the drafter proposes a chain of argmaxes at every temperature. budgets: see `Simulator`; of a tree that grows from
    one pass, by the probabilities that every depth has whatever the text. rule: chains end where it says.
    """
    own_pass, layers = head.drafts.own_pass, head.reads.layer_ids

    def accept(
        target: Target, batch: TrainBatch, room: Sequence[int], sampling: Sampling, max_k: int
    ) -> list[Acceptance]:
        vocab_W, lengths, found = head.draft_vocab, range(1, max_k + 1), list[Acceptance]()
        with drafting(head):
            if isinstance(tree, DynamicTree):
                trees = [replace(tree, depth=k) for k in lengths]
                trees += [replace(tree, depth=max_k, total_tokens=budget) for budget in budgets]
                apart = [[t for t in trees if t.depth == k] for k in lengths] if own_pass else [trees]
                for some in apart:
                    found += follow_grown(head, batch, target.head, sampling, some, room)
                return found
            for k in lengths if own_pass else [max_k]:
                how: Any = {"tree": tree, "greedy_drafts": greedy_drafts, "rule": rule}
                found.append(acceptance(head(batch, k), batch, target.head, vocab_W, sampling, **how))
        return found if own_pass else found * max_k

    return Simulator(accept, layers, tree.levels if isinstance(tree, StaticTree) else None, tuple(budgets))


@torch.no_grad()
def simulate_together(
    target: Target, generations: Sequence[Generation], sampling: Sampling, drafters: Sequence[tuple[Simulator, int]]
) -> list[Simulation]:
    """Run the target once over finished answers; return the simulation of each drafter for drafts of 1..max_k tokens.

    drafters: each with its max_k. Exact when the text came from this target under `sampling` (from a lossless decoder or
    the target alone).
    """
    order = sorted(range(len(generations)), key=lambda i: len(generations[i].output_ids))
    layers = tuple(sorted({layer for simulator, _ in drafters for layer in simulator.layer_ids}))
    by_index: list[dict[int, tuple[list[Tally], list[Tally]]]] = [{} for _ in drafters]
    off_text = [0 for _ in drafters]
    for indices, batch in target_passes(target, [to_sample(generations[i]) for i in order], layers):
        answers = find_answers(batch)
        assert len(answers) == len(indices)
        requests = [(generations[order[i]].request, generations[order[i]].output_ids) for i in indices]
        room = [request.max_new_tokens - len(output) for request, output in requests]
        for drafter, (simulator, max_k) in enumerate(drafters):
            read = _read(batch, layers, simulator.layer_ids)
            found = simulator.accept(target, read, room, sampling, max_k)
            off_text[drafter] += found[-1].off_text
            lengths = [*range(1, max_k + 1), *(max_k for _ in simulator.budgets)]
            chances = {id(one): one.c_BLK.cpu().numpy() for one in found}  # which all lengths share
            by_shape = []
            for k, one in zip(lengths, found, strict=True):
                found_S = simulate(one.c_BLK, answers, k, simulator.levels and simulator.levels[:k], one.nodes_BLK)
                places = [(a.row, slice(a.first - 1, a.last - 1), slice(k)) for a in answers]
                pairs = zip(found_S, places, strict=True)
                by_shape.append([replace(tally, chances_TK=chances[id(one)][place]) for tally, place in pairs])
            for index, tallies in zip(indices, zip(*by_shape, strict=True), strict=True):
                by_index[drafter][order[index]] = [*tallies[:max_k]], [*tallies[max_k:]]
    every = [[of[i] for i in range(len(generations))] for of in by_index]
    return [
        Simulation([one for one, _ in of], off, [one for _, one in of]) for of, off in zip(every, off_text, strict=True)
    ]


def _read(batch: TrainBatch, layers: tuple[int, ...], chosen: tuple[int, ...]) -> TrainBatch:
    """Return a batch that has the aux layers `layers` with those that a drafter reads, in its order."""
    if chosen == layers:
        return batch
    aux_BLAH = batch.aux.unflatten(-1, (len(layers), -1))
    return replace(batch, aux=aux_BLAH[:, :, [layers.index(layer) for layer in chosen]].flatten(2))


def target_passes(
    target: Target, samples: Sequence[Tokenized], layer_ids: tuple[int, ...] = ()
) -> Iterator[tuple[range, TrainBatch]]:
    """Run the target over texts, some at once, one per row; yield the indices of these and what a head reads of them. Raises UserError
    for texts that the target cannot read."""
    if samples:
        check_samples(target, samples)
    for start in range(0, len(samples), _TEXTS_PER_PASS):
        indices = range(start, min(start + _TEXTS_PER_PASS, len(samples)))
        some = samples[indices.start : indices.stop]
        features = compute_features(target, some, layer_ids, target.dtype)
        yield indices, collate([[f] for f in features], max(len(s.ids) for s in some)).to(target.device)


def draft_model_simulator(model: Target, *, greedy_drafts: bool = False) -> Simulator:
    """Return the simulator of chains of 1..max_k drafts of `model`.

    A draft token depends only on the text before it, not on where the round began. So one pass of the draft model gives
    the acceptance of every token, and position k of a round has that of the token k positions on.
    """

    def accept(
        target: Target, batch: TrainBatch, room: Sequence[int], sampling: Sampling, max_k: int
    ) -> list[Acceptance]:
        rows = supervised_rows(batch, 0).flatten().nonzero().flatten()
        last_RD = model.forward(readable(model, batch.ids)).last.flatten(0, 1)[rows + 1]
        logits_RW = model.head.logits(last_RD)[:, : min(target.vocab_size, model.vocab_size)]
        output, vocab_W = HeadOutput((StepOutput(0, rows, logits_RW),)), draft_vocab(model, target.vocab_size)
        chances = acceptance(output, batch, target.head, vocab_W, sampling, greedy_drafts=greedy_drafts)
        c_BLK = F.pad(chances.c_BLK[..., 0], (0, max_k - 1), value=torch.nan).unfold(1, max_k, 1)
        return [Acceptance(c_BLK, chances.off_text)] * max_k

    return Simulator(accept)


def simulate_prompt_lookup(generations: Sequence[Generation], max_k: int, *, max_ngram: int = MAX_NGRAM) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, see `simulate_from_texts`."""

    def draft(text_L: np.ndarray, most: list[int]) -> list[Branches]:
        start = find_continuation(text_L, max_ngram)
        return [Branches.chain(text_L[start : start + tokens].tolist()) for tokens in most]

    return simulate_from_texts(generations, max_k, draft)


def simulate_suffix_decoding(
    generations: Sequence[Generation], max_k: int, rules: SuffixRules, outputs: Outputs
) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, see `simulate_from_texts`."""

    def draft(text_L: np.ndarray, most: list[int]) -> list[Branches]:
        return [speculate(text_L, tokens, rules, outputs) for tokens in most]

    return simulate_from_texts(generations, max_k, draft)


def simulate_from_texts(
    generations: Sequence[Generation], max_k: int, draft: Callable[[np.ndarray, list[int]], list[Branches]]
) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, exactly: the text alone decides, at any temperature,
    what was proposed and what was accepted.

    draft: from a text up to its root, and the most tokens that each of several drafts may hold, to these drafts.
    """
    tallies = [_simulate_answer(generation, max_k, draft) for generation in generations]
    return Simulation(tallies, off_text=0, by_budget=[[] for _ in tallies])


def _simulate_answer(
    generation: Generation, max_k: int, draft: Callable[[np.ndarray, list[int]], list[Branches]]
) -> list[Tally]:
    prompt, output = generation.request.prompt_ids, generation.output_ids
    ids_L, first, tokens = np.array([*prompt, *output]), len(prompt), len(output) - 1
    c_KTK = np.full((max_k, max(tokens, 1), max_k), np.nan)
    drafted_KT = np.zeros((max_k, tokens))
    for root in range(tokens):
        # A decoder cuts its drafts at the limit of new tokens; it does not know where the answer will end.
        limit = generation.request.max_new_tokens - 1 - root
        drafts = draft(ids_L[: first + root + 1], [min(k, limit) for k in range(1, max_k + 1)])
        for k, branches in enumerate(drafts):
            depths, left = branches.depths, tokens - root
            c_KTK[k, root, : max(depths, default=0)] = 0
            c_KTK[k, root, : branches.followed(output[root + 1 :])] = 1
            drafted_KT[k, root] = sum(depth <= left for depth in depths)
    tallies = []
    for k in range(max_k):
        (tally,) = expected_tallies(c_KTK[k, None], np.array([tokens]), k + 1)
        assert tally.rounds_T is not None
        chances_TK = c_KTK[k, :tokens, : k + 1].astype(np.float16)  # which are 0 or 1
        tallies.append(replace(tally, drafted=float(tally.rounds_T @ drafted_KT[k]), chances_TK=chances_TK))
    return tallies


_CHUNK_CANDIDATES, _CHUNK_ROWS = 2**20, 1024
"""Candidates that are held at once, 60 bytes each; rows, with as many logits as the vocabulary has tokens."""


def with_room(batch: TrainBatch, room_B: Sequence[int], more: int) -> TrainBatch:
    """Return answers, one a row, that go on for so many tokens more of what may still have been emitted, at most `more`, each 0.

    A head that knows a token by its place alone then says what it would have drafted there.
    """
    width = batch.ids.shape[1] + more
    place_L = torch.arange(width, device=batch.ids.device)
    length_B1 = (batch.document >= 0).sum(1, keepdim=True)
    inside_BL = place_L < length_B1 + torch.tensor(room_B, device=batch.ids.device)[:, None].clamp(0, more)
    padded = {
        name: F.pad(x, (0, 0, 0, more) if x.dim() == 3 else (0, more))
        for name, x in vars(batch).items()
        if isinstance(x, Tensor)
    }
    mask_BL = padded["mask"] | (inside_BL & (place_L >= length_B1))
    document_BL = torch.where(inside_BL, batch.document[:, :1], -1)
    return replace(batch, **{**padded, "mask": mask_BL, "document": document_BL, "position": place_L * inside_BL})


@torch.no_grad()
def follow_grown(
    head: DraftHead,
    batch: TrainBatch,
    target_head: TargetHead,
    sampling: Sampling,
    trees: Sequence[DynamicTree],
    room_B: Sequence[int],
) -> list[Acceptance]:
    """Return the acceptance of trees that differ in depth and total_tokens alone, from one pass of a head.

    The tree that every round of finished answers would draft is grown, as the decoder grows it, and the text followed down it. It takes
    its nodes in an order that does not depend on how many it may hold, and without its deepest level it is what the rest begins with. So
    one beam, as wide as the largest tree needs, tells of trees of every size and every depth. The text decides at any temperature which
    node was accepted, since none is drawn.

    batch: answers, one a row. room_B: tokens that each might still have had before its limit, which cuts its last trees.
    """
    largest = replace(trees[0], depth=max(t.depth for t in trees), total_tokens=max(t.total_tokens for t in trees))
    length, depth = batch.ids.shape[1], largest.depth
    longer = with_room(batch, room_B, depth)
    output, ids = head(longer, depth), longer.ids.flatten()
    rows = supervised_rows(batch, 0).flatten().nonzero().flatten()
    _, off_text = text_probs(batch, target_head, rows + 1, sampling)
    found = [
        (
            torch.full((batch.ids.numel(), depth), torch.nan, dtype=torch.float64, device=ids.device),
            torch.zeros(batch.ids.numel(), depth, dtype=torch.float64, device=ids.device),
        )
        for _ in trees
    ]
    most = largest.depth * largest.beam * (1 if largest.rule == "best_first" else largest.branching)
    # Answers of one token each have no row, and no step.
    for some in () if not len(rows) else rows.split(min(_CHUNK_ROWS, max(1, _CHUNK_CANDIDATES // most))):
        at = some // length * (length + depth) + some % length
        ranking, node_RK = _grow(largest, head, output, at, ids)
        for tree, (c, nodes) in zip(trees, found, strict=True):
            c[some], nodes[some] = _take(tree, ranking, node_RK)
    shape = (*batch.ids.shape, depth)
    return [Acceptance(c.view(shape), off_text, nodes.view(shape)) for c, nodes in found]


def _grow(tree: DynamicTree, head: DraftHead, output: HeadOutput, at_R: Tensor, ids: Tensor) -> tuple[Ranking, Tensor]:
    """Return the candidates of each row, and which of them holds the text's token at each depth, [R, K], -2 for none."""
    steps = [step for step in output.steps if len(step.rows)]
    places = [torch.searchsorted(step.rows, at_R).clamp(max=len(step.rows) - 1) for step in steps]
    limit_R = torch.stack([step.rows[p] == at_R for step, p in zip(steps, places, strict=True)]).sum(0)
    beam, node_R, above = start_beam(tree, ids[at_R + 1], limit_R, run=False), torch.full_like(at_R, -1), 0
    nodes = []
    for step, place_R in zip(steps, places, strict=True):
        # A row that lacks the step is past its limit, where no node is taken.
        beam = _extend(beam, step, place_R, head)
        level = beam.levels[-1]
        hit_Rc = (level.tokens_Bc == ids[at_R + 2 + step.offset][:, None]) & (level.parent_Bc == node_R[:, None])
        node_R = torch.where(hit_Rc.any(1), above + hit_Rc.int().argmax(1), -2)
        nodes.append(node_R)
        above += level.tokens_Bc.shape[1]
    return beam.ranking(), F.pad(torch.stack(nodes, 1), (0, tree.depth - len(nodes)), value=-2)


def _extend(beam: Beam, step: StepOutput, place_R: Tensor, head: DraftHead) -> Beam:
    """Add a level of what a step says at some of its rows."""
    if step.selector is None:
        return beam.extend(check_drafted(step.logits_of(place_R))[:, None], head.target_ids)
    inputs = [x[place_R] for x in step.sources]
    return step.selector.extend(beam, check_drafted(step.projected(*inputs)), inputs[0], head.target_ids)


def _take(tree: DynamicTree, ranking: Ranking, node_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, K] twice: 1 where the text follows the tree to a depth, 0 where not and NaN where it has no node; its nodes there."""
    order_RJ = ranking.order_BJ
    depth_RJ, number_J = ranking.depth_J[order_RJ], torch.arange(order_RJ.shape[1], device=order_RJ.device)
    inside_RJ = (depth_RJ <= tree.depth) & (number_J < ranking.count_B[:, None])
    kept_RJ = inside_RJ & (inside_RJ.cumsum(1) < tree.total_tokens)
    nodes_RK = torch.zeros_like(node_RK).scatter_add_(1, depth_RJ - 1, kept_RJ.long())
    place_RJ = torch.empty_like(order_RJ).scatter_(1, order_RJ, number_J.expand_as(order_RJ))
    held_RK = kept_RJ.gather(1, place_RJ.gather(1, node_RK.clamp(min=0))) & (node_RK >= 0)
    return held_RK.double().masked_fill(nodes_RK == 0, torch.nan), nodes_RK.double()
