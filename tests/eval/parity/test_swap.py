"""What a served target loses: shares add up, what was not swapped loses nothing, and both ends are what decoding has."""

import copy
from dataclasses import replace

import pytest
import torch

from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.conformance.spec import tiny_target
from draftsmith.eval.parity.swap import Side, Swapped, swap
from draftsmith.heads.base import DraftHead
from draftsmith.heads.quantized import quantize_head
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target
from tests.eval.conformance.test_suite import SPECS

TARGET = tiny_target(hidden_size=64)
REQUESTS = [Request(str(n), "s", (3 + n, 7, 5 + 2 * n), 24) for n in range(6)]
K = 3


def changed(**what: float) -> Target:
    """The target with noise on some of its weights, by a part of their names."""
    model = copy.deepcopy(TARGET.model)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if (std := next((value for part, value in what.items() if part in name), None)) is not None:
            weight.data += std * torch.randn(weight.shape, generator=generator)
    return Target(model, path="changed", fingerprint="1")


def head_of(target: Target) -> DraftHead:
    method, options, vocab = SPECS["eagle3"]
    torch.manual_seed(0)
    head = find_method(method).build(options, target, vocab).eval()
    for name, parameter in head.named_parameters():
        parameter.data.normal_(std=0.3, mean=float("norm" in name))
    return head


def shares(found: Swapped) -> list[float]:
    return [share.lost for share in found.shares]


def decoded(target: Target, head: DraftHead) -> float:
    drafter = find_method(head.method).make_drafter(head, K)
    generations = decode_batch(target, drafter, REQUESTS, Sampling(0.0)).generations
    return total((tally_generation(g, K) for g in generations), K).tau


def test_shares_add_up_to_what_decoding_loses() -> None:
    other = changed(mlp=0.2, lm_head=0.2)
    own, served = Side(TARGET, (head_of(TARGET),) * 2), head_of(other)
    found = swap(own, Side(other, (served, quantize_head(served, "int4"))), REQUESTS, K)
    assert found.tau == pytest.approx(decoded(TARGET, own.heads[0]))
    assert found.tau_served == pytest.approx(decoded(other, quantize_head(served, "int4")))
    assert sum(shares(found)) == pytest.approx(found.tau - found.tau_served)
    assert found.differ > 0
    assert all(share.interval is None for share in found.shares), "as everywhere of fewer than ten prompts"
    more = [*REQUESTS, *(replace(one, sample_id=f"{one.sample_id} again") for one in REQUESTS)]
    found = swap(own, Side(other, (served, served)), more, K)
    assert all(share.interval and share.interval[0] <= share.lost <= share.interval[1] for share in found.shares)


def test_the_same_target_loses_nothing() -> None:
    side = Side(TARGET, (head_of(TARGET),) * 2)
    found = swap(side, side, REQUESTS, K)
    assert (shares(found), found.differ) == ([0, 0, 0], 0)


def test_other_answers_alone() -> None:
    """The layers that the head reads lie below a final norm that says other things."""
    other = changed(**{"model.norm": 2.0})
    sides = [Side(target, (head_of(target),) * 2) for target in (TARGET, other)]
    answers, states, head = shares(swap(sides[0], sides[1], REQUESTS, K))
    assert abs(answers) > 0.01
    assert (states, head) == (0, 0)


def test_other_states_alone() -> None:
    """The head reads other states of the same target, as from an engine that taps other layers."""
    other = head_of(TARGET)
    other.fc.weight.data = other.fc.weight.roll(64, 1) if hasattr(other, "fc") else other.fc.weight
    answers, states, head = shares(swap(Side(TARGET, (head_of(TARGET),) * 2), Side(TARGET, (other,) * 2), REQUESTS, K))
    assert abs(states) > 0.01
    assert (answers, head) == (0, 0)


def test_rounded_weights_alone() -> None:
    head = head_of(TARGET)
    own = Side(TARGET, (head, quantize_head(head, "int4")))
    answers, states, rounded = shares(swap(own, own, REQUESTS, K))
    assert abs(rounded) > 0.001
    assert (answers, states) == (0, 0)
