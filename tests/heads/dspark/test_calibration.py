"""Sequential temperature scaling: known temperatures are found, and a trained head's confidences come to mean something."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.acceptance import acceptance
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.dspark import calibration
from draftsmith.heads.dspark.calibration import calibrate, expected_calibration_error, fit_temperatures, survival
from draftsmith.heads.formats.recognise import load_head
from draftsmith.train import metrics as after_training
from tests.heads.blocks import trained

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
    assert found.rows == [20_000, 20_000, 18_000, 18_000]
    assert found.temperatures == pytest.approx(TEMPERATURES.tolist(), rel=0.12)
    assert all(after < 0.02 for after in found.after)
    assert min(found.before[0], found.before[3]) > 0.03
    # After fitting, the product of confidences is the share of drafts that survive.
    predicted, seen = survival(log_odds, torch.tensor(found.temperatures)).nanmean(0), accepted.cumprod(1).nanmean(0)
    assert predicted.tolist() == pytest.approx(seen.tolist(), abs=0.01)
    assert json.loads(json.dumps(asdict(found)))["after"] == found.after


def test_the_error_after_is_of_texts_that_were_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves that need other temperatures: each judged by the other's, both are off."""
    log_odds, accepted = drafts()
    half = torch.arange(len(log_odds)) % 2 == 0
    log_odds[half] *= 4
    found = calibrate(log_odds, accepted, half)
    assert found.after[0] > 0.08
    monkeypatch.setattr(calibration, "fit_temperatures", lambda a, b: torch.ones(4, dtype=torch.float64))
    unfitted = calibrate(log_odds, accepted, half)
    assert unfitted.after == pytest.approx(unfitted.before)


def test_slots_without_rows_keep_their_temperature() -> None:
    log_odds, accepted = drafts(400)
    nothing = torch.full_like(log_odds, torch.nan)
    assert fit_temperatures(nothing, accepted).tolist() == [1.0] * 4


class Source:
    """Stands in for a store of one batch, which `collate` hands through."""

    def get_many(self, row: Any, layers: Any) -> Any:
        return row


def test_a_trained_head_is_calibrated_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, batch = trained("dspark", 1.0)
    monkeypatch.setattr(after_training, "collate", lambda samples, row_tokens: batch)
    save_head(head, tmp_path / "best", target)
    before = [step.logits for step in head(batch, 4).steps]
    told = after_training.calibrate_best(tmp_path / "best", target, Source(), [[[0]]], 64, Sampling(1.0))
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
    monkeypatch.setattr(after_training, "collate", lambda samples, row_tokens: replace(batch))
    save_head(head, tmp_path / "best", target)
    stamp = (tmp_path / "best" / "model.safetensors").stat().st_mtime_ns
    assert after_training.calibrate_best(tmp_path / "best", target, Source(), [[[0]]], 64, Sampling()) == {}
    assert (tmp_path / "best" / "model.safetensors").stat().st_mtime_ns == stamp
