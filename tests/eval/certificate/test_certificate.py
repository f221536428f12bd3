"""Certificates of right decoders are given, as often as they say; every fault is found, on chains and trees, drawn or not."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.decoder import captured
from draftsmith.decoder import verify as rules
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.eval.certificate import certificate
from draftsmith.eval.certificate.certificate import Design, Judge, checks_of, draw_decoded, exact_pairs
from draftsmith.eval.certificate.controls import CONTROLS, Control, setting_of, spoiled
from draftsmith.eval.conformance.spec import Spec, tiny_target
from draftsmith.eval.drafters.system import Way
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.foreign.records import Journal
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.progress import Bar

WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "growing tree": {"tree": DynamicTree(3, 3, 9)},
}
T, REPEATS = 5, 40


@cache
def spec() -> Spec:
    return Spec("eagle3", Eagle3Options(layer_ids=[0, 1, 2], ttt_steps=3), tiny_target(initializer_range=0.15))


def design(level: float = 0.01, distance: float = 0.15) -> Design:
    return Design(level, 0.9, distance, 3, T, checks_of(T), REPEATS)


def judge_of(sampling: Sampling, drafter: Drafter, journal: Journal | None = None) -> "certificate.Outcome":
    target, prompts = spec().target, spec().requests[:3]
    with Bar(disable=True) as bar:
        alone = draw_decoded(Way(target, TargetAlone()), prompts, T, REPEATS, 0, "target alone")
        judge = Judge(
            design(), alone, journal or Journal(), bar, lambda one: [exact_pairs(target, p, one) for p in prompts]
        )
        return judge.test("head", draw_decoded(Way(target, drafter), prompts, T, REPEATS, 0, "head"), sampling)


@pytest.mark.full
@pytest.mark.parametrize(
    "way",
    [
        "chain",
        "growing tree",
    ],
)
def test_a_right_decoder_is_certified_and_every_fault_is_found(way: str) -> None:
    right = (captured.verify, rules.accepts, Loop._admit)
    tested = judge_of(
        Sampling(0.7, top_k=30, top_p=0.9, repetition_penalty=1.6), EagleDrafter(spec().deployed, 3, **WAYS[way])
    )
    assert [one.name for one in tested.controls if not one.found] == []
    assert not tested.reasons
    assert tested.accepted
    assert tested.rejected
    assert (captured.verify, rules.accepts, Loop._admit) == right, "nothing of a fault is left"
    assert len(tested.checks) == checks_of(T)


def test_what_cannot_be_certified_says_why() -> None:
    """Drafts of which none is rejected, and tests that miss a fault."""
    target, prompts = spec().target, spec().requests[:3]

    def draw(sampling: Sampling, control: Control | None, number: int) -> Mapping[str, Any]:
        # By name, as the address of its function would draw others in every process.
        name = "again" if control is None else f"again, {control.name}"
        alone = draw_decoded(Way(target, TargetAlone()), prompts, T, REPEATS, 0, name)
        return {**alone(sampling, None, number), "accepted": 5, "rejected": 0}

    with Bar(disable=True) as bar:
        alone = draw_decoded(Way(target, TargetAlone()), prompts, T, REPEATS, 0, "target alone")
        tested = Judge(design(), alone, Journal(), bar).test("head", draw, Sampling(1.0), CONTROLS[:1])
    assert tested.reasons == (
        "no draft was rejected, so nothing is known of what happens when one is",
        "the tests are too weak: wrong residual was not found",
    )
    assert tested.controls[0].samples == design().samples


def test_exact_probabilities_are_those_of_every_pair() -> None:
    """Summed by hand, with a penalty, and where most first tokens are not expanded."""
    target, request, sampling = spec().target, spec().requests[0], Sampling(0.9, repetition_penalty=1.4)
    pairs = exact_pairs(target, request, sampling)
    assert len(pairs.row) == 32
    assert not set(pairs.row) & set(target.eos_ids)
    mass = np.zeros(len(pairs.label))

    def plain(ids: list[int]) -> torch.Tensor:
        logits = target.head.logits(target.forward(torch.tensor([ids])).last[0, -1]).double()
        for token in set(ids):
            logits[token] = logits[token] * 1.4 if logits[token] < 0 else logits[token] / 1.4
        return (logits / 0.9).softmax(-1)

    with torch.no_grad():
        first = plain([*request.prompt_ids])
        for token, p in enumerate(first.tolist()):
            if (row := pairs.row.get(token)) is None:
                mass[token] = p
            else:
                start = pairs.vocab * (row + 1)
                mass[start : start + pairs.vocab] = p * plain([*request.prompt_ids, token]).numpy()
    assert mass.sum() == pytest.approx(1)
    assert np.bincount(pairs.label, mass, minlength=16) == pytest.approx(pairs.mass_k, abs=1e-6)
    some = np.array([[next(iter(pairs.row)), 7], [2, -1]])
    assert pairs.bins_of(some).tolist() == [pairs.label[pairs.vocab * 1 + 7], pairs.label[2]]


def test_right_certificates_fail_as_often_as_they_say() -> None:
    """Texts of a Markov chain on both sides: at a level of 20% between a few and one in five of 250 certificates are refused."""
    random = np.random.default_rng(5)
    table = random.dirichlet(np.full(12, 0.5), 12).cumsum(1)
    level, refused = 0.2, 0

    def draw(sampling: Sampling, control: Control | None, number: int) -> Mapping[str, Any]:
        tokens = np.zeros((3, REPEATS, 1), int)
        for _ in range(T):
            following = (random.random((3, REPEATS, 1)) > table[tokens[..., -1]]).sum(-1, keepdims=True)
            tokens = np.concatenate([tokens, following], -1)
        return {"tokens": tokens[..., 1:].tolist(), "accepted": 1, "rejected": 1}

    def alone(sampling: Sampling, control: Control | None, number: int) -> Mapping[str, Any]:
        return {**draw(sampling, control, number), "accepted": 0, "rejected": 0}

    one = design(level, 0.2)
    with Bar(disable=True) as bar:
        for _ in range(250):
            judge = Judge(one, alone, Journal(), bar)
            refused += bool(judge.test("head", draw, Sampling(1.0), ()).reasons)
    assert 0.04 < refused / 250 < 0.25


def test_samples_are_kept_and_not_drawn_again(tmp_path: Any) -> None:
    drafter, path = EagleDrafter(spec().deployed, 3), tmp_path / "samples.journal"
    first = judge_of(Sampling(1.0), drafter, Journal(path, "a"))
    broken = EagleDrafter(spec().deployed, 3)
    broken.propose = None  # type: ignore[method-assign, assignment]
    assert judge_of(Sampling(1.0), broken, Journal(path, "a")) == first


def test_a_control_leaves_something_out_that_is_there() -> None:
    (control,) = [one for one in CONTROLS if one.name == "penalty left out"]
    left_out = {
        Sampling(1.0): Sampling(1.0, repetition_penalty=1.3),
        Sampling(0.7): Sampling(0.7),
        Sampling(1.0, top_p=0.9): Sampling(1.0, top_p=0.9),
    }
    assert {one: setting_of(control, one) for one in left_out} == left_out
    assert setting_of(CONTROLS[0], Sampling(1.0)) == Sampling(1.0)
    verifies_at = []
    wrong = control.spoil(lambda draft, logits, sampling, *rest: verifies_at.append(sampling))
    for sampling in (Sampling(0.7, 5, 0.9, 0.1, 1.2), Sampling(0.7, 5, 0.9, 0.1), Sampling(0.7)):
        wrong(None, None, sampling, None)
    assert verifies_at == [Sampling(0.7, 5, 0.9, 0.1), Sampling(0.7), Sampling(1.0)]


def test_no_fault_outlasts_an_error() -> None:
    right = captured.verify
    with pytest.raises(ZeroDivisionError), spoiled(CONTROLS[0], spec().target):
        assert 1 / (captured.verify is right)
    assert captured.verify is right


def test_parting_at_an_unknown_gap_is_said_as_such() -> None:
    parted = (Divergence("p", "a", 3, 1, 2, None), Divergence("q", "a", 3, 1, 2, 0.5))
    found = certificate.judge_greedy("eagle3", Lossless("float32", 30, 28, parted))
    assert found.reasons[0].startswith("1 of 30 greedy answers part where the logits are up to 0.5 apart")
    assert found.reasons[1] == (
        "1 of 30 greedy answers part where one has ended, or the other server does not tell how likely the token is"
    )
