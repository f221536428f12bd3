"""The target's own decoder layer as an MTP block: all of it is trained, its router stays exact, and what it cannot be is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.heads.mtp.head import ROUTING_BIAS, MtpOptions, build, cached_shapes
from draftsmith.heads.warm_start import adopt_options, restart
from tests.batches import documents_of, pack
from tests.models import make_target
from tests.natives import OWN_LAYERS


@pytest.mark.parametrize("case", ["deepseek", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_has_a_gradient(case: str, dtype: torch.dtype) -> None:
    kind, keys = OWN_LAYERS[case]
    target = make_target(kind, num_hidden_layers=2, **keys)
    before = build(MtpOptions(layer="target"), target, None)
    options = adopt_options(MtpOptions(mtp_steps=2), before, target, "before")
    assert options.layer == "target"
    head = restart(before, options, target).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        steps = head(pack(target, documents_of(target), ()), 2).steps
        sum(step.logits.float().square().mean() for step in steps).backward()
    none = {name for name, p in head.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert not none


def test_a_head_is_trained_on_for_another_engine() -> None:
    """Both ways with the same tensors; states before the norm are other ones, whose head has one tensor more."""
    target = make_target("glm4_moe", num_hidden_layers=2)
    plain = build(MtpOptions(qk_norm=True), target, None)
    served = restart(plain, adopt_options(MtpOptions(target_state="vllm", qk_norm=True), plain, target, ""), target)
    assert (served.hides_first, served.feeds_normed) == (True, False)
    assert torch.equal(served.fc.weight, plain.fc.weight)
    assert adopt_options(MtpOptions(qk_norm=True), served, target, "").target_state == "vllm"
    back = adopt_options(MtpOptions(target_state="after_norm", qk_norm=True), served, target, "")
    assert restart(served, back, target).feeds_normed
    with pytest.raises(UserError, match=r"^head.target_state is before_norm, but the head .* has vllm"):
        adopt_options(MtpOptions(target_state="before_norm", qk_norm=True), served, target, "")


def test_a_routing_bias_stays_exact_where_the_head_is_cast() -> None:
    kind, keys = OWN_LAYERS["deepseek"]
    target = make_target(kind, num_hidden_layers=2, **keys)
    head = build(MtpOptions(layer="target"), target, None)
    bias = head.get_buffer(f"layers.0.mlp.gate.{ROUTING_BIAS}")
    bias.fill_(1 / 3)
    half = head.bfloat16()
    assert {p.dtype for p in half.layers.parameters()} == {torch.bfloat16}
    assert torch.equal(half.get_buffer(f"layers.0.mlp.gate.{ROUTING_BIAS}"), torch.full_like(bias, 1 / 3))
    ((keys_of, values),) = cached_shapes(half.layers[0], half.rotary_emb)
    # Compressed: as much as the target itself caches.
    assert (keys_of.heads, keys_of.dim, values.heads, values.dim) == (1, 16, 1, 8)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            "glm4_moe",
            {"head_dim": 32},
            "head.head_dim is 32, but the layer of head.layer target has the target's sizes",
        ),
        ("glm4_moe", {"qk_norm": True}, "head.qk_norm is True: the layer of head.layer target has what norms"),
        ("mistral", {}, "The attention of MistralAttention has sliding_window, which is not computed here"),
    ],
)
def test_what_the_layer_is_not_is_refused(kind: str, options: dict[str, Any], words: str) -> None:
    target = make_target(kind, num_hidden_layers=2)
    with pytest.raises(UserError, match=words) as caught:
        build(MtpOptions(layer="target", **options), target, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["deepseek", "glm4_moe"])
def test_a_batch_without_a_row_has_gradients_of_zeros(case: str) -> None:
    """Such as documents that end with the first token of their answers; processes wait for each other's gradients."""
    kind, keys = OWN_LAYERS[case]
    target = make_target(kind, num_hidden_layers=2, **keys)
    head = build(MtpOptions(layer="target", mtp_steps=2), target, None).train()
    batch = pack(target, documents_of(target), ())
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    steps = head(empty, 2).steps
    assert [len(step.logits) for step in steps] == [0, 0]
    sum(step.logits.sum() for step in steps).backward()
    given = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert "layers.0.self_attn.o_proj.weight" in given
    assert not any(bool(grad.any()) for grad in given.values())
