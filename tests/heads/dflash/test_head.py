"""DFlash: the training pass against one block at a time, the sample of anchors, options."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.decoder.sampling import SAMPLE, uniforms
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.block import base as block_base
from draftsmith.heads.block.base import sample_rows
from draftsmith.heads.dflash.head import DFlashDrafter, DFlashOptions, build
from draftsmith.heads.losses.head_loss import loss_divisor
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from draftsmith.target.tokens import choose_mask_token
from draftsmith.train.feed import plan_batch
from tests.heads.blocks import LOSSES, make_head, make_target, packed, slow_states, trained

pytestmark = pytest.mark.full

VOCAB = torch.arange(0, 160, 3)
KINDS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "a draft vocabulary": {"vocab": VOCAB},
    "of its own size": {"head_dim": 8, "num_key_value_heads": 4, "intermediate_size": 50, "num_layers": 3},
    "the shortest block": {"block_size": 2, "num_layers": 1},
    "a causal block": {"method": "jetspec"},
}


@torch.no_grad()
def check_against_blocks(method: str = "dflash", **options: Any) -> None:
    """Every row of every step, against dense attention over one block's own context and nothing else."""
    target = make_target()
    head = make_head(method, target, **options)
    batch = packed(target)
    seen = 0
    for k, step in enumerate(head(batch, head.trains.steps).steps):
        assert torch.equal(step.rows, supervised_rows(batch, k).flatten().nonzero().flatten())
        for row, logits_W in zip(step.rows.tolist(), step.logits, strict=True):
            expected = slow_states(head, batch, row)[1 + k] @ target.head.weight.double().T
            expected = expected if head.draft_vocab is None else expected[head.draft_vocab]
            torch.testing.assert_close(logits_W.double(), expected, atol=2e-4, rtol=2e-4)
            seen += 1
    assert seen > 20 * head.trains.steps


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_those_of_single_blocks(kind: str) -> None:
    check_against_blocks(**KINDS[kind])


@torch.no_grad()
def test_many_blocks_are_filled_in_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    head, batch = make_head("dflash", target), packed(target)
    whole = head(batch, 4).steps
    monkeypatch.setattr(block_base, "_CHUNK_BLOCKS", 7)
    for a, b in zip(whole, head(batch, 4).steps, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)


def test_anchors_are_a_sample_by_document_and_position() -> None:
    """The smallest draws of each document, computed here one by one."""
    batch = packed(make_target())
    rows_BL = supervised_rows(batch, 0)
    chosen_BL = sample_rows(batch, rows_BL, 4)
    for b in range(len(batch.ids)):
        for d in range(int(batch.document[b].max()) + 1):
            places = [t for t in range(batch.ids.shape[1]) if rows_BL[b, t] and int(batch.document[b, t]) == d]
            draws = {
                t: float(uniforms(batch.seeds[b, t : t + 1], batch.position[b, t : t + 1], SAMPLE, 1)) for t in places
            }
            expected = sorted(sorted(places, key=draws.__getitem__)[:4])
            assert [t for t in places if chosen_BL[b, t]] == expected
    assert not bool((chosen_BL & ~rows_BL).any())
    assert torch.equal(sample_rows(batch, rows_BL, 1000), rows_BL)
    other = sample_rows(replace(batch, seed=batch.seeds + 1), rows_BL, 4)
    assert not torch.equal(other, chosen_BL)


def test_every_row_is_drawn_about_equally_often() -> None:
    batch = packed(make_target())
    rows_BL = supervised_rows(batch, 0)
    counts = sum(sample_rows(replace(batch, seed=batch.seeds + n), rows_BL, 5).int() for n in range(400))
    long = rows_BL & (batch.document == 0)  # the second row's only document has 19 rows to draw from
    shares = (counts[1][long[1]] / 400).tolist()
    assert sum(shares) == pytest.approx(5.0)
    assert max(shares) < 1.5 * 5 / len(shares)
    assert min(shares) > 0.5 * 5 / len(shares)


def test_training_learns_from_the_sample_and_evaluation_from_all() -> None:
    target = make_target()
    head, batch = make_head("dflash", target, anchors=4), packed(target)
    masks = list(islice(head.train().supervised(batch), 4))
    steps = head(batch, 4).steps
    for k, (step, mask_BL) in enumerate(zip(steps, masks, strict=True)):
        assert torch.equal(step.rows, mask_BL.flatten().nonzero().flatten())
        assert torch.equal(mask_BL, masks[0] & supervised_rows(batch, k))
    spec = LOSSES["dflash"]
    expected = sum(spec.decay**k * len(step.rows) for k, step in enumerate(steps))
    assert float(loss_divisor(batch, spec, head)) == pytest.approx(expected)
    assert len(head.eval()(batch, 1).steps[0].rows) == int(supervised_rows(batch, 0).sum())


def test_no_block_crosses_a_document_and_training_tells_what_blocks_cover() -> None:
    """Where every token is to be learned, prompts too, a block near a document's end learns what is left of it."""
    target = make_target()
    batch = packed(target)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    head, spec = make_head("dflash", target, anchors=2).train(), LOSSES["dflash"]
    document, length = batch.document, batch.ids.shape[1]
    learned: set[int] = set()
    for k, step in enumerate(head(batch, 4).steps):
        row, at = step.rows // length, step.rows % length
        assert torch.equal(document[row, at], document[row, at + 2 + k])
        learned |= set((step.rows + 2 + k).tolist())
    every = {r + 2 for r in supervised_rows(batch, 0).flatten().nonzero().flatten().tolist()}
    fed = plan_batch(batch, head, spec, torch.device("cpu"))
    assert (fed.covered, fed.rows) == (len(learned), len(every))
    assert len(learned & every) == len(learned) < len(every)
    everything = plan_batch(batch, make_head("dflash", target, anchors=1000).train(), spec, torch.device("cpu"))
    assert everything.covered == everything.rows


def test_a_draft_is_no_longer_than_its_block() -> None:
    head = trained("dflash")[1]
    assert (head.trains.steps, head.drafts.max_speculative_tokens, head.options.block_size) == (3, 3, 4)
    assert head_system("dflash", head, 7, 8).num_speculative_tokens == 3
    with pytest.raises(AssertionError):
        DFlashDrafter(head, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_token_id": 160}, "head.mask_token_id is 160, but the target tiny has 160 tokens, numbered from 0"),
        ({"mask_token_id": None}, "has no mask token and none that is reserved or only pads: set head.mask_token_id"),
        ({"block_size": 257}, "head.block_size is 257, but the target tiny reads no more than 256 tokens"),
        ({"layer_ids": [9]}, "layer_ids .9. for the target tiny: 9 is out of range"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        build(DFlashOptions(**({"layer_ids": [1], "mask_token_id": 3} | options)), make_target(), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("special", "config", "expected"),
    [
        ({"<eos>": 2, "<|MASK|>": 7}, {"mask_token": "<|MASK|>"}, 7),
        ({"<eos>": 2, "<pad>": 0, "<mask>": 9}, {"pad_token": "<pad>"}, 9),
        ({"<eos>": 2, "<|reserved_special_token_1|>": 9, "<|reserved_special_token_0|>": 8}, {}, 8),
        ({"<eos>": 2, "<pad>": 0}, {"pad_token": {"content": "<pad>"}}, 0),
        ({"<eos>": 2}, {"pad_token": "<eos>"}, None),
        ({"<mask>": 500}, {"mask_token": "<mask>"}, None),
    ],
)
def test_a_mask_token_is_found_in_the_tokenizer(
    special: dict[str, int], config: dict[str, Any], expected: int | None, tmp_path: Path
) -> None:
    added = [{"id": token, "content": name, "special": True} for name, token in special.items()]
    write_json(tmp_path / "tokenizer.json", {"added_tokens": added})
    write_json(tmp_path / "tokenizer_config.json", config)
    target = Target(make_target().model, path="tiny", fingerprint="0", directory=tmp_path)
    if expected is None:
        with pytest.raises(UserError, match=r"set head\.mask_token_id"):
            choose_mask_token(None, target)
    else:
        assert choose_mask_token(None, target) == expected
        assert choose_mask_token(5, target) == 5
