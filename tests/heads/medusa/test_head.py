"""Medusa: the heads against the paper's formula, cut trees, typical acceptance."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.drafter import MedusaDrafter
from draftsmith.heads.medusa.head import MedusaHead, build
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.models import make_target

pytestmark = pytest.mark.full

BUSH = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


def requests(count: int, new_tokens: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 150, (4 + i % 13,), generator=generator).tolist() for i in range(count)]
    return [Request.seeded(f"p{i}", "ab"[i % 2], prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@cache
def trained(
    original_lm_head: bool = False, num_layers: int = 1, temperature: float = 0.0
) -> "tuple[Target, MedusaHead]":
    """Heads fitted to some of the target's answers, so that drafts are accepted at every depth."""
    from draftsmith.data.batch import collate
    from draftsmith.data.features.extract import compute_features
    from draftsmith.eval.simulate.texts import to_sample

    target = make_target() if temperature == 0 else make_target(initializer_range=0.06)
    answers = decode_batch(target, TargetAlone(), requests(8 if temperature == 0 else 16), Sampling(temperature))
    features = compute_features(target, [to_sample(g) for g in answers.generations], (), target.dtype)
    batch = collate([[f] for f in features], max(len(f.ids) for f in features))
    torch.manual_seed(0)
    head = build(MedusaOptions(4, num_layers, original_lm_head), target, None)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(40 if temperature == 0 else 12):
        scored = head_loss(head(batch, 4), batch, target.head, None, LossSpec(kind="hard_ce"))
        optimizer.zero_grad()
        (scored.loss_sum / scored.rows).backward()
        optimizer.step()
    return target, head.eval()


@pytest.mark.parametrize("original", [False, True])
def test_new_heads_repeat_the_targets_own_prediction(original: bool) -> None:
    target = make_target()
    head = build(MedusaOptions(3, 2, original), target, None)
    batch = pack(target, documents_of(target), ())
    for step in head(batch, 3).steps:
        expected = target.head.logits(batch.last.flatten(0, 1)[step.rows])
        torch.testing.assert_close(step.logits, expected)


def test_blocks_are_modules_of_their_own() -> None:
    """The reference shares one block (`[block] * n`): training one would train all of them."""
    head = build(MedusaOptions(2, 3), make_target(), None)
    weights = [p for name, p in head.named_parameters() if name.endswith("linear.weight")]
    assert len({w.data_ptr() for w in weights}) == 6


@pytest.mark.parametrize("decay", [0.8, 0.5])
def test_loss_is_the_papers(decay: float) -> None:
    """sum_i decay^i CE(head_i(y_t), x_{t+2+i}) over supervised rows, written out with loops."""
    target, head = trained()
    batch = pack(target, documents_of(target), ())
    scored = head_loss(head(batch, 4), batch, target.head, None, LossSpec(kind="hard_ce", decay=decay))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        for b, t in supervised_rows(batch, i).nonzero().tolist():
            y = batch.last[b, t]
            for block in head.blocks[i]:
                y = y + F.silu(block.linear.weight @ y + block.linear.bias)
            logits = head.lm_heads[i].weight @ y
            expected += decay**i * -logits.double().log_softmax(-1)[batch.ids[b, t + 2 + i]]
    assert float(scored.loss_sum.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_typical_acceptance_is_lossy_and_takes_more() -> None:
    target, head = trained(temperature=1.0)
    group, sampling = requests(12), Sampling(1.0)
    exact = decode_batch(target, MedusaDrafter(head, 3, tree=BUSH), group, sampling).generations
    rule = Typical(0.01, 0.3)
    lossy = decode_batch(target, MedusaDrafter(head, 3, tree=BUSH), group, sampling, rule).generations
    assert sum(len(g.rounds) for g in lossy) < sum(len(g.rounds) for g in exact)
    assert [g.output_ids for g in lossy] != [g.output_ids for g in exact]


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    _, head = trained()
    deep = StaticTree.of("deep", [[0] * n for n in range(1, 6)])
    with pytest.raises(UserError, match="The tree deep is 5 deep but medusa drafts 4 tokens at most"):
        head_system("medusa", head, 4, 8, tree=deep)
