"""The formulas of a plan against the real thing: parameters, FLOPs, saved bytes, peak memory, optimizer state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import GPT2Config

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.estimate.figures import activation_bytes, learned_rows, parameter_bytes, tuned_parameters
from draftsmith.heads.base import DraftHead
from draftsmith.heads.block import base as block_base
from draftsmith.heads.cost import HeadCost, head_cost
from draftsmith.heads.dflash import DFlashOptions
from draftsmith.heads.draft_model import head as draft_lm
from draftsmith.heads.draft_model.options import DraftLmOptions
from draftsmith.heads.dspark.options import DSparkOptions
from draftsmith.heads.eagle1.options import Eagle1Options
from draftsmith.heads.eagle3.options import Eagle3Options
from draftsmith.heads.hydra.options import HydraOptions
from draftsmith.heads.layers import causal_kernels, training_pass
from draftsmith.heads.layers.ttt_attention import merged_attention
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa.options import MedusaOptions
from draftsmith.heads.medusa2.options import Medusa2Options
from draftsmith.heads.peagle.options import PEagleOptions
from draftsmith.heads.registry import Method, methods
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from draftsmith.train.optimizers import build_optimizers
from tests.models import tiny_model

pytestmark = pytest.mark.full

B, L, PROMPT, DOCUMENTS = 2, 264, 60, 2
#: No two dimensions are equal, so that a formula with the wrong one fails.
SIZES = {
    "vocab_size": 960,
    "hidden_size": 128,
    "intermediate_size": 392,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "initializer_range": 0.05,
}
CASES: dict[str, tuple[str, Any]] = {
    "dflash": (
        "dflash",
        DFlashOptions([1, 3, 5], 480, block_size=4, mask_token_id=0, num_layers=2, intermediate_size=300),
    ),
    "dflash, the whole vocabulary": (
        "dflash",
        DFlashOptions([2], block_size=3, mask_token_id=0, num_layers=3, head_dim=16, num_key_value_heads=4),
    ),
    "dspark": ("dspark", DSparkOptions([1, 3], 400, block_size=3, mask_token_id=0, num_layers=2, markov_rank=36)),
    "dspark without confidence": (
        "dspark",
        DSparkOptions([1, 3], block_size=2, mask_token_id=0, num_layers=1, markov_rank=60, confidence_head=False),
    ),
    "draft model": (
        "draft_model",
        DraftLmOptions(num_hidden_layers=3, hidden_size=96, intermediate_size=300, head_dim=16),
    ),
    "draft model, tied": (
        "draft_model",
        DraftLmOptions(hidden_size=64, num_attention_heads=4, tie_word_embeddings=True),
    ),
    "draft model of the target's layers": ("draft_model", DraftLmOptions(layers_from_target=[1, 3, 6])),
    "eagle1": ("eagle1", Eagle1Options(fc_bias=True, qkv_bias=True)),
    "hass": ("eagle1", Eagle1Options(aligned_passes=3, intermediate_size=300, num_key_value_heads=4)),
    "hass, not detached": ("eagle1", Eagle1Options(aligned_passes=2, detach_passes=False, noise_length=99)),
    "eagle3": ("eagle3", Eagle3Options(ttt_steps=4, draft_vocab_size=480)),
    "eagle3 frozen head": ("eagle3", Eagle3Options(ttt_steps=2, draft_vocab_size=400, train_lm_head=False)),
    "eagle3 with embeddings": ("eagle3", Eagle3Options(ttt_steps=3, draft_vocab_size=480, train_embeddings=True)),
    "eagle3 of low rank": ("eagle3", Eagle3Options(ttt_steps=4, draft_vocab_size=480, lm_head_rank=48)),
    "eagle3 of low rank, frozen": (
        "eagle3",
        Eagle3Options(ttt_steps=2, draft_vocab_size=400, lm_head_rank=48, train_lm_head=False),
    ),
    "eagle3 of its own size": (
        "eagle3",
        Eagle3Options([1, 3, 5, 6], None, 3, intermediate_size=500, num_attention_heads=4, num_key_value_heads=4),
    ),
    "hydra": ("hydra", HydraOptions(num_heads=3, num_layers=2, lm_head_bias=False)),
    "hydra, the target's projection": ("hydra", HydraOptions(num_heads=3, original_lm_head=True, dropout=0.1)),
    "hydra++": ("hydra", HydraOptions(4, 4, tie_blocks=True, prefix_attention=True, dropout=0.2)),
    "hydra++ of its own size": (
        "hydra",
        HydraOptions(2, 3, prefix_attention=True, original_lm_head=True, intermediate_size=1500, num_key_value_heads=4),
    ),
    "eagle3 of three layers": ("eagle3", Eagle3Options(ttt_steps=3, draft_vocab_size=480, num_hidden_layers=3)),
    "eagle3 of its own width": (
        "eagle3",
        Eagle3Options(ttt_steps=3, hidden_size=160, train_embeddings=True, draft_vocab_size=480, fc_norm=True),
    ),
    "peagle": ("peagle", PEagleOptions(depths=5, draft_vocab_size=480, mask_token_id=7)),
    "peagle of one layer": (
        "peagle",
        PEagleOptions(depths=4, num_hidden_layers=1, keep=1.0, train_embeddings=True, mask_token_id=7),
    ),
    "medusa": ("medusa", MedusaOptions(num_heads=4)),
    "medusa, two blocks": ("medusa", MedusaOptions(num_heads=3, num_layers=2)),
    "medusa, the target's projection": ("medusa", MedusaOptions(num_heads=4, original_lm_head=True)),
    "medusa2": ("medusa2", Medusa2Options(num_heads=3, lora_r=24)),
    "medusa2, some layers": (
        "medusa2",
        Medusa2Options(
            4, 2, True, lora_r=16, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], tune_lm_head=True
        ),
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", **SIZES).bfloat16(), path="tiny", fingerprint="0")


@pytest.fixture(autouse=True)
def _attention_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the flash kernel run in bf16, as on a GPU; a CPU's can do that, but the head prefers fp32 there."""
    forward, backward = causal_kernels._cpu_forward, causal_kernels._cpu_backward

    def narrow(q: Any, *rest: Any, **options: Any) -> Any:
        out, lse = forward(q, *rest, **options)
        return out, lse.to(q.dtype)

    def wide(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **options: Any) -> Any:
        return backward(grad, q, k, v, out, lse.float(), *rest, **options)

    def attention(q: Any, *rest: Any) -> Any:
        return merged_attention(q, *(x.to(q.dtype) for x in rest[:4]), *rest[4:])

    monkeypatch.setattr(causal_kernels, "_cpu_forward", narrow)
    monkeypatch.setattr(causal_kernels, "_cpu_backward", wide)
    monkeypatch.setattr(training_pass, "ttt_attention", attention)
    monkeypatch.setattr(block_base, "ttt_attention", attention)
    monkeypatch.setattr(draft_lm, "ttt_attention", attention)
    # A GPU keeps a mask of one byte per number, a CPU's own code four.
    monkeypatch.setattr(
        torch.nn.functional, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    )


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest, target: Target) -> tuple[DraftHead, HeadCost]:
    method, options = CASES[request.param]
    size = getattr(options, "draft_vocab_size", None)
    vocab = None if size is None else torch.arange(size)
    head = methods()[method].build(options, target, vocab)
    return head, head_cost(method, options, shape_of(target.model.config, 2))


def batch(target: Target, head: DraftHead) -> TrainBatch:
    """DOCUMENTS documents per row, each a prompt of PROMPT tokens and an answer."""
    place = torch.arange(L) % (L // DOCUMENTS)
    ids = torch.randint(0, target.vocab_size, (B, L))
    return TrainBatch(
        ids=ids,
        mask=(place >= PROMPT).expand(B, L),
        document=(torch.arange(L) // (L // DOCUMENTS)).expand(B, L),
        position=place.expand(B, L),
        aux=torch.randn(B, L, len(head.reads.layer_ids) * target.hidden_size).bfloat16(),
        last=torch.randn(B, L, target.hidden_size).bfloat16(),
        top1=ids.roll(-1, 1) % 400,
        logsumexp=torch.full((B, L), 10.0),
    )


def rows(cost: HeadCost) -> list[float]:
    answer = L // DOCUMENTS - PROMPT
    return [*learned_rows(cost, [float(B * DOCUMENTS * (answer - 1 - k)) for k in range(cost.steps)])]


def train_step(head: DraftHead, data: TrainBatch, target: Target, loss: LossSpec) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = head(data, head.trains.steps)
        scored = head_loss(output, data, target.head, head.draft_vocab, loss)
    scored.loss_sum.backward()


def test_parameters_are_exact(case: tuple[DraftHead, HeadCost]) -> None:
    head, cost = case
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert cost.matrices + cost.others == trained
    assert cost.aux_layers == len(head.reads.layer_ids)
    assert cost.steps == head.trains.steps


@pytest.mark.slow
def test_flops_of_a_training_step(case: tuple[DraftHead, HeadCost], target: Target) -> None:
    """Within 1%: the counter leaves out the flash kernel, the formula the diagonal keys, one per step instead of L."""
    head, cost = case
    data = batch(target, head)
    with FlopCounterMode(display=False) as counter:
        train_step(head, data, target, LossSpec())
    assert counter.get_total_flops() == pytest.approx(cost.product_flops(B * L, rows(cost)), rel=0.01)


def test_flops_of_attention(target: Target) -> None:
    """As torch counts a kernel over all pairs of a text's tokens; a causal one skips half of them."""
    cost = head_cost("eagle3", Eagle3Options(ttt_steps=4), shape_of(target.model.config, 2))
    length, texts = 40, 6
    shape = (texts, 8, length, 24)
    pairs = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert cost.attention_flops(texts * length, length) == 4 * pairs / 2


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "kl" else pytest.param(kind, marks=pytest.mark.slow) for kind in LOSSES],
)
@pytest.mark.slow
def test_peak_memory_of_a_training_pass(case: tuple[DraftHead, HeadCost], target: Target, kind: Any) -> None:
    """Allocations as the profiler sees them, minus the bf16 copies of the weights, which parameter_bytes counts."""
    head, cost = case
    loss, data = LossSpec(kind=kind), batch(target, head)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(head, data, target, loss)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    copies = 2 * sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert peak - copies == pytest.approx(activation_bytes(cost, B * L, rows(cost), loss), rel=0.1)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_weights_gradients_and_optimizer(case: tuple[DraftHead, HeadCost], target: Target, optimizer: Any) -> None:
    """Real tensors, exact but for the step counters; the bf16 copies (2 bytes) exist during a pass only."""
    head, cost = case
    train_step(head, batch(target, head), target, LossSpec())
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizers = build_optimizers(head, TrainSpec(optimizer=optimizer))
    for each in optimizers:
        each.step()
    states = [s for each in optimizers for state in each.state.values() for s in state.values()]
    tensors = [*trained, *(p.grad for p in trained if p.grad is not None)]
    tensors += [s for s in states if isinstance(s, torch.Tensor) and s.ndim]
    assert sum(x.numel() * x.element_size() for x in tensors) == parameter_bytes(cost, optimizer, 1) - 2 * (
        cost.matrices + cost.others
    )
    assert parameter_bytes(cost, optimizer, 8) - parameter_bytes(cost, optimizer, 1) == 4 * sum(
        p.numel() for p in trained
    )


def test_models_of_other_families_are_one_sentence(tmp_path: Path) -> None:
    """GPT-2's config names neither the width of its feed-forward layers nor key/value heads."""
    config = GPT2Config(vocab_size=160, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    config.save_pretrained(tmp_path)
    shape = shape_of(config, 2)
    assert head_cost("medusa", MedusaOptions(num_heads=2), shape).matrices > 0
    with pytest.raises(UserError, match=r"^The target names no intermediate_size: set head\.intermediate_size\.$"):
        _ = head_cost("eagle3", Eagle3Options(), shape).matrices
    with pytest.raises(UserError, match="is of type 'gpt2', but draft models here are plain Llamas"):
        _ = head_cost("draft_model", DraftLmOptions(init_from=str(tmp_path)), shape).matrices


def test_an_evaluation_holds_the_tuned_weights_too(target: Target) -> None:
    shape = shape_of(target.model.config, 2)
    cost = head_cost("medusa2", Medusa2Options(num_heads=2), shape)
    adapted = [m for name, m in target.model.named_modules() if name.endswith("_proj")]
    assert tuned_parameters(cost) == sum(m.weight.numel() for m in adapted)
    assert tuned_parameters(head_cost("medusa", MedusaOptions(num_heads=2), shape)) == 0


def test_a_method_without_formulas_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods(), "new", Method("package", ":Options", ":Drafter"))
    with pytest.raises(
        UserError,
        match=f"no formula for the method 'new' yet: a plan can be made for {', '.join(n for n in methods() if n != 'new')}",
    ):
        head_cost("new", None, shape_of(target.model.config, 2))
