"""One EAGLE-3 training step, held against what speculators and SpecForge computed on the same weights and data.

Their conventions (shifts, masks, means, unnormalised states) are translated here, not in the product.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import HeadOutput, shift_left
from draftsmith.heads.eagle3.head import Eagle3Head, Eagle3Options
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target, TargetHead

FIXTURES = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="the reference runs (../shared/fixtures) are not here")


def prepend(x: Tensor) -> Tensor:
    """Undo a left shift by one along dimension 1: y[:, t + 1] = x[:, t]."""
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)


def append(x: Tensor, fill: float = 0) -> Tensor:
    """Add one position at the end of dimension 1."""
    return torch.cat([x, torch.full_like(x[:, :1], fill)], 1)


def make_head(
    weights: dict[str, Tensor], options: Eagle3Options, config: LlamaConfig, layer_ids: list[int]
) -> Eagle3Head:
    draft_vocab = torch.arange(len(weights["d2t"])) + weights["d2t"]
    target = cast(Target, SimpleNamespace(embedding=weights["embed_tokens.weight"]))
    head = Eagle3Head(options, config, target, layer_ids, draft_vocab)
    ours = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    ours = {name: value for name, value in ours.items() if name not in ("d2t", "t2d")}
    head.load_state_dict({**ours, "draft_vocab": draft_vocab})
    return head


def check_gradients(head: Eagle3Head, expected: dict[str, Tensor]) -> None:
    ours = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    expected = {name.replace("midlayer.", "layers.0."): grad for name, grad in expected.items()}
    assert ours.keys() == expected.keys()
    errors = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", ["speculators_eagle3_a", "speculators_eagle3_b"])
def test_speculators(name):
    folder = FIXTURES / name
    config, expected = (json.loads((folder / f"{f}.json").read_text()) for f in ("draft_config", "expected"))
    data, weights = load_file(folder / "batch.safetensors"), load_file(folder / "draft.safetensors")
    target = load_file(folder / "target_head.safetensors")
    flags = {f: config[f] for f in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")}
    options = Eagle3Options(train_lm_head=False, **flags)
    layer_ids = config["eagle_aux_hidden_state_layer_ids"]
    head = make_head(weights, options, LlamaConfig(**config["transformer_layer_config"]), layer_ids)

    norm = LlamaRMSNorm(256, eps=expected["target_rms_norm_eps"])
    norm.weight.data = target["model.norm.weight"]
    last = norm(data["verifier_last_hidden_states"]).detach()
    target_head = TargetHead(target["lm_head.weight"])
    # Row t of theirs holds token and state of position t + 1; they drop no row for an argmax outside the vocabulary.
    batch = TrainBatch(
        ids=prepend(data["input_ids"]),
        mask=append(data["loss_mask"]),
        document=append(data["document_ids"], -1),
        position=append(data["position_ids"]),
        aux=append(data["hidden_states"]),
        last=prepend(last),
        top1=torch.full_like(prepend(data["input_ids"]), int(head.draft_vocab[0])),
        logsumexp=prepend(target_head.logits(last).logsumexp(-1)),
    )
    steps = expected["args"]["ttt"]
    masks = [shift_left(batch.mask, k, False) for k in range(steps)]
    head.supervised = lambda batch: iter(masks)
    output = head(batch, steps)
    spec = LossSpec(kind="kl", decay=expected["args"]["decay"])
    losses = []
    for step, mask in zip(output.steps, masks, strict=True):  # their mean is per step
        loss = head_loss(HeadOutput((step,)), batch, target_head, head.draft_vocab, spec)
        losses.append(loss.loss_sum / (mask.sum() + 1e-5))
    assert torch.stack(losses).tolist() == pytest.approx(expected["per_step"], abs=1e-5)
    total = torch.stack(losses).sum()
    assert total.item() == pytest.approx(expected["loss"], abs=1e-5)
    total.backward()
    check_gradients(head, load_file(folder / "grads.safetensors"))


def test_specforge():
    folder = FIXTURES / "specforge_eagle3"
    expected, tensors = json.loads((folder / "expected.json").read_text()), load_file(folder / "tensors.safetensors")
    group = {
        g: {n.removeprefix(g): t for n, t in tensors.items() if n.startswith(g)} for g in ("batch/", "draft/", "grads/")
    }
    data, weights = group["batch/"], group["draft/"]
    config = {k.removeprefix("draft_config/"): v for k, v in expected.items() if k.startswith("draft_config/")}
    rope = {k.removeprefix("rope_parameters/"): v for k, v in config.items() if k.startswith("rope_parameters/")}
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = LlamaConfig(rope_parameters=rope, **{k: config[k] for k in (*keys, "rms_norm_eps", "hidden_act")})
    head = make_head(weights, Eagle3Options(), layer, [k + 1 for k in expected["capture"]])

    # Their left shift of the target logits fills the end with zeros, a uniform teacher: one more position of state 0.
    target_head = TargetHead(tensors["target/lm_head.weight"])
    last = append(data["target"])
    logits = target_head.logits(last)
    B, T = data["input_ids"].shape
    batch = TrainBatch(
        ids=append(data["input_ids"]),
        mask=append(data["loss_mask"]).bool(),
        document=append(data["attention_mask"]) - 1,
        position=torch.arange(T + 1).expand(B, -1),
        aux=append(data["hidden_state"]),
        last=last,
        top1=logits.argmax(-1),
        logsumexp=logits.logsumexp(-1),
    )
    steps = expected["args/ttt"]
    head.supervised = lambda batch: (shift_left(batch.mask, k, False) for k in range(steps))
    output = head(batch, steps)
    loss = head_loss(output, batch, target_head, head.draft_vocab, LossSpec(kind="soft_ce", decay=0.8))
    assert (loss.step_loss / (B * T)).tolist() == pytest.approx(expected["result/plosses"], abs=1e-5)
    total = loss.loss_sum / (B * T)
    assert total.item() == pytest.approx(expected["result/loss"], abs=1e-5)
    total.backward()
    check_gradients(head, group["grads/"])
