"""Growing a dynamic tree (Li et al., "EAGLE-2", 2024, section 4): a beam by cumulative probability, then the best of all.

Ties go to the earlier candidate, so that no child is kept without its parent: candidates are numbered by level, and a
child is never more likely than its parent. Shapes: B rows, m nodes of the beam (1, then k), k branching, T nodes run so
far, c candidates of one level, J all candidates, N nodes kept (the root included), W draft vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.eval.draft import Draft
from draftsmith.eval.trees import DynamicTree


@dataclass(frozen=True)
class Beam:
    """The tree while it grows.

    tokens_Bm, score_Bm, number_Bm: the best nodes of the last level, their cumulative log-probabilities and candidate
    numbers (-1 is the root). parent_Bm: their parents' places in the beam before. ancestors_BmT: which of the nodes run
    so far, these included, are above each or itself. candidates: per level tokens, scores and parents' numbers [B, c].
    """

    tree: DynamicTree
    root_B: Tensor
    limit_B: Tensor
    tokens_Bm: Tensor
    score_Bm: Tensor
    number_Bm: Tensor
    parent_Bm: Tensor
    ancestors_BmT: Tensor
    candidates: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()

    def extend(self, logits_BmW: Tensor, target_ids: Callable[[Tensor], Tensor]) -> "Beam":
        """Try the most likely tokens after every node of the beam; the best of these are the new beam."""
        branching = min(self.tree.branching, logits_BmW.shape[-1])
        best = logits_BmW.float().log_softmax(-1).topk(branching, -1)
        score_Bc = (self.score_Bm[..., None] + best.values).flatten(1)
        tokens_Bc = target_ids(best.indices).flatten(1)
        number_Bc = self.number_Bm.repeat_interleave(branching, 1)
        first = sum(scores.shape[1] for _, scores, _ in self.candidates)
        width = min(self.tree.branching, score_Bc.shape[1])
        chosen = score_Bc.sort(dim=1, descending=True, stable=True)
        place_Bm = chosen.indices[:, :width]
        parent_Bm = place_Bm // branching
        own_BmT = torch.eye(width, dtype=torch.bool, device=place_Bm.device).expand(len(place_Bm), -1, -1)
        above_BmT = self.ancestors_BmT.gather(1, parent_Bm[..., None].expand(-1, -1, self.ancestors_BmT.shape[2]))
        return replace(
            self,
            tokens_Bm=tokens_Bc.gather(1, place_Bm),
            score_Bm=chosen.values[:, :width],
            number_Bm=first + place_Bm,
            parent_Bm=parent_Bm,
            ancestors_BmT=torch.cat([above_BmT, own_BmT], 2),
            candidates=(*self.candidates, (tokens_Bc, score_Bc, number_Bc)),
        )

    def draft(self) -> Draft:
        """Keep the best candidates of all levels; nodes deeper than a row may still emit are padding."""
        tokens_BJ, score_BJ, parent_BJ = (torch.cat(x, 1) for x in zip(*self.candidates, strict=True))
        depths = [level for level, (tokens, _, _) in enumerate(self.candidates, 1) for _ in range(tokens.shape[1])]
        depth_J = torch.tensor(depths, device=tokens_BJ.device)
        score_BJ = score_BJ.masked_fill(depth_J > self.limit_B[:, None], -torch.inf)
        kept = min(self.tree.total_tokens - 1, len(depths))
        place_BN = score_BJ.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        # Parents' numbers among all candidates become numbers among the kept ones; 0 is the root.
        node_BJ = torch.zeros_like(parent_BJ).scatter(
            1, place_BN, torch.arange(1, kept + 1, device=place_BN.device).expand_as(place_BN)
        )
        parent_BN = parent_BJ.gather(1, place_BN)
        parents_BN = torch.where(parent_BN < 0, 0, node_BJ.gather(1, parent_BN.clamp(min=0)))
        count_B = 1 + (score_BJ.gather(1, place_BN) > -torch.inf).sum(1)
        root_B1 = self.root_B[:, None]
        return Draft(
            torch.cat([root_B1, tokens_BJ.gather(1, place_BN)], 1),
            torch.cat([torch.full_like(root_B1, -1), parents_BN], 1),
            count_B,
            linear=self.tree.branching == 1,
        )


def start_beam(tree: DynamicTree, root_B: Tensor, limit_B: Tensor) -> Beam:
    """Return the beam that holds the root alone."""
    zeros_B1 = torch.zeros_like(root_B)[:, None]
    nothing_B10 = torch.zeros(len(root_B), 1, 0, dtype=torch.bool, device=root_B.device)
    score_B1 = torch.zeros(len(root_B), 1, device=root_B.device)
    return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 1, zeros_B1, nothing_B10)
