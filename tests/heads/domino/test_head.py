"""Domino: the training pass against one block at a time, and loss, gradients and greedy drafts against what Automodel 0.7.0 and SpecForge
0.2.0 computed on the same weights and data."""

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, supervised_rows
from draftsmith.heads.domino.head import DominoDrafter, DominoHead, DominoOptions
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.plan import plan_queries
from draftsmith.target.target import Target, TargetHead
from tests.heads.blocks import LAYERS, LOSSES, make_head, make_target, packed, slow_states, trained

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "automodel_domino.safetensors"
VOCAB = torch.arange(0, 160, 3)


def slow_gru(weights: dict[str, Tensor], x_KH: Tensor, *, product_first: bool = True) -> Tensor:
    """The states [K, G] of a GRU without biases, written out. product_first: the reset gate scales the product with the state before
    (torch's), and not that state."""
    w_ih, w_hh = (weights[f"prefix_gru.weight_{name}_l0"].chunk(3) for name in ("ih", "hh"))
    state, states = w_hh[0].new_zeros(w_hh[0].shape[1]), []
    for x in x_KH:
        r, z = ((w_ih[i] @ x + w_hh[i] @ state).sigmoid() for i in (0, 1))
        n = (w_ih[2] @ x + (r * (w_hh[2] @ state) if product_first else w_hh[2] @ (r * state))).tanh()
        state = (1 - z) * n + z * state
        states.append(state)
    return torch.stack(states)


CASES = {
    "shifted": {},
    "in place": {"shift_label": False, "pure_draft_prefix_len": 0},
    "longer prefix": {"pure_draft_prefix_len": 3},
}


@pytest.mark.full
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole vocabulary", "draft vocabulary"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_training_logits_are_those_of_single_blocks(case: str, vocab: Tensor | None) -> None:
    target = make_target()
    head = make_head("domino", target, vocab, gru_hidden_dim=7, emb_dim=6, **CASES[case])
    weights = {name: value.double() for name, value in head.state_dict().items()}
    batch, steps, ids = packed(target), head.trains.steps, packed(target).ids.flatten()
    assert (head.first_slot, steps) == ((1, 4) if case == "in place" else (0, 5))
    corrected = 0
    for k, step in enumerate(head(batch, steps).steps):
        assert torch.equal(step.rows, supervised_rows(batch, k).flatten().nonzero().flatten())
        for i, row in enumerate(step.rows.tolist()[::4]):
            state = slow_states(head, batch, row)[head.first_slot + k]
            base = state @ target.head.weight.double().T
            base = base if vocab is None else base[vocab]
            prefix = slow_gru(weights, weights["embed_tokens.weight"][ids[row + 1 : row + 2 + k]])[-1]
            inner = torch.nn.functional.silu(weights["embed_proj.0.weight"] @ torch.cat([state, prefix]))
            delta = weights["embed_proj.2.weight"] @ inner * (k >= head.options.pure_draft_prefix_len)
            found, (plain,) = (make(*(x[4 * i] for x in step.sources)) for make in (step.project, step.besides))
            torch.testing.assert_close(found.double(), base + delta, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(plain.double(), base, atol=2e-4, rtol=2e-4)
            corrected += bool(delta.abs().max() > 0.05)
    assert corrected > 5


def test_a_new_head_is_a_dflash_head() -> None:
    target = make_target()
    head = DominoHead.build(DominoOptions([*LAYERS], mask_token_id=3, num_layers=1), target, None)
    for step in head(packed(target), 3).steps:
        assert torch.equal(step.logits, *step.besides(*step.sources))


def fixture(case: str) -> tuple[dict[str, Any], dict[str, Tensor], DominoHead, TrainBatch, TargetHead]:
    """What was asked, all tensors, and our head of their weights with the batch."""
    with safe_open(FIXTURE, "pt") as file:
        asked = json.loads(file.metadata()[case])
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file, no dictionary
    options = DominoOptions(
        layer_ids=[1, 3],
        block_size=asked["block_size"],
        mask_token_id=23,
        num_layers=1,
        gru_hidden_dim=12,
        emb_dim=6,
        pure_draft_prefix_len=asked["pure_draft_prefix_len"],
        shift_label=asked["shift_label"],
    )
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(**sizes, head_dim=8, vocab_size=24, rms_norm_eps=1e-6, rope_parameters=rope)
    target_head = TargetHead(data["lm_head"])
    target = cast(Target, SimpleNamespace(embedding=data["embedding"], head=target_head))
    head = DominoHead(options, config, target, options.layer_ids or (), None)
    weights = {name.removeprefix("weight."): value for name, value in data.items() if name.startswith("weight.")}
    missing, unexpected = head.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    last = torch.zeros(*data["ids"].shape, 16)
    batch = TrainBatch(
        ids=data["ids"],
        mask=data["mask"].bool(),
        document=torch.zeros_like(data["ids"]),
        position=torch.arange(data["ids"].shape[1])[None],
        aux=data["aux"],
        last=last,
        top1=torch.zeros_like(data["ids"]),
        logsumexp=torch.zeros(data["ids"].shape),
    )
    return asked, data, head, batch, target_head


def their_loss(asked: dict[str, Any], data: dict[str, Tensor], head: DominoHead, *others: Any) -> tuple[Tensor, Tensor]:
    """Our loss at their anchors and slots, and the states of the blocks."""
    batch, target_head = others
    rows, mask, steps = data["anchors"] - 1, batch.mask[0], head.trains.steps
    reached = [rows + 2 + k < len(mask) for k in range(steps)]
    counted = [
        torch.where(here, mask[(rows + 2 + k).clamp_max(len(mask) - 1)], False) for k, here in enumerate(reached)
    ]
    states = head.norm(head._fill(batch, plan_queries(batch, rows), head._context_keys(batch), asked["block_size"]))
    # A row that has no first slot there is in ours the first of its block all the same.
    outputs = head.outputs([states[:, head.first_slot + k] for k in range(steps)], [rows] * steps, batch)
    kept = [
        replace(step, rows=step.rows[own], inputs=tuple(x[own] for x in step.sources))
        for step, own in zip(outputs, counted, strict=True)
    ]
    spec = LossSpec(kind="hard_ce", decay=exp(-1 / asked["gamma"]), base_weight=asked["lambda_base"])
    weight = sum(float(own.sum()) * spec.decay**k for k, own in enumerate(counted))
    return head_loss(HeadOutput(tuple(kept)), batch, target_head, None, spec, 0.0).loss_sum / (weight + 1e-6), states


@pytest.mark.parametrize("case", ["shifted", "in place"])
def test_loss_gradients_and_drafts_are_those_of_automodel_and_specforge(case: str) -> None:
    asked, data, head, *others = fixture(case)
    loss, states = their_loss(asked, data, head, *others)
    assert loss.item() == pytest.approx(data[f"{case}.loss"].item(), rel=1e-6)
    loss.backward()
    ours = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    theirs = {name.removeprefix(f"{case}.grad."): x for name, x in data.items() if name.startswith(f"{case}.grad.")}
    assert ours.keys() == theirs.keys()
    apart = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items()}
    assert max(apart.values()) <= 1e-5, apart
    count = asked["block_size"] - 1
    root = data["ids"][0, data["anchors"]]
    state: Any = SimpleNamespace(root_B=root, limit_B=torch.full_like(root, count), sampling=Sampling(0.0))
    with torch.no_grad():
        drafted = states[:, head.first_slot : head.first_slot + count]
        draft = DominoDrafter(head, count).draft(state, drafted)
    assert draft.tokens_BN[:, 1:].tolist() == data[f"{case}.greedy"].tolist()
    assert not torch.equal(head.logits(drafted).argmax(-1), data[f"{case}.greedy"]), "the correction tells"


@pytest.mark.parametrize("product_first", [True, False], ids=["torch's", "reset gate before the product"])
def test_a_reset_gate_before_the_product_would_be_seen(product_first: bool) -> None:
    asked, data, head, *others = fixture("shifted")
    weights = dict(head.named_parameters())

    def by_hand(x_RKH: Tensor, *_: Any) -> tuple[Tensor, None]:
        return torch.stack([slow_gru(weights, x, product_first=product_first) for x in x_RKH]), None

    cast(Any, head.prefix_gru).forward = by_hand
    off = abs(their_loss(asked, data, head, *others)[0].item() / data["shifted.loss"].item() - 1)
    assert off < 1e-6 if product_first else off > 1e-5


def without_correction(output: HeadOutput) -> HeadOutput:
    def of(step: Any) -> Any:
        return replace(step, project=lambda *inputs: step.besides(*inputs)[0], besides=None)

    return HeadOutput(tuple(of(step) for step in output.steps))


def test_the_base_counts_for_less_and_less() -> None:
    target = make_target()
    head, batch = make_head("domino", target, gru_hidden_dim=7, emb_dim=6), packed(target)
    head.embed_proj[2].weight.data *= 3
    with torch.no_grad():
        output = head(batch, 5)
    plain = without_correction(output)

    def loss(output: HeadOutput, progress: float = 1.0, **changes: Any) -> float:
        spec = replace(LOSSES["domino"], **changes)
        return head_loss(output, batch, target.head, None, spec, progress).loss_sum.item()

    final, base = loss(output), loss(plain)
    assert abs(final / base - 1) > 0.01
    assert loss(output, 0.0) == pytest.approx(base)
    assert loss(output, 0.25) == pytest.approx((final + base) / 2), "half of the way through half of the training"
    assert loss(output, 0.5) == pytest.approx(final)
    assert loss(output, 0.3, base_weight=0.4, base_share=0.4) == pytest.approx(0.9 * final + 0.1 * base)


def test_it_learns_what_follows_a_drafted_token() -> None:
    """Trained, the correction is worth more than nothing: the drafts' own logits are right more often than the base."""
    target, head, batch = trained("domino")
    with torch.no_grad():
        output = head(batch, 3)
    plain = without_correction(output)
    right, base = (
        head_loss(o, batch, target.head, None, LOSSES["domino"]).step_correct[1:].sum() for o in (output, plain)
    )
    assert right > base


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gru_hidden_dim": 0}, "head.gru_hidden_dim is 0: it must be from 1 to"),
        ({"block_size": 4, "pure_draft_prefix_len": 4}, "drafts 4 tokens, none of which would be corrected"),
        ({"block_size": 4, "pure_draft_prefix_len": 3, "shift_label": False}, "drafts 3 tokens, none of which"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        DominoOptions(**options)
    assert "\n" not in str(caught.value)


def test_a_head_without_a_correction_has_no_base_to_weigh() -> None:
    with pytest.raises(UserError, match=r"train\.loss\.base_weight is 0\.5, but dflash heads .* correct no logits"):
        LossSpec(base_weight=0.5).check_head(make_head("dflash", make_target()))
    with pytest.raises(
        UserError, match=r"train\.loss\.base_share is 0\.3, but train\.loss\.base_weight is 0, so that nothing falls"
    ):
        LossSpec(base_weight=0.0, base_share=0.3).check_head(make_head("domino", make_target()))
