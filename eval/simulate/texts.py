"""Simulate drafters on finished answers: one pass of the target, and one of each head or draft model, give their expected tallies;
of those that read texts the text alone does.

Shapes: B answers of a pass, L tokens, A aux layers, H hidden size, K speculative tokens, R supervised rows, T roots, W ids of the
distribution.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import check_samples, compute_features
from draftsmith.decoder.answers import Generation, Tally
from draftsmith.decoder.drafters.draft_model import draft_vocab, readable
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixRules, speculate
from draftsmith.decoder.drafters.texts import MAX_NGRAM, Branches, find_continuation
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.eval.simulate.acceptance import Acceptance, acceptance, expected_tallies, find_answers, simulate
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, drafting, supervised_rows
from draftsmith.target.target import Target

_TEXTS_PER_PASS = 8


@dataclass(frozen=True)
class Simulation:
    """Expected tallies of each generation for K = 1..max_k (entry K-1). off_text: see `Acceptance`."""

    tallies: list[list[Tally]]
    off_text: int


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

    accept: from the target, what a pass gave, the sampling settings and max_k to the acceptance of max_k drafts.
    layer_ids: the aux layers that it reads. levels: tokens at each depth of its tree, None for a chain. own_pass: see `Drafts`.
    """

    accept: Callable[[Target, TrainBatch, Sampling, int], Acceptance]
    layer_ids: tuple[int, ...] = ()
    levels: tuple[int, ...] | None = None
    own_pass: bool = False

    def __call__(self, target: Target, generations: Sequence[Generation], sampling: Sampling, max_k: int) -> Simulation:
        """Simulate drafts of 1..max_k tokens on finished answers, see `simulate_together`."""
        return simulate_together(target, generations, sampling, [(self, max_k)])[0]


def head_simulator(head: DraftHead, *, tree: StaticTree | None = None, greedy_drafts: bool = False) -> Simulator:
    """Return the simulator of chains, or of a static tree cut at depth 1..max_k.

    greedy_drafts: the drafter proposes a chain of argmaxes at every temperature.
    """

    def accept(target: Target, batch: TrainBatch, sampling: Sampling, max_k: int) -> Acceptance:
        vocab_W = head.draft_vocab
        with drafting(head):
            output = head(batch, max_k)
            return acceptance(output, batch, target.head, vocab_W, sampling, tree=tree, greedy_drafts=greedy_drafts)

    return Simulator(accept, head.reads.layer_ids, None if tree is None else tree.levels, head.drafts.own_pass)


def simulate_generations(
    target: Target,
    head: DraftHead,
    generations: Sequence[Generation],
    sampling: Sampling,
    max_k: int,
    *,
    tree: StaticTree | None = None,
    greedy_drafts: bool = False,
) -> Simulation:
    """Simulate the drafts of `head` on finished answers, see `head_simulator` and `simulate_together`."""
    return head_simulator(head, tree=tree, greedy_drafts=greedy_drafts)(target, generations, sampling, max_k)


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
    by_index: list[dict[int, list[Tally]]] = [{} for _ in drafters]
    off_text = [0 for _ in drafters]
    for indices, batch in target_passes(target, [to_sample(generations[i]) for i in order], layers):
        answers = find_answers(batch)
        assert len(answers) == len(indices)
        for drafter, (simulator, max_k) in enumerate(drafters):
            read, lengths = _read(batch, layers, simulator.layer_ids), range(1, max_k + 1)
            passes = [simulator.accept(target, read, sampling, k) for k in (lengths if simulator.own_pass else [max_k])]
            off_text[drafter] += passes[-1].off_text
            by_k = [
                simulate(
                    passes[-1 if len(passes) == 1 else k - 1].c_BLK,
                    answers,
                    k,
                    simulator.levels and simulator.levels[:k],
                )
                for k in lengths
            ]
            by_answer = zip(indices, zip(*by_k, strict=True), strict=True)
            by_index[drafter] |= {order[index]: list(tallies) for index, tallies in by_answer}
    everywhere = range(len(generations))
    return [Simulation([of[i] for i in everywhere], off) for of, off in zip(by_index, off_text, strict=True)]


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

    def accept(target: Target, batch: TrainBatch, sampling: Sampling, max_k: int) -> Acceptance:
        rows = supervised_rows(batch, 0).flatten().nonzero().flatten()
        last_RD = model.forward(readable(model, batch.ids)).last.flatten(0, 1)[rows + 1]
        logits_RW = model.head.logits(last_RD)[:, : min(target.vocab_size, model.vocab_size)]
        output, vocab_W = HeadOutput((StepOutput(0, rows, logits_RW),)), draft_vocab(model, target.vocab_size)
        chances = acceptance(output, batch, target.head, vocab_W, sampling, greedy_drafts=greedy_drafts)
        c_BLK = F.pad(chances.c_BLK[..., 0], (0, max_k - 1), value=torch.nan).unfold(1, max_k, 1)
        return Acceptance(c_BLK, chances.off_text)

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
    return Simulation([_simulate_answer(generation, max_k, draft) for generation in generations], off_text=0)


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
        tallies.append(replace(tally, drafted=float(tally.rounds_T @ drafted_KT[k])))
    return tallies
