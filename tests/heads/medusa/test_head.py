"""Medusa: the heads against the paper's formula, cut trees, typical acceptance."""

import pytest
import torch
import torch.nn.functional as F

from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import MedusaDrafter, build
from tests.batches import documents_of, pack
from tests.eval.conformance.test_suite import spec
from tests.exports import make_medusa
from tests.models import make_target

pytestmark = pytest.mark.full

BUSH = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


def test_blocks_are_modules_of_their_own() -> None:
    """The reference shares one block (`[block] * n`): training one would train all of them."""
    head = build(MedusaOptions(2, 3), make_target(), None)
    weights = [p for name, p in head.named_parameters() if name.endswith("linear.weight")]
    assert len({w.data_ptr() for w in weights}) == 6


@pytest.mark.parametrize("decay", [0.8, 0.5])
def test_loss_is_the_papers(decay: float) -> None:
    """sum_i decay^i CE(head_i(y_t), x_{t+2+i}) over supervised rows, written out with loops."""
    target = make_target()
    head, batch = make_medusa(target), pack(target, documents_of(target), ())
    scored = head_loss(head(batch, 3), batch, target.head, None, LossSpec(kind="hard_ce", decay=decay))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for b, t in supervised_rows(batch, i).nonzero().tolist():
            y = batch.last[b, t]
            for block in head.blocks[i]:
                y = y + F.silu(block.linear.weight @ y + block.linear.bias)
            logits = head.lm_heads[i].weight @ y
            expected += decay**i * -logits.double().log_softmax(-1)[batch.ids[b, t + 2 + i]]
    assert float(scored.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_typical_acceptance_is_lossy_and_takes_more() -> None:
    made, sampling = spec("medusa"), Sampling(1.0)
    drafter = MedusaDrafter(made.head, 3, tree=BUSH)
    exact = decode_batch(made.target, drafter, made.requests, sampling).generations
    lossy = decode_batch(made.target, drafter, made.requests, sampling, Typical(0.01, 0.3)).generations
    assert sum(len(g.rounds) for g in lossy) < sum(len(g.rounds) for g in exact)
    assert [g.output_ids for g in lossy] != [g.output_ids for g in exact]


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    deep = StaticTree.of("deep", [[0] * n for n in range(1, 6)])
    with pytest.raises(UserError, match="The tree deep is 5 deep but medusa drafts 3 tokens at most"):
        head_system("medusa", make_medusa(make_target()), 3, 8, tree=deep)
