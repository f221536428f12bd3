"""Heads with rounded weights: the numbers that torchao's rule says, the original untouched, and drafts that stay exact."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.conformance.spec import tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import DraftHead
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.hydra.head import HydraOptions
from draftsmith.heads.quantized import BITS, quantize_head, round_weights, weight_bytes
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target
from tests.eval.conformance.test_suite import SPECS

pytestmark = pytest.mark.full

TARGET = tiny_target(hidden_size=64)


def head_of(name: str, target: Target = TARGET) -> DraftHead:
    method, options, vocab = SPECS[name]
    torch.manual_seed(0)
    head = find_method(method).build(options, target, vocab).eval()
    for parameter in head.parameters():
        if parameter.requires_grad and not parameter.any():  # what training moves away from zero
            parameter.data.normal_(std=0.02)
    return head


def weights(head: DraftHead) -> dict[str, Tensor]:
    return {
        name: m.weight.detach().clone()
        for name, m in head.named_modules()
        if isinstance(m, nn.Linear) and m.weight is not None
    }


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "another package's"])
def test_every_method_is_rounded_as_torchao_says(name: str, kind: str) -> None:
    head = head_of(name)
    before = weights(head)
    if kind == "int4" and not any(w.shape[1] % 32 == 0 for w in before.values()):
        with pytest.raises(UserError, match="int4: no layer of the"):
            quantize_head(head, kind)
        return
    rounded = weights(quantize_head(head, kind))
    assert rounded.keys() == before.keys()
    changed = 0
    for key, exact in before.items():
        torch.testing.assert_close(weights(head)[key], exact, rtol=0, atol=0)
        groups = exact.shape[1] if kind != "int4" else next((n for n in (128, 64, 32) if exact.shape[1] % n == 0), 0)
        if not groups:
            torch.testing.assert_close(rounded[key], exact, rtol=0, atol=0)
            continue
        largest = exact.unflatten(1, (-1, groups)).abs().amax(2, keepdim=True)
        error = (rounded[key] - exact).unflatten(1, (-1, groups)).abs()
        # Half a step of an integer grid; of 3 bits of mantissa, half of an eighth of the number, or of the smallest step; of 7, of a 128th.
        step = (
            largest / 448 * 2**-9 + exact.unflatten(1, (-1, groups)).abs() / 8
            if kind == "float8"
            else exact.unflatten(1, (-1, groups)).abs() / 128
            if kind == "bfloat16"
            else largest / (2 ** (BITS[kind] - 1) - 1)
        )
        assert bool((error <= 0.51 * step + 1e-8).all())
        levels = [len(row.unique()) for row in rounded[key].unflatten(1, (-1, groups)).flatten(0, 1)]
        assert max(levels) <= 2 ** BITS[kind]
        changed += int((rounded[key] != exact).any())
    assert changed
    assert weight_bytes(head, kind) < weight_bytes(head)


def test_bytes_are_those_of_the_rounded_weights_and_their_scales() -> None:
    head = head_of("eagle3")
    linear = sum(w.numel() for w in weights(head).values())
    rows = sum(w.shape[0] for w in weights(head).values())
    others = sum(p.numel() for p in head.parameters() if p.requires_grad) - linear
    assert weight_bytes(head) == 4 * (linear + others)
    assert weight_bytes(head, "int8") == linear + 4 * (rows + others)


@pytest.mark.parametrize("kind", BITS)
def test_texts_stay_exact_and_the_simulation_is_of_the_rounded_head(kind: str) -> None:
    head = head_of("eagle3")
    system = head_system("eagle3", head, 3, 3, weights=kind)
    assert system.name == f"eagle3, {kind}"
    assert (system.info.weights, system.info.weight_bytes) == (kind, weight_bytes(head, kind))
    requests = [Request.seeded(str(i), "a", [3 + i, 4, 5], 24, 0) for i in range(4)]
    alone = decode_batch(TARGET, TargetAlone(), requests, Sampling()).generations
    drafted = decode_batch(TARGET, system.make(3), requests, Sampling()).generations
    assert [g.output_ids for g in drafted] == [g.output_ids for g in alone]
    assert system.simulate is not None
    tallies = system.simulate(TARGET, alone, Sampling(), 3).tallies
    assert [round(t[2].rounds) for t in tallies] == [len(g.rounds) for g in drafted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in BITS if kind != "bfloat16"])
def test_the_numbers_are_those_of_torchao(kind: str, dtype: torch.dtype) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    config = {
        "int8": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0)),
        "int4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(64)),
        "float8": torchao.Float8WeightOnlyConfig,
    }[kind]()
    layer = nn.Sequential(nn.Linear(192, 96).to(dtype))
    found = round_weights(layer[0].weight.detach().clone(), kind)
    torchao.quantize_(layer, config)
    torch.testing.assert_close(found, layer[0].weight.dequantize(), rtol=0, atol=0)


def test_numbers_by_hand() -> None:
    row = torch.tensor([[0.1, -0.75, 0.3, 0.04] + [0.0] * 28])
    # s = 0.75 / 7.5 = 0.1: the steps from -8 to 7; 0.04 is nearer to none.
    torch.testing.assert_close(round_weights(row, "int4")[0, :4], torch.tensor([0.1, -0.8, 0.3, 0.0]))
    # s = 0.75 / 127.5: 0.1 is 17 steps, 0.3 is 51, 0.04 is 6.8.
    steps = torch.tensor([17.0, -128.0, 51.0, 7.0])
    torch.testing.assert_close(round_weights(row, "int8")[0, :4], steps * 0.75 / 127.5)
    # s = 0.75 / 448: 59.7 lies between 56 and 60, 179.2 between 176 and 192, 23.9 between 22 and 24.
    numbers = torch.tensor([60.0, -448.0, 176.0, 24.0])
    torch.testing.assert_close(round_weights(row, "float8")[0, :4], numbers * 0.75 / 448)


def test_a_layer_with_a_channel_of_zeros_has_no_nan() -> None:
    head = head_of("medusa")
    first = next(m for m in head.modules() if isinstance(m, nn.Linear))
    first.weight.data[0] = 0
    for kind in BITS:
        rounded = weights(quantize_head(head, kind))
        assert all(bool(w.isfinite().all()) for w in rounded.values())


@pytest.mark.parametrize("kind", BITS)
def test_a_rounded_head_has_as_many_parameters(kind: str) -> None:
    """So that the costs of a head of another size are noticed."""
    head = head_of("eagle3")
    whole, rounded = (head_system("head", head, 2, 2, weights=weights).info for weights in (None, kind))
    assert whole.parameters
    assert rounded.parameters == whole.parameters
    assert rounded.parameters is not None
    half = replace(rounded, parameters=rounded.parameters // 2)
    assert rounded.unlike(half) == f"{rounded.parameters} parameters and not {half.parameters}"
    assert rounded.unlike(replace(rounded, parameters=0)) == "", "as earlier versions counted"


def test_half_precision_is_rounded_as_any_other() -> None:
    """Whose own numbers hold no scale of small weights."""
    small = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    small[0] = 0
    for kind in ("int8", "int4", "float8"):
        rounded = round_weights(small.half(), kind)
        torch.testing.assert_close(rounded.float(), round_weights(small.half().float(), kind), rtol=1e-3, atol=1e-7)
        assert not rounded[0].any()


def test_what_belongs_to_the_target_is_not_copied() -> None:
    for name in SPECS:
        head = head_of(name) if name != "another package's" else None
        kept = getattr(head, "_target_head", [None])[0]
        if head is not None and kept is not None:
            assert quantize_head(head, "bfloat16")._target_head[0] is kept, name


def test_a_projection_that_was_kept_as_it_was_counts() -> None:
    trained, kept = (
        find_method("eagle3").build(Eagle3Options([0, 1], train_lm_head=train), TARGET, torch.arange(80))
        for train in (True, False)
    )
    assert weight_bytes(kept) == weight_bytes(trained)
    assert weight_bytes(kept, "int8") == weight_bytes(trained, "int8")
    own, shared = (
        find_method("hydra").build(HydraOptions(num_heads=2, original_lm_head=one), TARGET, None)
        for one in (False, True)
    )
    assert weight_bytes(own, "int8") - weight_bytes(shared, "int8") < 0.3 * (weight_bytes(own) - weight_bytes(shared))
