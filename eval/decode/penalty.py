"""What a repetition penalty is for: the tokens seen so far, at every node of a draft and at every place of a text.

Shapes: B rows, N nodes, s tokens seen, R places in a text, L tokens, V target vocab.
"""

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.draft import Draft
from draftsmith.eval.decode.sampling import weaken


def penalize_nodes(draft: Draft, logits_BNV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Return `logits_BNV` with the penalty at every node on the tokens `seen_BV` (the root's among them) and on those
    of the path to the node, its own included.

    Few of V tokens are seen, so only their logits are worked out: `penalize` at every node takes five times as long.
    """
    row_s, token_s = seen_BV.nonzero(as_tuple=True)
    penalized_BNV = logits_BNV.clone()
    penalized_BNV[row_s, :, token_s] = weaken(logits_BNV[row_s, :, token_s], penalty)
    if draft.tokens_BN.shape[1] == 1:
        return penalized_BNV
    # The root's token stands in for those that are not on the path.
    path_BNN = torch.where(draft.ancestors_BNN, draft.tokens_BN[:, None], draft.tokens_BN[:, :1, None])
    return penalized_BNV.scatter_(2, path_BNN, weaken(logits_BNV.gather(2, path_BNN), penalty))


def seen_in_text(batch: TrainBatch, at_R: Tensor, vocab_size: int) -> Tensor:
    """Return bool [R, V]: the tokens of a place's own document up to and including the place; `at_R` are flat positions
    of [B*L]."""
    length = batch.ids.shape[1]
    row_R, column_R1 = at_R // length, (at_R % length)[:, None]
    document_RL, ids_RL = batch.document[row_R], batch.ids[row_R]
    before_RL = document_RL == document_RL.gather(1, column_R1)
    before_RL &= torch.arange(length, device=at_R.device) <= column_R1
    # The place's own token stands in for those that do not count.
    ids_RL = torch.where(before_RL, ids_RL, ids_RL.gather(1, column_R1))
    return torch.zeros(len(at_R), vocab_size, dtype=torch.bool, device=at_R.device).scatter_(1, ids_RL, True)
