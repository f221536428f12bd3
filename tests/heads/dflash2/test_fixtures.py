"""A training step of DFlash2, with a fixed decay and with D-PACE, and its greedy drafts, held against what speculators 0.9.0 computed on
the same weights and data.

Its blocks begin at every token of the mask, and a slot counts where its own token does: so a block's rows are named here. It divides
by the number of slots.
"""

import json
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.heads.base import HeadOutput
from draftsmith.heads.dflash2.head import DFlash2Drafter, DFlash2Head, DFlash2Options
from draftsmith.heads.layers.from_target import LAYER_KEYS
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.plan import plan_queries
from draftsmith.target.target import Target, TargetHead

OURS = Path(__file__).resolve().parents[2] / "fixtures" / "speculators_dflash2_dpace"
OTHERS = OURS.parents[3] / "shared" / "fixtures"
CASES = {
    "dpace": (OURS, LossSpec(kind="argmax_ce", slot_weights="dpace", normalize="weights")),
    "fixed decay": (OTHERS / "speculators_dflash2", LossSpec(kind="kl", decay=exp(-1 / 4))),
}


def make_head(config: dict[str, Any], weights: dict[str, Tensor], target: Target) -> DFlash2Head:
    section = config["transformer_layer_config"]
    names = ("block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    layer_ids = config["aux_hidden_state_layer_ids"]
    more = {name: config[name] for name in names}
    options = DFlash2Options(layer_ids=layer_ids, num_layers=section["num_hidden_layers"], **more)
    head = DFlash2Head(options, LlamaConfig(**{key: section[key] for key in LAYER_KEYS}), target, layer_ids, None)
    head.load_state_dict({name: value for name, value in weights.items() if name in head.state_dict()})
    return head


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_drafts_are_those_of_speculators(case: str) -> None:
    folder, spec = CASES[case]
    if not folder.is_dir():
        pytest.skip(f"the reference run {folder.name} is not here")
    config, expected = (json.loads((folder / f"{name}.json").read_text()) for name in ("draft_config", "expected"))
    data, weights = load_file(folder / "batch.safetensors"), load_file(folder / "draft.safetensors")
    ends = load_file(folder / "target_head.safetensors")
    norm, target_head = LlamaRMSNorm(64, eps=1e-6), TargetHead(ends["lm_head.weight"])
    norm.weight.data = ends["model.norm.weight"]
    target = cast(Target, SimpleNamespace(embedding=weights["embed_tokens.weight"], head=target_head))
    head = make_head(config, weights, target)
    last = norm(data["last"]).detach()
    logits, mask = target_head.logits(last), data["mask"].bool()
    batch = TrainBatch(
        ids=data["ids"],
        mask=mask,
        document=data["doc"],
        position=data["pos"],
        aux=data["aux"],
        last=last,
        top1=logits.argmax(-1),
        logsumexp=logits.logsumexp(-1),
    )
    size = config["block_size"]
    anchors = mask[0, :-size].nonzero()[:, 0]
    counted = [mask[0, anchors + k] for k in range(1, size)]  # slot k predicts the token k behind the anchor
    states = head._fill(batch, plan_queries(batch, anchors - 1), head._context_keys(batch), size)
    of_steps = [head.norm(states[own, 1 + k]) for k, own in enumerate(counted)]
    output = HeadOutput(tuple(head.outputs(of_steps, [anchors[own] - 1 for own in counted], batch)))

    slots = sum(int(own.sum()) for own in counted)
    loss = head_loss(output, batch, target_head, None, spec).loss_sum / (slots + 1e-5)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    loss.backward()
    gradients = load_file(folder / "grads.safetensors")
    ours = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert ours.keys() == gradients.keys()
    apart = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in gradients.items()}
    assert max(apart.values()) <= 1e-5, apart

    first = torch.tensor(expected["anchors"])
    assert torch.equal(anchors[: len(first)], first)
    state: Any = SimpleNamespace(
        root_B=batch.ids[0, first], limit_B=torch.full_like(first, size), sampling=Sampling(0.0)
    )
    with torch.no_grad():
        drafted = head.norm(states[: len(first), 1:])
        plain = drafted @ target_head.weight.T
        draft = DFlash2Drafter(head, size - 1).draft(state, drafted)
    assert draft.tokens_BN[:, 1:].tolist() == expected["greedy_blocks"]
    assert plain.argmax(-1).tolist() == expected["plain_argmax_blocks"]
