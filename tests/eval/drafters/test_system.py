"""Drafters that are simulated together: the target reads the answers once, and each number is what it is alone."""

from dataclasses import replace

import numpy as np
import pytest

from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.eval.drafters.baseline_spec import BaselineSpec
from draftsmith.eval.drafters.baselines import BASELINES, Supplies
from draftsmith.eval.drafters.system import SystemUnderTest, head_system, simulate_systems
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target, TargetOutput
from tests.heads.blocks import make_head, make_target, requests
from tests.models import tiny_model


def build(target: Target) -> list[SystemUnderTest]:
    """Heads of other layers in another order, one of no aux layer, a tree, a draft model, and one that reads texts alone."""
    medusa = find_method("medusa")
    own = medusa.build(medusa.options_class(num_heads=3), target, None).eval()
    supplies = Supplies(
        2,
        3,
        target.vocab_size,
        lambda path: Target(tiny_model("llama", seed=5), path="small", fingerprint="1"),
        lambda path: [],
    )
    return [
        head_system("dflash", make_head("dflash", target, layer_ids=[1, 4, 6]), 2, 3),
        BASELINES["prompt_lookup"](BaselineSpec("prompt_lookup"), supplies),
        head_system("dspark", make_head("dspark", target, layer_ids=[0, 4]), 2, 4),
        head_system("medusa", own, 2, 3, tree=StaticTree.of("small", [(0,), (1,), (0, 0)])),
        BASELINES["draft_model"](BaselineSpec("draft_model", path="small"), supplies),
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_the_target_reads_once_for_all(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    answers = decode_batch(target, TargetAlone(), requests(11), sampling).generations
    systems, passes = build(target), 0
    expected = [simulate_systems(target, [c], answers, sampling)[0] for c in systems]
    forward = Target.forward

    def count(self: Target, *args: object, **named: object) -> TargetOutput:
        nonlocal passes
        passes += self is target
        return forward(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", count)
    found = simulate_systems(target, systems, answers, sampling)
    assert passes == 2, "of 8 and of 3 answers"
    for c, one, alone in zip(systems, found, expected, strict=True):
        assert one.off_text == alone.off_text
        assert [len(by_k) for by_k in one.tallies] == [c.max_k] * len(answers)
        for mine, theirs in zip(one.tallies, alone.tallies, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert (a.tokens, a.rounds) == (b.tokens, b.rounds)
                np.testing.assert_array_equal(a.accepted_K, b.accepted_K)
    rounds = [tuple(tally.rounds for by_k in one.tallies for tally in by_k[:3]) for one in found]
    assert len(set(rounds)) == len(systems), "drafters that cannot be told apart would hide a mistake"


def test_texts_alone_need_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    answers = decode_batch(target, TargetAlone(), requests(3), Sampling()).generations
    lookup = build(target)[1]
    monkeypatch.setattr(Target, "forward", None)
    assert len(simulate_systems(target, [lookup, replace(lookup, max_k=2)], answers, Sampling())) == 2
    assert simulate_systems(target, [], answers, Sampling()) == []
