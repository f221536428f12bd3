"""What is counted on a head without memory, against a real training pass: FLOPs, peak memory, optimizer state."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import cached
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import GPT2Config

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost, TextCost, gradients_ready
from draftsmith.estimate.figures import parameter_bytes
from draftsmith.heads.adapter import DraftAdapter, adapt
from draftsmith.heads.base import DraftHead
from draftsmith.heads.block import base as block_base
from draftsmith.heads.dflash import DFlashOptions
from draftsmith.heads.dflash2 import DFlash2Options
from draftsmith.heads.domino import DominoOptions
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.dspark import DSparkOptions
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.hydra import HydraOptions
from draftsmith.heads.layers import training_pass
from draftsmith.heads.layers import ttt_attention as kernels
from draftsmith.heads.layers.ttt_attention import merged_attention
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.losses.head_loss import PIECE, LossOutput, head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa import head as medusa
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.mtp import MtpOptions
from draftsmith.heads.peagle import PEagleOptions
from draftsmith.heads.registry import methods
from draftsmith.heads.xpress import XPressOptions
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from draftsmith.train.schedule import build_optimizers
from tests.models import tiny_model

pytestmark = pytest.mark.full

B, L, PROMPT, DOCUMENTS, RANK = 2, 264, 60, 2, 4
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
    "dflash2": (
        "dflash2",
        DFlash2Options([1, 3, 5], 480, block_size=4, mask_token_id=0, num_layers=2, selector_rank=24, sliding_window=9),
    ),
    "domino": ("domino", DominoOptions([1, 3], 480, 4, 0, 2, gru_hidden_dim=72, emb_dim=24)),
    "xpress": ("xpress", XPressOptions([1, 3], 480, 4, 0, 2, xpress_rank=24, xpress_mlp_hidden=72)),
    "dspark": ("dspark", DSparkOptions([1, 3], 400, block_size=3, mask_token_id=0, num_layers=2, markov_rank=36)),
    "draft model": (
        "draft_model",
        DraftLmOptions(num_hidden_layers=3, hidden_size=96, intermediate_size=300, head_dim=16),
    ),
    "draft model of the target's layers": ("draft_model", DraftLmOptions(layers_from_target=[1, 3, 6])),
    "eagle1": ("eagle1", Eagle1Options(fc_bias=True, qkv_bias=True)),
    "hass, not detached": ("eagle1", Eagle1Options(aligned_passes=2, detach_passes=False, noise_length=99)),
    "eagle3": ("eagle3", Eagle3Options(ttt_steps=4, draft_vocab_size=480)),
    "eagle3 of low rank": ("eagle3", Eagle3Options(ttt_steps=4, draft_vocab_size=480, lm_head_rank=48)),
    "hydra": ("hydra", HydraOptions(num_heads=3, num_layers=2, lm_head_bias=False)),
    "hydra, the target's projection": ("hydra", HydraOptions(num_heads=3, original_lm_head=True, dropout=0.1)),
    "hydra++": ("hydra", HydraOptions(4, 4, tie_blocks=True, prefix_attention=True, dropout=0.2)),
    "eagle3 of three layers": ("eagle3", Eagle3Options(ttt_steps=3, draft_vocab_size=480, num_hidden_layers=3)),
    "eagle3 of its own width": (
        "eagle3",
        Eagle3Options(ttt_steps=3, hidden_size=160, train_embeddings=True, draft_vocab_size=480, fc_norm=True),
    ),
    "mtp": ("mtp", MtpOptions(qk_norm=True, intermediate_size=300)),
    "mtp of FastMTP": ("mtp", MtpOptions(step_keys=True)),
    "peagle": ("peagle", PEagleOptions(depths=5, draft_vocab_size=480, mask_token_id=7)),
    "medusa": ("medusa", MedusaOptions(num_heads=4)),
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
    forward, backward = kernels._cpu_forward, kernels._cpu_backward

    def narrow(q: Any, *rest: Any, **options: Any) -> Any:
        out, lse = forward(q, *rest, **options)
        return out, lse.to(q.dtype)

    def wide(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **options: Any) -> Any:
        return backward(grad, q, k, v, out, lse.float(), *rest, **options)

    def attention(q: Any, k_BLGD: Any, v_BLGD: Any, own_k: Any, own_v: Any, plan: Any, scale: Any) -> Any:
        own = [[x.to(q.dtype) for x in some] for some in (own_k, own_v)]
        return merged_attention(q, k_BLGD.to(q.dtype), v_BLGD.to(q.dtype), *own, plan, scale)

    monkeypatch.setattr(kernels, "_cpu_forward", narrow)
    monkeypatch.setattr(kernels, "_cpu_backward", wide)
    monkeypatch.setattr(training_pass, "ttt_attention", attention)
    monkeypatch.setattr(block_base, "ttt_attention", attention)
    # A GPU keeps a mask of one byte per number, a CPU's own code four.
    monkeypatch.setattr(
        torch.nn.functional, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    )


def make(name: str, target: Target) -> tuple[DraftHead, HeadCost]:
    method, options = CASES[name]
    size = getattr(options, "draft_vocab_size", None)
    head = methods()[method].build(options, target, None if size is None else torch.arange(size))
    return head, HeadCost(method, options, shape_of(target.model.config, 2))


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


def scored(head: DraftHead, data: TrainBatch, target: Target, loss: LossSpec, progress: float = 0.0) -> LossOutput:
    with torch.autocast("cpu", torch.bfloat16):
        output = head(data, head.trains.steps)
        return head_loss(output, data, target.head, head.draft_vocab, loss, progress=progress)


def count(cost: HeadCost, loss: LossSpec) -> tuple[float, float]:
    """What is counted for the texts of `batch`: FLOPs of products, and bytes."""
    text = cost.of_text(PROMPT, L // DOCUMENTS - PROMPT, loss)
    assert not cost.guessed
    return B * DOCUMENTS * text.products, text.memory(B * DOCUMENTS, "cpu")


class Products(TorchDispatchMode):
    """The FLOPs of products, as torch counts them."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if counts := flop_registry.get(func._overloadpacket):
            self.flops += counts(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("name", CASES)
def test_a_training_pass(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations as the profiler sees them, minus the bf16 copies of the weights. FLOPs within 1%: of the products with a row's own
    keys torch's counter sees those of the backward pass, too."""
    monkeypatch.setitem(PIECE, "cpu", 32 * 960)
    monkeypatch.setitem(PIECE, "cuda", 24 * 960)
    head, cost = make(name, target)
    data = batch(target, head)
    products, memory = count(cost, LossSpec())
    found = list[float]()
    for progress in (0.0, 1.0):  # Domino's logits before their correction have a loss in the first half alone
        with Products() as counter:
            scored(head, data, target, LossSpec(), progress).loss_sum.backward()
        found.append(counter.flops)
        text = cost.of_text(PROMPT, L // DOCUMENTS - PROMPT, LossSpec(), progress)
        assert counter.flops == pytest.approx(B * DOCUMENTS * text.products, rel=0.01)
        head.zero_grad()
    assert sum(found) / 2 == pytest.approx(products, rel=0.01)
    assert (found[0] > 1.05 * found[1]) == (name == "domino")
    assert peak(head, data, target, LossSpec()) == pytest.approx(memory, rel=0.03)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "medusa"])
def test_an_adapter(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products and sums with the base are made once for all texts. What it trains is a few weights, beside the head's own: up to the
    loss the plan is 8% off at most, with the dense gradients that come behind it."""
    monkeypatch.setitem(PIECE, "cpu", 32 * 960)
    monkeypatch.setitem(PIECE, "cuda", 24 * 960)
    head, _ = make(name, target)
    cost = HeadCost(*CASES[name], shape_of(target.model.config, 2), rank=RANK)
    adapt(head, DraftAdapter(RANK, 8.0, Path(), ""))
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert (cost.parameters, cost.matrices, cost.tuned_parameters) == (trained, 0, 0)
    data = batch(target, head)
    products, memory = count(cost, LossSpec())
    with Products() as counter, cached():
        scored(head, data, target, LossSpec()).loss_sum.backward()
    assert counter.flops == pytest.approx(products + 6 * RANK * cost.adapted, rel=0.01)
    head.zero_grad()
    with cached():
        most = peak(head, data, target, LossSpec()) + 2 * trained
    besides = parameter_bytes(cost, "adamw") - 18 * trained - 4 * cost.weights
    assert most == pytest.approx(memory + besides, rel=0.08)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in LOSSES if kind != "kl"])
def test_the_memory_of_a_loss(kind: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIECE, "cpu", 60 * 960)
    monkeypatch.setitem(PIECE, "cuda", 80 * 960)
    head, cost = make("medusa", target)
    _, memory = count(cost, loss := LossSpec(kind=kind))
    assert peak(head, batch(target, head), target, loss) == pytest.approx(memory, rel=0.03)


def peak(head: DraftHead, data: TrainBatch, target: Target, loss: LossSpec) -> float:
    """The most bytes up to the loss, but for gradients of parameters, which the optimizer's share counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        ready = gradients_ready(scored(head, data, target, loss).loss_sum)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    products = [(e.start_ns(), e.end_ns(), _in_fp32(*e.shapes()[:2])) for e in events if e.name() == "aten::mm"]
    sizes: list[int] = []
    for event in (e for e in events if e.name() == "[memory]"):
        size, when = event.nbytes(), event.start_ns()
        # Where a CPU has no products in bf16, fp32 sums live as long as one.
        if (
            sizes
            and size == -sizes[-1] < 0
            and any(begin < when < end and -size <= most for begin, end, most in products)
        ):
            sizes.pop()
        else:
            sizes.append(size)
    copies = 2 * sum(p.numel() for p in head.parameters() if p.requires_grad)
    return max(accumulate(sizes)) - copies - ready


def _in_fp32(left: list[int], right: list[int]) -> int:
    """The most bytes that a product of two matrices takes in fp32, of its sums or of a factor, with what allocators add."""
    return 4 * max(left[0] * right[1], left[0] * left[1], right[0] * right[1]) + 4096


@pytest.mark.parametrize("window", [None, 8])
def test_flops_of_attention(window: int | None, target: Target) -> None:
    """As torch counts a kernel over all pairs of a text's tokens, up to the last that counts; a causal one skips half of them, a window
    most."""
    cost = HeadCost("eagle3", Eagle3Options(ttt_steps=4, sliding_window=window), shape_of(target.model.config, 2))
    length = 129
    shape = (1, 8, length, 24)
    pairs = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    share = 1 / 2 if window is None else (window * length - window**2 / 2) / length**2
    assert cost.of_text(60, length + 2 - 60, LossSpec()).attention == pytest.approx(4 * pairs * share)


@pytest.mark.parametrize("name", ["eagle3", "hydra", "medusa2", "dspark"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimizer(name: str, target: Target, optimizer: Any) -> None:
    """Real tensors, exact but for the step counters; the bf16 copies (2 bytes) exist during a pass only."""
    head, cost = make(name, target)
    scored(head, batch(target, head), target, LossSpec()).loss_sum.backward()
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizers = build_optimizers(head, TrainSpec(optimizer=optimizer))
    for each in optimizers:
        each.step()
    states = [s for each in optimizers for state in each.state.values() for s in state.values()]
    tensors = [*trained, *(p.grad for p in trained if p.grad is not None)]
    tensors += [s for s in states if isinstance(s, torch.Tensor) and s.ndim]
    held = sum(x.numel() * x.element_size() for x in tensors)
    assert held == parameter_bytes(cost, optimizer) - 2 * cost.parameters


def test_models_of_other_families_are_one_sentence(tmp_path: Path) -> None:
    """GPT-2's config names neither the width of its feed-forward layers nor key/value heads."""
    config = GPT2Config(vocab_size=160, n_positions=64, n_embd=32, n_layer=8, n_head=2)
    config.save_pretrained(tmp_path)
    shape = shape_of(config, 2)
    assert HeadCost("medusa", MedusaOptions(num_heads=2), shape).matrices > 0
    with pytest.raises(UserError, match=r"^The target gpt2 names no intermediate_size: set head\.intermediate_size\.$"):
        HeadCost("eagle3", Eagle3Options(), shape, "gpt2")
    with pytest.raises(UserError, match="is of type 'gpt2', but draft models here are plain Llamas"):
        HeadCost("draft_model", DraftLmOptions(init_from=str(tmp_path)), shape)


def test_a_tuned_target_has_weights_of_its_own(target: Target) -> None:
    adapted = [m for name, m in target.model.named_modules() if name.endswith("_proj")]
    cost = HeadCost("medusa2", Medusa2Options(num_heads=2), shape_of(target.model.config, 2))
    assert cost.tuned_parameters == sum(m.weight.numel() for m in adapted)


def test_a_tuned_mixture_multiplies_the_experts_that_a_token_visits() -> None:
    """In their forward pass, and for the gradient of their input; adapters and heads are a few percent."""
    shape = shape_of(tiny_model("mixtral").config, 2)
    cost, alone = (
        HeadCost(m, o, shape) for m, o in (("medusa2", Medusa2Options(lora_r=1)), ("medusa", MedusaOptions()))
    )
    body, tokens = shape.active - shape.hidden * shape.vocab, 50
    found = cost.of_text(20, 30, LossSpec()).products - alone.of_text(20, 30, LossSpec()).products
    assert found == pytest.approx(4 * body * tokens, rel=0.1)


def test_what_cannot_be_counted_is_guessed_and_said(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that asks for numbers that are not there, in its forward pass or when it is built."""
    shape, options = shape_of(target.model.config, 2), MedusaOptions(num_heads=2)
    monkeypatch.setattr(MedusaHead, "forward", lambda head, batch, steps: batch.last.tolist())
    cost = HeadCost("medusa", options, shape)
    counted = cost.parameters
    assert cost.of_text(4, 6, LossSpec()) == TextCost(60.0 * counted, 0.0, 600.0 * 128, 600.0 * 128, 0.0, 20.0, 6 * 960)
    assert cost.guessed.startswith(
        "training: each token passes each weight once, as the head cannot run without the values"
    )
    monkeypatch.setattr(medusa, "build", lambda options, target, vocab: target.embedding.numpy())
    cost = HeadCost("medusa", options, shape)
    assert cost.of_text(4, 6, LossSpec()).flops == 60.0 * cost.parameters
    assert cost.parameters == (shape.parameters - shape.lookup) // shape.layers
    assert cost.guessed.startswith("training: a head of the size of one layer of the target, as it cannot be built")
