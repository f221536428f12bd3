"""Grow the tree that every round of finished answers would draft, as the decoder grows it, and follow the text down it.

A tree takes its nodes in an order that does not depend on how many it may hold, and without its deepest level it is what the rest
begins with. So one beam, as wide as the largest tree needs, tells of trees of every size and every depth. The text decides at any
temperature which node was accepted, since none is drawn.

Shapes: B rows, L tokens, K depths, R rows of the flat [B*L], J candidates.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.growth import Beam, Ranking, start_beam
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.eval.simulate.acceptance import Acceptance, text_probs
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, supervised_rows
from draftsmith.target.target import TargetHead

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
    for some in rows.split(min(_CHUNK_ROWS, max(1, _CHUNK_CANDIDATES // most))):
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
        return beam.extend(step.logits_of(place_R)[:, None], head.target_ids)
    inputs = [x[place_R] for x in step.sources]
    return step.selector.extend(beam, step.projected(*inputs), inputs[0], head.target_ids)


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
