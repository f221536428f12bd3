"""DFlash2: a new head against DFlash, convolutions and selector by their formulas, a window, drafts of every length, and its figures."""

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, NewTokens
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.dflash2.head import DFlash2Drafter, DFlash2Options, GroupedConv, build
from draftsmith.heads.export.export import convert_head, same_logits
from draftsmith.heads.losses.divergences import Teacher, choose
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.schedule import build_optimizers
from tests.heads.blocks import LOSSES, make_head, make_target, packed, requests, trained

pytestmark = pytest.mark.full
SMALL = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def test_a_new_head_is_a_dflash_head() -> None:
    """Bit by bit: the drafts' logits at its candidates, and the gradients that both have."""
    target = make_target()
    plain, batch = make_head("dflash", target), packed(target)
    same = {field.name: getattr(plain.options, field.name) for field in fields(BlockOptions)}
    head = build(DFlash2Options(**same, **SMALL), target, None)
    assert not head.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    spec = replace(LOSSES["dflash"], selector_weight=0.0)
    ours, theirs = head.eval()(batch, 4), plain(batch, 4)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        assert torch.equal(a.projected(*a.sources), b.logits)
        best = b.logits.topk(SMALL["selector_top_k"]).indices
        assert torch.equal(a.logits.gather(1, best), b.logits.gather(1, best))
        assert int(a.logits.isfinite().sum()) == best.numel()
    losses = [head_loss(output, batch, target.head, None, spec).loss_sum for output in (ours, theirs)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    for name, p in plain.named_parameters():
        assert p.grad is None or torch.equal(found[name], p.grad), name


def test_a_convolution_is_its_formula() -> None:
    torch.manual_seed(0)
    conv, x, normed = GroupedConv(8, 3, 4), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    for p in conv.parameters():
        torch.nn.init.normal_(p)
    base, delta = conv.base_kernel.detach(), (normed @ conv.kernel_projection.weight.detach().T).view(2, 5, 2, 3, 2)
    for side in (0, 1):
        found = conv(x, normed, side).detach()
        for b in range(2):
            for i in range(5):
                for c in range(8):
                    taps = range(min(3, i + 1))
                    kernel = [float(base[side, t, c] + delta[b, i, side, t, c // 4]) for t in taps]
                    expected = sum(k * float(x[b, i - t, c]) for t, k in enumerate(kernel))
                    assert float(found[b, i, c]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "taps"), [(5, 3), (2, 3), (1, 2), (4, 1)])
def test_the_gradients_of_a_convolution_are_those_of_its_formula(slots: int, taps: int) -> None:
    conv = GroupedConv(8, taps, 4).double()
    for p in conv.parameters():
        torch.nn.init.normal_(p)
    x, normed = (torch.randn(2, slots, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    delta = conv.kernel_projection(normed).unflatten(-1, (2, taps, 2))[..., 1, :, :]
    kernel = conv.base_kernel[1] + delta.repeat_interleave(4, -1)
    moved = [torch.nn.functional.pad(x, (0, 0, tap, 0))[:, :slots] for tap in range(taps)]
    expected = sum(kernel[..., tap, :] * moved[tap] for tap in range(taps))
    weights, given = torch.randn_like(x), (x, normed, *conv.parameters())
    grads = [torch.autograd.grad((y * weights).sum(), given) for y in (conv(x, normed, 1), expected)]
    for found, other in zip(*grads, strict=True):
        torch.testing.assert_close(found, other)


def test_a_convolution_keeps_its_inputs_alone_for_the_backward_pass() -> None:
    conv = GroupedConv(64, 3, 16)
    x, normed = (torch.randn(4, 8, 64, requires_grad=True) for _ in range(2))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        conv(x, normed, 1)
    own = sum(p.nbytes for p in conv.parameters())
    # Beside inputs and weights a delta of each tap and group.
    assert x.nbytes < sum(kept.values()) <= 2 * x.nbytes + own + 3 * x.nbytes // 16


@torch.no_grad()
def test_each_draft_length_has_a_pass_of_its_own() -> None:
    """Decoded and simulated rounds are the same for every length, which a longer draft's beginning does not tell."""
    target, head, batch = trained("dflash2")
    shorter, longer = (head(batch, k).steps[0].logits for k in (1, 3))
    assert not torch.equal(shorter.argmax(-1), longer.argmax(-1))
    decoded = {k: decode_batch(target, DFlash2Drafter(head, k), requests(8), Sampling()).generations for k in (1, 2, 3)}
    simulated = head_simulator(head)(target, decoded[3], Sampling(), 3).tallies
    for k, generations in decoded.items():
        assert [g.output_ids for g in generations] == [g.output_ids for g in decoded[3]]
        tau = total([tally_generation(g, k) for g in generations], k).tau
        assert tau is not None
        assert tau > 1.1
        assert total([tallies[k - 1] for tallies in simulated], k).tau == pytest.approx(tau)


@torch.no_grad()
def test_a_slot_sees_what_is_less_than_its_window_behind_it() -> None:
    """As in a text that begins there."""
    target = make_target(num_hidden_layers=8)
    options = {**SMALL, "num_layers": 1, "block_size": 3, "sliding_window": 6, "conv_kernel_size": 1}
    head, batch = make_head("dflash2", target, **options), packed(target)
    at = next(int(x) for x in head(batch, 2).steps[1].rows if int(batch.position.flatten()[x]) >= 6)
    spread = batch.aux.flatten(0, 1)

    def states(change: int) -> Tensor:
        """The last slot's, which is 3 behind the row, with the aux streams of a token changed."""
        aux = spread.clone()
        aux[change] += 1.0
        step = head(replace(batch, aux=aux.view_as(batch.aux)), 2).steps[1]
        return step.sources[0][step.rows == at]

    same = states(0)
    assert torch.equal(states(at - 3), same), "6 positions behind the slot"
    assert not torch.allclose(states(at - 2), same, atol=1e-6), "5 positions behind it"


@torch.no_grad()
def test_a_trees_nodes_have_the_children_of_their_own_tokens() -> None:
    """The best of all paths of three tokens, each by the scores behind the token before; the candidates are those of the slot."""
    head = deepcopy(trained("dflash2")[1])
    head.candidate_selector.successor_codebook.mul_(3)  # so that what is best depends on the token before
    states, root = (
        torch.randn(1, 3, head.config.hidden_size, generator=torch.Generator().manual_seed(0)),
        torch.tensor([7]),
    )
    nothing = NewTokens(root[:, None], torch.zeros(1, 1, 0), torch.zeros(1, 1, 0), torch.ones(1).long())
    asked = DecodeState(root, torch.tensor([9]), torch.tensor([3]), torch.tensor([1]), nothing, Sampling())
    draft = DFlash2Drafter(head, 3, tree=DynamicTree(3, 3, 12, "best_first")).draft(asked, states)
    worth, level = dict[tuple[int, ...], float](), {(): 0.0}
    for k in range(3):
        after = {}
        for path, score in level.items():
            before = torch.tensor([path[-1] if path else 7])
            query = head.candidate_selector.queries(states[:, k], before)
            scores = head.candidate_selector.chosen(head.logits(states[:, k]), states[:, k], query)
            best = scores.log_softmax(-1)[0].topk(3)
            after |= {(*path, int(i)): score + float(p) for p, i in zip(best.values, best.indices, strict=True)}
        worth |= (level := after)
    found = [()]
    for token, parent in zip(draft.tokens_BN[0, 1:].tolist(), draft.parents_BN[0, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    assert set(found[1:]) == {*sorted(worth, key=lambda path: -worth[path])[:11]}
    seconds = {path[0]: {other[1] for other in worth if len(other) == 2 and other[0] == path[0]} for path in worth}
    assert len({frozenset(tokens) for tokens in seconds.values()}) > 1, "siblings have other children"


@pytest.mark.slow
def test_sampled_answers_with_a_tree_follow_the_targets_distribution() -> None:
    """The second tokens of many answers from one prompt, behind the likeliest first one."""
    target, head, _ = trained("dflash2", 1.0)
    asked = [replace(requests(1)[0], sample_id=f"s{i}", key=7919 * i + 1, max_new_tokens=3) for i in range(3000)]
    drafter = DFlash2Drafter(head, 2, tree=DynamicTree(2, 3, 8, "best_first"))
    found = [g.output_ids for g in decode_batch(target, drafter, asked, Sampling(1.0), rows=500).generations]
    likely = int(torch.tensor([ids[0] for ids in found]).bincount().argmax())
    second = torch.tensor([ids[1] for ids in found if ids[0] == likely and len(ids) > 1])
    text = torch.tensor([[*asked[0].prompt_ids, likely]])
    expected = len(second) * target.head.logits(target.forward(text).last[0, -1]).softmax(-1).double()
    counts = second.bincount(minlength=len(expected)).double()
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert len(second) > 40
    assert chi < len(expected) + 5 * (2 * len(expected)) ** 0.5


def test_the_selector_learns_its_label_among_the_candidates() -> None:
    target = make_target()
    head = make_head("dflash2", target, **SMALL)
    torch.manual_seed(0)
    logits, query = torch.randn(6, 160), torch.randn(6, 6)
    best = logits.topk(5).indices
    teacher_p = torch.randn(6, 160).softmax(-1)
    label = torch.tensor([int(best[0, 0]), int(best[1, 4]), 7, -1, int(best[4, 2]), 9])
    teacher = Teacher(teacher_p, teacher_p.sum(-1), torch.zeros(6), label, label)
    found = choose(logits.log_softmax(-1), teacher, label, head.candidate_selector, [query])
    B = head.candidate_selector.successor_codebook.detach()
    for r in range(6):
        tokens = best[r].tolist()
        drafted = torch.stack([logits[r, b] + query[r] @ B[b] for b in tokens])
        p = torch.stack([teacher_p[r, b] for b in tokens])
        assert float(found.acceptance_R[r]) == pytest.approx(
            float(torch.minimum(drafted.softmax(-1), p).sum()), abs=1e-5
        )
        assert bool(found.correct_R[r]) == (tokens[int(drafted.argmax())] == int(label[r]))
        assert bool(found.recalled_R[r]) == (int(label[r]) in tokens)
        if label[r] >= 0 and int(label[r]) not in tokens:
            tokens[-1] = int(label[r])
        scores = torch.stack([logits[r, b] + query[r] @ B[b] for b in tokens])
        expected = -scores.log_softmax(-1)[tokens.index(int(label[r]))] if label[r] >= 0 else torch.zeros(())
        assert found.loss_R[r].item() == pytest.approx(float(expected), abs=1e-5)


def test_weight_decay_leaves_the_gains_of_convolutions_alone() -> None:
    head = make_head("dflash2", make_target(), **SMALL)
    names = {id(p): name for name, p in head.named_parameters()}
    for optimizer in build_optimizers(head, TrainSpec(weight_decay=0.1)):
        for group in optimizer.param_groups:
            for name in (names[id(p)] for p in group["params"]):
                assert ("base_kernel" in name or "norm" in name) == (group["weight_decay"] == 0), name


@pytest.mark.parametrize("labels", ["teacher", "data"])
def test_both_losses_have_their_own_weights(labels: Any) -> None:
    target = make_target()
    head, batch = make_head("dflash2", target, **SMALL, block_size=4), packed(target)
    spec = LossSpec(kind="hard_ce", slot_weights="dpace", normalize="weights", selector_labels=labels)
    parts = [replace(spec, selector_weight=w) for w in (0.0, 1.0, 3.0)]
    output = head(batch, 3)
    none, one, three = (float(head_loss(output, batch, target.head, None, part).loss_sum.detach()) for part in parts)
    assert three - none == pytest.approx(3 * (one - none), rel=1e-4)
    assert one > none
    whole, pieces = (head_loss(output, batch, target.head, None, spec, piece_size=n) for n in (None, 2000))
    torch.testing.assert_close(whole.loss_sum, pieces.loss_sum)
    assert torch.equal(whole.selector, pieces.selector)
    gradients = []
    for scored in (whole, pieces):
        head.zero_grad()
        (scored.loss_sum / loss_divisor(batch, spec, head)).backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conv_group_size": 7}, "head.conv_group_size is 7, which does not divide the width of the target tiny, 64"),
        ({"selector_top_k": 161}, "head.selector_top_k is 161, but the head drafts among 160 tokens"),
        ({"sliding_window": 8}, "head.sliding_window is 8, which a block of 8 slots fills"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        build(DFlash2Options(**({"layer_ids": [1], "mask_token_id": 3} | SMALL | options)), make_target(), None)
    assert "\n" not in str(caught.value)


def test_an_export_with_other_weights_is_noticed_though_its_candidates_are_others() -> None:
    target = make_target()
    head, other = make_head("dflash2", target, **SMALL), make_head("dflash2", target, **SMALL)
    files = convert_head(head, target, layout="dflash2", dtype="float32")
    assert same_logits(head, other, files, target)
    for name in ("candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel", "norm.weight"):
        spoilt = deepcopy(head)
        torch.nn.init.normal_(spoilt.get_parameter(name))
        assert not same_logits(head, spoilt, files, target), name
        assert not same_logits(spoilt, head, files, target), name
    fewer = make_head("dflash2", target, **{**SMALL, "selector_top_k": 4})
    assert not same_logits(head, fewer, files, target)


@torch.no_grad()
def test_an_export_may_have_other_candidates_among_tokens_that_are_as_likely() -> None:
    target = make_target()
    weight = target.head.weight
    weight[1::2] = weight[::2] * (1 + 2e-7)
    # An odd number of candidates, of pairs alike.
    head, other = (make_head("dflash2", target, **SMALL) for _ in range(2))
    other.fc.weight *= 1 + 1e-6 * torch.randn_like(other.fc.weight)
    found = [one(packed(target), 4).steps[0].logits.isfinite() for one in (head, other)]
    assert not torch.equal(*found)
    files = convert_head(head, target, layout="dflash2", dtype="float32")
    assert same_logits(head, other, files, target)
