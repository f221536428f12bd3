"""Medusa: the heads against the paper's formula, the decoder against the training pass, and the simulator."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import PUBLISHED, StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.measure.lossless import check_lossless
from draftsmith.eval.simulate.texts import simulate_generations
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa.drafter import MedusaDrafter
from draftsmith.heads.medusa.head import MedusaHead, build
from draftsmith.heads.medusa.options import MedusaOptions
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.decoding import assert_same, decode_like_alone
from tests.models import tiny_model

pytestmark = pytest.mark.full

BUSH = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


def make_target(**overrides: object) -> Target:
    return Target(tiny_model("llama", **overrides), path="tiny", fingerprint="0")


def requests(count: int, new_tokens: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 150, (4 + i % 13,), generator=generator).tolist() for i in range(count)]
    return [Request.seeded(f"p{i}", "ab"[i % 2], prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@cache
def trained(
    original_lm_head: bool = False, num_layers: int = 1, temperature: float = 0.0
) -> "tuple[Target, MedusaHead]":
    """Heads fitted to some of the target's answers, so that drafts are accepted at every depth."""
    from draftsmith.data.features.extract import compute_features
    from draftsmith.data.packing import collate
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


def test_soft_targets_are_the_targets_distributions_further_on() -> None:
    target, head = trained()
    batch = pack(target, documents_of(target), ())
    scored = head_loss(head(batch, 2), batch, target.head, None, LossSpec(kind="soft_ce", decay=1.0))
    p = target.head.logits(batch.last).double().softmax(-1).flatten(0, 1)
    expected = torch.zeros((), dtype=torch.float64)
    for step in head(batch, 2).steps:
        expected -= (p[step.rows + 1 + step.offset] * step.logits.double().log_softmax(-1)).sum()
    assert float(scored.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("original", [False, True])
def test_training_trains_the_heads_alone(original: bool) -> None:
    target = make_target()
    head = build(MedusaOptions(2, 1, original), target, None)
    batch = pack(target, documents_of(target), ())
    head_loss(head(batch, 2), batch, target.head, None, LossSpec(kind="hard_ce")).loss_sum.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
    assert all(p.grad is None for p in target.model.parameters())
    names = [name for name, _ in head.named_parameters()]
    assert any(name.startswith("lm_heads") for name in names) is not original


def test_training_logits_are_the_decoders() -> None:
    """Row by row, what the drafter sees in the middle of an answer gives the training pass's logits."""
    target, head = trained()
    seen: dict[int, torch.Tensor] = {}

    class Spy(MedusaDrafter):
        def propose(self, state: DecodeState) -> Draft:
            last = state.new_tokens.last_BnD[0, int(state.new_tokens.count_B[0]) - 1]
            seen[int(state.length_B[0]) - 1] = torch.stack([head.logits(i, last) for i in range(4)])
            return super().propose(state)

    (generation,) = decode_batch(target, Spy(head, 4, tree=BUSH), requests(1), Sampling()).generations
    text = torch.tensor([[*generation.request.prompt_ids, *generation.output_ids]])
    last = target.forward(text).last[0]
    assert len(seen) == len(generation.rounds) > 2
    for t, logits in seen.items():
        expected = torch.stack([head.logits(i, last[t]) for i in range(4)])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


TREES = [None, BUSH, PUBLISHED["medusa_63"], StaticTree.of("line", [[0], [0, 0]])]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name if tree else "chain")
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_drafts_are_lossless_and_simulated_exactly(tree: StaticTree | None, batch: int) -> None:
    target, head = trained()
    c = head_system("medusa", head, 4, 8, tree=tree)
    k = c.num_speculative_tokens
    found = decode_like_alone(target, lambda: c.make(k), requests(10), batch)
    decoded = total([tally_generation(g, k) for g in found], k)
    simulated = total(
        [t[k - 1] for t in simulate_generations(target, head, found, Sampling(), k, tree=tree).tallies], k
    )
    # The published tree's last level has two nodes, which this head may not reach.
    assert decoded.accepted_K[1 if tree is PUBLISHED["medusa_63"] else -1] > 0
    assert_same(decoded, simulated)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cut_tree_is_simulated_as_it_decodes(depth: int) -> None:
    target, head = trained()
    cut = head_system("medusa", head, 4, 8, tree=BUSH).make(depth)
    found = decode_batch(target, cut, requests(6), Sampling()).generations
    simulated = simulate_generations(target, head, found, Sampling(), 3, tree=BUSH).tallies
    assert_same(
        total([tally_generation(g, depth) for g in found], depth), total([t[depth - 1] for t in simulated], depth)
    )


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=30, top_p=0.9)], ids=str)
@pytest.mark.parametrize("tree", [None, BUSH], ids=["chain", "bush"])
def test_simulation_predicts_sampled_decoding(sampling: Sampling, tree: StaticTree | None) -> None:
    target, head = trained(temperature=1.0)
    c = head_system("medusa", head, 3, 3, tree=tree)
    found = decode_batch(target, c.make(3), requests(48), sampling).generations
    decoded = [tally_generation(g, 3) for g in found]
    simulated = [t[2] for t in simulate_generations(target, head, found, sampling, 3, tree=tree).tallies]
    assert total(decoded, 3).accepted_K[0] > 20, "too few accepted drafts to mean something"
    if tree is not None:
        # Given the text it is certain which node was accepted.
        assert_same(total(decoded, 3), total(simulated, 3))
    else:
        errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
        assert 0 < abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


def test_a_wider_tree_is_accepted_more_often() -> None:
    target, head = trained()
    narrow, wide = (
        total([tally_generation(g, 3) for g in decode_batch(target, d, requests(8), Sampling()).generations], 3).tau
        for d in (MedusaDrafter(head, 3), MedusaDrafter(head, 3, tree=BUSH))
    )
    assert narrow is not None
    assert wide is not None
    assert wide > narrow


def test_typical_acceptance_is_lossy_and_takes_more() -> None:
    target, head = trained(temperature=1.0)
    group, sampling = requests(12), Sampling(1.0)
    exact = decode_batch(target, MedusaDrafter(head, 3, tree=BUSH), group, sampling).generations
    rule = Typical(0.01, 0.3)
    lossy = decode_batch(target, MedusaDrafter(head, 3, tree=BUSH), group, sampling, rule).generations
    assert sum(len(g.rounds) for g in lossy) < sum(len(g.rounds) for g in exact)
    assert [g.output_ids for g in lossy] != [g.output_ids for g in exact]


def test_losslessness_of_several_drafters_is_checked_by_name() -> None:
    target, head = trained()
    lineup = [head_system("medusa", head, 3, 4), head_system("medusa", head, 3, 4, tree=BUSH)]
    found = check_lossless(target, lineup, requests(4))
    assert list(found) == ["medusa", "medusa bush"]
    for scopes in found.values():
        assert set(scopes) == {"overall", "a", "b"}
        assert scopes["overall"].equal == scopes["overall"].checked == 4
        assert scopes["overall"].tau == pytest.approx(scopes["overall"].tau_simulated)


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    _, head = trained()
    deep = StaticTree.of("deep", [[0] * n for n in range(1, 6)])
    with pytest.raises(UserError, match="The tree deep is 5 deep but medusa drafts 4 tokens at most"):
        head_system("medusa", head, 4, 8, tree=deep)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_saved_head_comes_back(tmp_path: Path, original: bool, num_layers: int) -> None:
    target, head = trained(original, num_layers)
    save_head(head, tmp_path / "head", target)
    again = load_head(tmp_path / "head", target)
    batch = pack(target, documents_of(target), ())
    for a, b in zip(head(batch, 4).steps, again(batch, 4).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"head\.num_heads is 0"):
        MedusaOptions(num_heads=0)
