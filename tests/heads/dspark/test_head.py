"""DSpark: the training pass against one block at a time, confidence and its threshold, drafting, and the simulator."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder import growth
from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.conformance.suite import CHECKS, Spec, tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.acceptance import acceptance
from draftsmith.eval.simulate.texts import simulate_generations
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.dspark import head as dspark
from draftsmith.heads.dspark.drafter import DSparkDrafter
from draftsmith.heads.dspark.head import DSparkHead, DSparkOptions
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.drafters import at_temperature, select_drafters
from tests.decoding import assert_same, decode_like_alone
from tests.heads.blocks import LOSSES, make_head, make_target, packed, requests, slow_states, trained

pytestmark = pytest.mark.full

VOCAB = torch.arange(0, 160, 3)


@torch.no_grad()
def check_against_blocks(vocab: Tensor | None) -> None:
    """Every row of every step: slot k predicts the token behind its own place, biased by the token at it."""
    target = make_target()
    head = make_head("dspark", target, vocab, markov_rank=6)
    batch = packed(target)
    w1, w2 = (w.double() for w in (head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight))
    proj = head.confidence_head.proj
    seen = 0
    for k, step in enumerate(head(batch, 5).steps):
        assert torch.equal(step.rows, supervised_rows(batch, k).flatten().nonzero().flatten())
        for i, row in enumerate(step.rows.tolist()):
            state = slow_states(head, batch, row)[k]
            before = w1[batch.ids.flatten()[row + 1 + k]]
            base = state @ target.head.weight.double().T
            expected = (base if vocab is None else base[vocab]) + w2 @ before
            torch.testing.assert_close(step.logits[i].double(), expected, atol=2e-4, rtol=2e-4)
            sure = torch.cat([state, before]) @ proj.weight[0].double() + proj.bias.double()
            torch.testing.assert_close(step.confidence[i].double(), sure[0], atol=2e-4, rtol=2e-4)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole vocabulary", "draft vocabulary"])
def test_training_logits_are_those_of_single_blocks(vocab: Tensor | None) -> None:
    check_against_blocks(vocab)


def the_token_itself(patch: pytest.MonkeyPatch) -> None:
    """The bias is made of the token to predict."""
    real = dspark.shift_left
    patch.setattr(dspark, "shift_left", lambda x, steps, fill: real(x, steps + 1, fill))


def a_slot_late(patch: pytest.MonkeyPatch) -> None:
    """The states are those of the slots at the place of the token, as in DFlash."""
    patch.setattr(DSparkHead, "first_slot", 1)


def no_bias(patch: pytest.MonkeyPatch) -> None:
    """The token before is left out."""
    real = torch.nn.Embedding.forward
    patch.setattr(torch.nn.Embedding, "forward", lambda self, ids: real(self, ids) * (self.embedding_dim != 6))


@pytest.mark.parametrize("mutant", [the_token_itself, a_slot_late, no_bias])
def test_a_wrong_training_pass_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check_against_blocks(None)


def test_training_trains_the_head_alone() -> None:
    target = make_target()
    head, batch = make_head("dspark", target, markov_rank=6).train(), packed(target)
    scored = head_loss(head(batch, 5), batch, target.head, None, LOSSES["dspark"])
    (scored.loss_sum / loss_divisor(batch, LOSSES["dspark"], head)).backward()
    trainable = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and bool(p.grad.any()) for p in trainable.values())
    assert "embed_tokens.weight" not in trainable
    assert all(p.grad is None for p in target.model.parameters())


def test_without_a_confidence_head_there_is_none() -> None:
    target = make_target()
    head = make_head("dspark", target, confidence_head=False)
    assert not head.trains.has_confidence
    assert not any("confidence" in name or name == "temperatures" for name in head.state_dict())
    assert all(step.confidence is None and step.stops is None for step in head(packed(target), 5).steps)


@cache
def cautious(threshold: float, temperature: float = 0.0) -> tuple[Any, Any, Any]:
    """The trained head with a threshold, its slots at different temperatures."""
    target, head, batch = trained("dspark", temperature)
    careful = deepcopy(head).with_confidence_threshold(threshold)
    careful.temperatures.copy_(torch.tensor([1.0, 2.0, 0.7, 1.3]))
    return target, careful, batch


@torch.no_grad()
def test_a_draft_ends_before_the_first_unlikely_slot() -> None:
    """The product of the calibrated confidences of a block's slots, one block at a time."""
    target, head, batch = cautious(0.3)
    output = head(batch, 4)
    found = {(k, row): i for k, step in enumerate(output.steps) for i, row in enumerate(step.rows.tolist())}
    stopped = 0
    for row in output.steps[0].rows.tolist():
        survival = 1.0
        for k in range(4):
            if (k, row) not in found:
                break
            step, i = output.steps[k], found[k, row]
            survival *= float(torch.sigmoid(step.confidence[i] / head.temperatures[k]))
            assert bool(step.stops[i]) == (survival < 0.3)
            stopped += survival < 0.3
    assert 20 < stopped < 0.9 * len(found)
    c_BLK = acceptance(output, batch, target.head, None, Sampling()).c_BLK.flatten(0, 1)
    for k, step in enumerate(output.steps):
        assert torch.equal(c_BLK[step.rows, k].isnan(), step.stops)


@pytest.mark.parametrize("threshold", [None, 0.3, 0.7])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_drafts_are_lossless_and_simulated_exactly(batch: int, threshold: float | None) -> None:
    """With a threshold all but the number of drafted tokens: behind a wrong token a draft goes on as no text tells."""
    target, head, _ = trained("dspark") if threshold is None else cautious(threshold)
    k = 4
    found = decode_like_alone(target, lambda: DSparkDrafter(head, k), requests(6), batch)
    decoded = total([tally_generation(g, k) for g in found], k)
    simulated = total([t[k - 1] for t in simulate_generations(target, head, found, Sampling(), k).tallies], k)
    assert (decoded.accepted_K[-1] > 0) == (threshold != 0.7)
    assert_same(decoded, simulated, drafted=threshold is None)
    if threshold is not None:
        whole = simulate_generations(target, trained("dspark")[1], found, Sampling(), k).tallies
        assert decoded.drafted < total([t[k - 1] for t in whole], k).drafted
        assert (decoded.reached_K[0] < decoded.rounds) == (threshold == 0.7), "rounds that draft nothing at all"


@pytest.mark.parametrize(("k", "threshold"), [(1, None), (4, None), (4, 0.25), (2, 0.25)])
def test_simulation_predicts_sampled_decoding(k: int, threshold: float | None) -> None:
    """Also where less than the block is proposed, and where the head ends its drafts."""
    target, head, _ = trained("dspark", 1.0) if threshold is None else cautious(threshold, 1.0)
    found = decode_batch(target, DSparkDrafter(head, k), requests(40), Sampling(1.0), rows=16).generations
    decoded = [tally_generation(g, k) for g in found]
    simulated = [t[k - 1] for t in simulate_generations(target, head, found, Sampling(1.0), k).tallies]
    assert total(decoded, k).accepted_K[0] > 20, "too few accepted drafts to mean something"
    errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
    assert 0 < abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


def test_a_head_that_ends_its_drafts_has_no_fixed_length() -> None:
    head = trained("dspark")[1]
    chain, early = (head_system("dspark", head, 4, 8, threshold=threshold) for threshold in (None, 0.3))
    assert (chain.name, chain.fixed_length, chain.head) == ("dspark", True, head)
    assert (early.name, early.fixed_length, early.head) == ("dspark until 0.3", False, head)
    assert (early.make(4).head.threshold, head.threshold) == (0.3, None)


def test_a_threshold_needs_a_confidence() -> None:
    with pytest.raises(
        UserError, match=r"confidence_threshold is 0.3, but dspark heads, or this one, say no confidence"
    ):
        make_head("dspark", make_target(), confidence_head=False).with_confidence_threshold(0.3)
    with pytest.raises(UserError, match=r"confidence_threshold is 0.3, but dflash heads"):
        head_system("dflash", trained("dflash")[1], 3, 3, threshold=0.3)


def test_a_threshold_is_a_way_to_draft_of_heads_that_say_how_sure_they_are() -> None:
    target, head, _ = trained("dspark")
    words = ["--evaluate.drafts", "[{tree: chain}, {tree: chain, confidence_threshold: 0.3}]"]
    warnings: list[str] = []
    recipe = parse_recipe(["--recipe", "recipes/dspark/tiny.yaml", *words])
    found = select_drafters(
        recipe, {"dspark": head, "dflash": trained("dflash")[1]}, target, 100, None, warnings.append
    )
    assert [c.name for c in found] == ["dspark", "dspark until 0.3", "dflash"]
    assert [c.threshold for c in found] == [None, 0.3, None]
    assert at_temperature(found, Sampling()) == found, "with a threshold it is another drafter at temperature 0 too"
    with pytest.raises(UserError, match=r"confidence_threshold 0\.3, but none of the heads \(dflash\) says how sure"):
        select_drafters(recipe, {"dflash": trained("dflash")[1]}, target, 100, None, warnings.append)
    assert all(c.simulate is not None for c in found)


def test_sampled_answers_with_a_threshold_follow_the_targets_distribution() -> None:
    """The first tokens of many short answers, from one prompt: by the distribution of the target's own, exactly computed."""
    target, head, _ = cautious(0.25, 1.0)
    prompt = requests(1)[0].prompt_ids
    asked = [replace(requests(1)[0], sample_id=f"s{i}", key=7919 * i + 1, max_new_tokens=3) for i in range(3000)]
    found = decode_batch(target, DSparkDrafter(head, 2), asked, Sampling(1.0), rows=500).generations
    first = torch.tensor([g.output_ids[0] for g in found])
    likely = int(first.bincount().argmax())
    second = torch.tensor([g.output_ids[1] for g in found if g.output_ids[0] == likely and len(g.output_ids) > 1])
    ids = torch.tensor([[*prompt, likely]])
    probs = target.head.logits(target.forward(ids).last[0, -1]).softmax(-1).double()
    counts = second.bincount(minlength=160).double()
    chi = float(((counts - len(second) * probs) ** 2 / (len(second) * probs)).sum())
    assert len(second) > 40
    assert chi < 160 + 5 * (2 * 160) ** 0.5


def biased_by_the_root(patch: pytest.MonkeyPatch) -> None:
    """Every slot is biased by the root instead of the token drafted before it."""
    whole = DSparkDrafter.draft

    def draft(self: Any, state: Any, states: Tensor) -> Any:
        roots = state.root_B
        with pytest.MonkeyPatch.context() as inner:
            embed = self.head.markov_head.markov_w1.forward
            inner.setattr(self.head.markov_head.markov_w1, "forward", lambda ids: embed(roots))
            return whole(self, state, states)

    patch.setattr(DSparkDrafter, "draft", draft)


def judged_by_itself(patch: pytest.MonkeyPatch) -> None:
    """Tokens say that they were drawn, but the most likely were taken."""
    patch.setattr(growth, "draw", lambda probs, uniform: probs.argmax(-1))


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (biased_by_the_root, "decoding has the probabilities of training"),
        (judged_by_itself, "drafts are drawn from the probabilities that they name"),
    ],
)
@pytest.mark.slow
def test_a_wrong_drafter_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    options = DSparkOptions([0, 1], block_size=3, num_layers=1, mask_token_id=0, markov_rank=32)
    with pytest.raises(AssertionError, match=r"training|not drawn"):
        CHECKS[check](Spec("dspark", options, tiny_target(), loss=LOSSES["dspark"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"markov_rank": 0}, "head.markov_rank is 0: it must be from 1 to"),
        ({"block_size": 1}, "head.block_size is 1: it must be from 2 to 1024"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        DSparkOptions(**options)
    assert "\n" not in str(caught.value)
