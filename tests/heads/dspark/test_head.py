"""DSpark: the training pass against one block at a time, and the threshold of its confidence."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.acceptance import acceptance
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.dspark.drafter import DSparkDrafter
from draftsmith.heads.dspark.head import DSparkOptions
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.drafters import at_temperature, select_drafters
from tests.heads.blocks import make_head, make_target, packed, requests, slow_states, trained

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


def test_without_a_confidence_head_there_is_none() -> None:
    target = make_target()
    head = make_head("dspark", target, confidence_head=False)
    assert not head.trains.outputs
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
