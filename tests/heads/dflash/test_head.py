"""DFlash: the training pass against one block at a time, the sample of anchors, drafting against training, the simulator."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.noise import SAMPLE, uniforms
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.conformance.suite import CHECKS, Spec, tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.texts import simulate_generations
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.block import base as block_base
from draftsmith.heads.block import drafter as block_drafter
from draftsmith.heads.block.base import BlockAttention, BlockHead, sample_rows
from draftsmith.heads.block.drafter import DFlashDrafter
from draftsmith.heads.dflash.head import DFlashOptions, build
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from draftsmith.target.tokens import choose_mask_token
from tests.decoding import assert_same, decode_like_alone
from tests.heads.blocks import LOSSES, make_head, make_target, packed, requests, slow_states, trained

pytestmark = pytest.mark.full

VOCAB = torch.arange(0, 160, 3)
KINDS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "a draft vocabulary": {"vocab": VOCAB},
    "of its own size": {"head_dim": 8, "num_key_value_heads": 4, "intermediate_size": 50, "num_layers": 3},
    "the shortest block": {"block_size": 2, "num_layers": 1},
}
BUSH = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


@torch.no_grad()
def check_against_blocks(**options: Any) -> None:
    """Every row of every step, against dense attention over one block's own context and nothing else."""
    target = make_target()
    head = make_head("dflash", target, **options)
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


def next_row_too(patch: pytest.MonkeyPatch) -> None:
    """The context holds the root's own streams, which the target has not computed yet."""
    real = block_base.ttt_attention
    patch.setattr(block_base, "ttt_attention", lambda q, k, v, *rest: real(q, k.roll(-1, 1), v.roll(-1, 1), *rest))


def one_position_late(patch: pytest.MonkeyPatch) -> None:
    """Blocks stand one position behind their root."""
    real = BlockHead._fill

    def fill(self: Any, batch: Any, rows: Tensor, context: Any) -> Tensor:
        return real(self, replace(batch, position=batch.position + 1), rows, context)

    patch.setattr(BlockHead, "_fill", fill)


def leak(patch: pytest.MonkeyPatch) -> None:
    """Documents of a row see those before them."""
    real = block_base.plan_rows
    patch.setattr(block_base, "plan_rows", lambda document, rows: real(document.clamp(max=0), rows))


def keys_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """Keys are not normalised."""
    patch.setattr(BlockAttention, "key_value", super(BlockAttention, BlockAttention).key_value)


def no_hidden_norm(patch: pytest.MonkeyPatch) -> None:
    """The fused streams are not normalised."""
    patch.setattr(BlockHead, "fuse", lambda self, aux: self.fc(aux))


def causal_block(patch: pytest.MonkeyPatch) -> None:
    """A slot sees the slots up to itself alone, as if it were generated."""
    real = block_base.ttt_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, plan: Any, scale: float) -> Tensor:
        S, G = len(own_k), own_k.shape[2]
        split = q.unflatten(1, (G, S, -1))
        parts = [
            real(split[:, :, j].flatten(1, 2), k, v, own_k[: j + 1], own_v[: j + 1], plan, scale).unflatten(1, (G, -1))
            for j in range(S)
        ]
        return torch.stack(parts, 2).flatten(1, 3)

    patch.setattr(block_base, "ttt_attention", attention)


MUTANTS = [next_row_too, one_position_late, leak, keys_as_they_are, no_hidden_norm, causal_block]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_training_pass_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_against_blocks()


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


def test_training_trains_the_head_alone() -> None:
    target = make_target()
    head, batch = make_head("dflash", target).train(), packed(target)
    head_loss(head(batch, 4), batch, target.head, None, LOSSES["dflash"]).loss_sum.backward()
    trainable = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and bool(p.grad.any()) for p in trainable.values())
    assert "embed_tokens.weight" not in trainable
    assert all(p.grad is None for p in target.model.parameters())


@pytest.mark.parametrize("tree", [None, BUSH], ids=["chain", "bush"])
@pytest.mark.parametrize("vocab", [False, True], ids=["whole vocabulary", "draft vocabulary"])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_drafts_are_lossless_and_simulated_exactly(batch: int, vocab: bool, tree: StaticTree | None) -> None:
    """Rows end at different times, so that rows leave the batch and blocks are cut."""
    target, head, _ = trained("dflash", vocab=vocab)
    c = head_system("dflash", head, 3, 8, tree=tree)
    k = c.num_speculative_tokens
    found = decode_like_alone(target, lambda: c.make(k), requests(6), batch)
    decoded = total([tally_generation(g, k) for g in found], k)
    simulated = simulate_generations(target, head, found, Sampling(), k, tree=tree).tallies
    assert decoded.accepted_K[-1] > 0
    assert_same(decoded, total([t[k - 1] for t in simulated], k))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("tree", [None, BUSH], ids=["chain", "bush"])
def test_simulation_predicts_sampled_decoding(tree: StaticTree | None, k: int) -> None:
    """Also where less than the block is proposed: the block that is filled in stays the same."""
    target, head, _ = trained("dflash", 1.0)
    c = head_system("dflash", head, k, 3, tree=None if tree is None else tree.cut(k))
    found = decode_batch(target, c.make(k), requests(40), Sampling(1.0), rows=16).generations
    decoded = [tally_generation(g, k) for g in found]
    simulated = [t[k - 1] for t in simulate_generations(target, head, found, Sampling(1.0), k, tree=c.tree).tallies]
    assert total(decoded, k).accepted_K[0] > 20, "too few accepted drafts to mean something"
    if tree is not None:
        # Given the text it is certain which node was accepted.
        assert_same(total(decoded, k), total(simulated, k))
    else:
        errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
        assert 0 < abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


def stale_context(patch: pytest.MonkeyPatch) -> None:
    """NewTokens tokens are not read: the keys of the last block's masks stand in for them."""
    patch.setattr(block_drafter.BlockDrafter, "admit", lambda self, prompts: None)


def shifted_block(patch: pytest.MonkeyPatch) -> None:
    """Drafts come from the slots of their parents."""
    patch.setattr(block_drafter.BlockDrafter, "propose", _shifted(block_drafter.BlockDrafter.propose))


def _shifted(real: Any) -> Any:
    def propose(self: Any, state: Any) -> Any:
        self.head.first_slot = 0
        try:
            return real(self, state)
        finally:
            del self.head.first_slot

    return propose


@pytest.mark.parametrize("mutant", [stale_context, shifted_block])
@pytest.mark.slow
def test_a_wrong_drafter_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    options = DFlashOptions([0, 1], block_size=4, num_layers=1, mask_token_id=0)
    with pytest.raises(AssertionError, match="training"):
        CHECKS["decoding has the probabilities of training"](
            Spec("dflash", options, tiny_target(), loss=LOSSES["dflash"])
        )


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
        ({"mask_token_id": -1}, "head.mask_token_id is -1: it must be from 0 to"),
        ({"mask_token_id": None}, "has no mask token and none that is reserved or only pads: set head.mask_token_id"),
        ({"block_size": 257}, "head.block_size is 257, but the target tiny reads no more than 256 tokens"),
        ({"block_size": 1}, "head.block_size is 1: it must be from 2 to 1024"),
        ({"num_layers": 0}, "head.num_layers is 0: it must be from 1 to 1000"),
        ({"anchors": 0}, "head.anchors is 0: it must be from 1 to"),
        ({"head_dim": 0}, "head.head_dim is 0: it must be from 1 to 1048576, or null"),
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
