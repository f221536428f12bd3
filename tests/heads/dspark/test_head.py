"""DSpark: the training pass against one block at a time, the threshold of its confidence, and the temperatures that make it
mean something."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.acceptance import acceptance
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.dspark import head as dspark
from draftsmith.heads.dspark.head import (
    DSparkDrafter,
    DSparkOptions,
    calibrate,
    expected_calibration_error,
    fit_temperatures,
    survival,
)
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import Method
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.drafters import at_temperature, select_drafters
from draftsmith.train import metrics as after_training
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
    assert all(step.confidence is None and step.temperature is None for step in head(packed(target), 5).steps)


@cache
def cautious(temperature: float = 0.0) -> tuple[Any, Any, Any]:
    """The trained head, its slots at different temperatures."""
    target, head, batch = trained("dspark", temperature)
    careful = deepcopy(head)
    careful.temperatures.copy_(torch.tensor([1.0, 2.0, 0.7, 1.3]))
    return target, careful, batch


@torch.no_grad()
def test_a_draft_ends_before_the_first_unlikely_slot() -> None:
    """The product of the calibrated confidences of a block's slots, one block at a time."""
    target, head, batch = cautious()
    output = head(batch, 4)
    rule = LengthRule((0.3,) * 4)
    c_BLK = acceptance(output, batch, target.head, None, Sampling(), rule=rule).c_BLK.flatten(0, 1)
    found = {(k, row): i for k, step in enumerate(output.steps) for i, row in enumerate(step.rows.tolist())}
    stopped = 0
    for row in output.steps[0].rows.tolist():
        survival = 1.0
        for k in range(4):
            if (k, row) not in found:
                break
            step, i = output.steps[k], found[k, row]
            survival *= float(torch.sigmoid(step.confidence[i] / head.temperatures[k]))
            assert bool(c_BLK[row, k].isnan()) == (survival < 0.3)
            stopped += survival < 0.3
    assert 20 < stopped < 0.9 * len(found)


def test_a_head_that_ends_its_drafts_has_no_fixed_length() -> None:
    head = trained("dspark")[1]
    chain, early = (head_system("dspark", head, 4, 8, rule=rule) for rule in (None, LengthRule((0.3,) * 8)))
    assert (chain.name, chain.fixed_length, chain.head) == ("dspark", True, head)
    assert (early.name, early.fixed_length, early.head) == ("dspark until 0.3", False, head)
    assert (early.make(4).rule, chain.make(4).rule) == (early.rule, None)


def test_a_threshold_is_a_way_to_draft_of_heads_that_end_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, _ = trained("dspark")
    words = ["--evaluate.drafts", "[{tree: chain}, {tree: chain, confidence_threshold: 0.3}]"]
    warnings: list[str] = []
    recipe = parse_recipe(["--recipe", "recipes/dspark/tiny.yaml", *words])
    found = select_drafters(
        recipe, {"dspark": head, "dflash": trained("dflash")[1]}, target, 100, None, warnings.append
    )
    assert [c.name for c in found] == ["dspark", "dspark until 0.3", "dflash", "dflash until 0.3"]
    assert [(c.rule is None, c.counts_drafts) for c in found] == [
        (True, True),
        (False, False),
        (True, True),
        (False, True),
    ]
    assert at_temperature(found, Sampling()) == found, "with a threshold it is another drafter at temperature 0 too"
    assert all(c.simulate is not None for c in found)
    monkeypatch.setattr(Method, "ends_chains", False)
    with pytest.raises(
        UserError, match=r"confidence_threshold 0\.3, but none of the heads \(dspark\) ends its chains early"
    ):
        select_drafters(recipe, {"dspark": head}, target, 100, None, warnings.append)


def test_sampled_answers_with_a_threshold_follow_the_targets_distribution() -> None:
    """The first tokens of many short answers, from one prompt: by the distribution of the target's own, exactly computed."""
    target, head, _ = cautious(1.0)
    prompt = requests(1)[0].prompt_ids
    asked = [replace(requests(1)[0], sample_id=f"s{i}", key=7919 * i + 1, max_new_tokens=3) for i in range(3000)]
    found = decode_batch(
        target, DSparkDrafter(head, 2, rule=LengthRule((0.25,) * 2)), asked, Sampling(1.0), rows=500
    ).generations
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


TEMPERATURES = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


def drafts(rows: int = 20_000) -> tuple[Tensor, Tensor]:
    """Log-odds that are too large by known factors, and what became of drafts that follow the true ones."""
    generator = torch.Generator().manual_seed(0)
    true = 1.0 + 1.5 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    accepted = (torch.rand(rows, 4, generator=generator, dtype=torch.float64) < true.sigmoid()).double()
    log_odds = true * TEMPERATURES
    log_odds[: rows // 10, 2:] = torch.nan  # answers that end
    return log_odds, accepted.where(~log_odds.isnan(), torch.nan)


def test_known_temperatures_are_found() -> None:
    found = fit_temperatures(*drafts())
    assert found.tolist() == pytest.approx(TEMPERATURES.tolist(), rel=0.12)


def test_slots_are_fitted_one_after_the_other() -> None:
    """A slot whose confidence tells nothing of the draft's survival makes up for no other: those before it stay."""
    log_odds, accepted = drafts()
    alone = fit_temperatures(log_odds[:, :2], accepted[:, :2])
    spoilt = log_odds.clone()
    spoilt[:, 2] = spoilt[:, 2].flip(0)
    assert torch.equal(fit_temperatures(spoilt, accepted)[:2], alone)


def test_the_error_is_that_of_bins() -> None:
    chance = torch.tensor([0.1, 0.1, 0.9, 0.9, 1.0], dtype=torch.float64)
    outcome = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    # Bins of a fifteenth: two at 0.1 (0.2 too much), two at 0.9 (0.8 too much), one at 1.0 (none).
    assert expected_calibration_error(chance, outcome) == pytest.approx((0.2 + 0.8) / 5)
    assert expected_calibration_error(outcome, outcome) == 0.0


def test_errors_before_and_after() -> None:
    log_odds, accepted = drafts()
    half = torch.arange(len(log_odds)) % 2 == 0
    found = calibrate(log_odds, accepted, half)
    assert found["rows"] == [20_000, 20_000, 18_000, 18_000]
    assert found["temperatures"] == pytest.approx(TEMPERATURES.tolist(), rel=0.12)
    assert all(after < 0.02 for after in found["after"])
    assert min(found["before"][0], found["before"][3]) > 0.03
    # After fitting, the product of confidences is the share of drafts that survive.
    predicted, seen = survival(log_odds, torch.tensor(found["temperatures"])).nanmean(0), accepted.cumprod(1).nanmean(0)
    assert predicted.tolist() == pytest.approx(seen.tolist(), abs=0.01)
    assert json.loads(json.dumps(found)) == found


def test_the_error_after_is_of_texts_that_were_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves that need other temperatures: each judged by the other's, both are off."""
    log_odds, accepted = drafts()
    half = torch.arange(len(log_odds)) % 2 == 0
    log_odds[half] *= 4
    found = calibrate(log_odds, accepted, half)
    assert found["after"][0] > 0.08
    monkeypatch.setattr(dspark, "fit_temperatures", lambda a, b: torch.ones(4, dtype=torch.float64))
    unfitted = calibrate(log_odds, accepted, half)
    assert unfitted["after"] == pytest.approx(unfitted["before"])


def test_slots_without_rows_keep_their_temperature() -> None:
    log_odds, accepted = drafts(400)
    nothing = torch.full_like(log_odds, torch.nan)
    assert fit_temperatures(nothing, accepted).tolist() == [1.0] * 4


def test_a_trained_head_is_calibrated_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, batch = trained("dspark", 1.0)
    monkeypatch.setattr(after_training, "read_batch", lambda *_: batch)
    save_head(head, tmp_path / "best", target)
    before = [step.logits for step in head(batch, 4).steps]
    told = after_training.calibrate_best(tmp_path / "best", target, cast(Any, None), [[[0]]], 64, Sampling(1.0))
    facts = told["calibration"]
    kept = load_head(tmp_path / "best", target)
    assert kept.temperatures.tolist() == pytest.approx(facts["temperatures"])
    assert kept.temperatures.tolist() != [1.0] * 4
    for logits, step in zip(before, kept(batch, 4).steps, strict=True):
        assert torch.equal(logits, step.logits)
    assert facts["temperatures"] == pytest.approx(slowly(head, batch, target), rel=1e-3)


def slowly(head: Any, batch: TrainBatch, target: Any) -> list[float]:
    """The temperatures from tables that are filled row by row."""
    output = head(batch, 4)
    c_BLK = acceptance(output, batch, target.head, None, Sampling(1.0)).c_BLK.flatten(0, 1)
    log_odds, accepted = (torch.full((batch.ids.numel(), 4), torch.nan, dtype=torch.float64) for _ in range(2))
    for step in output.steps:
        for row, sure in zip(step.rows.tolist(), step.confidence.tolist(), strict=True):
            log_odds[row, step.offset], accepted[row, step.offset] = sure, c_BLK[row, step.offset]
    return fit_temperatures(log_odds, accepted).tolist()


def test_a_head_without_confidence_has_nothing_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, batch = trained("dflash")
    monkeypatch.setattr(after_training, "read_batch", lambda *_: replace(batch))
    save_head(head, tmp_path / "best", target)
    stamp = (tmp_path / "best" / "model.safetensors").stat().st_mtime_ns
    assert after_training.calibrate_best(tmp_path / "best", target, cast(Any, None), [[[0]]], 64, Sampling()) == {}
    assert (tmp_path / "best" / "model.safetensors").stat().st_mtime_ns == stamp
