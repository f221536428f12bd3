"""The decoding loop against transformers' generate, against itself alone, and against the simulator."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from draftsmith.data.batch import collate
from draftsmith.data.features.extract import compute_features
from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch, decode_live
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import head_simulator, to_sample
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import Eagle3Head, build
from draftsmith.target.target import Target
from tests.models import KINDS, make_target

pytestmark = pytest.mark.full

NEW_TOKENS = 24
GREEDY = Sampling()


def known(target: Target, requests: list[Request], alpha: float) -> KnownAcceptance:
    """Drafts of four tokens, each right with probability `alpha`."""
    alone = decode_batch(target, TargetAlone(), requests, GREEDY).generations
    return KnownAcceptance({g.request.prompt_ids: g.output_ids for g in alone}, alpha, 4, target.vocab_size)


def make_requests(count: int = 4, new_tokens: int = NEW_TOKENS) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 17, 9, 30, 3, 12][:count]
    prompts = [torch.randint(5, 150, (n,), generator=generator).tolist() for n in lengths]
    return [Request.seeded(f"p{i}", "a", prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_alone_batched_and_drafted(kind: str) -> None:
    target, requests = make_target(kind), make_requests()
    alone = decode_batch(target, TargetAlone(), requests, Sampling()).generations
    for generation in alone:
        ids = torch.tensor([generation.request.prompt_ids])
        expected = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert generation.output_ids == expected[0, ids.shape[1] :].tolist()
    drafted = decode_batch(target, known(target, requests, 0.7), requests, Sampling()).generations
    assert [g.output_ids for g in drafted] == [g.output_ids for g in alone]
    assert sum(len(g.rounds) for g in drafted) < 0.7 * sum(len(g.rounds) for g in alone)


def test_an_answer_can_be_watched_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds are those of a batch, and what the watcher takes is on no clock."""
    target, requests = make_target(), make_requests()
    drafter, now = known(target, requests, 0.7), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    (expected,) = decode_batch(target, drafter, requests[:1], GREEDY).generations
    lengths = []
    for decoded in decode_live(target, drafter, requests[0], GREEDY):
        (answer,) = decoded.generations
        assert decoded.passes == len(answer.rounds) == len(lengths)
        lengths.append(len(answer.output_ids))
        now[0] += 1000.0
    assert (answer.output_ids, answer.rounds) == (expected.output_ids, expected.rounds)
    assert lengths == [1 + round_.root for round_ in answer.rounds] + [len(answer.output_ids)]
    assert sum(decoded.seconds.values()) == 0
    with pytest.raises(UserError, match="at least one token"):
        next(decode_live(target, drafter, replace(requests[0], prompt_ids=()), GREEDY))


@cache
def trained(sampling: Sampling = GREEDY) -> "tuple[Target, Eagle3Head]":
    """A target and a head fitted to some of its answers, so that drafts are accepted at every position."""
    target = make_target() if sampling.greedy else make_target(initializer_range=0.06)
    requests = make_requests() if sampling.greedy else spread_requests(2)
    answers = decode_batch(target, TargetAlone(), requests, sampling).generations
    features = compute_features(target, [to_sample(g) for g in answers], (2, 4, 5), target.dtype)
    batch = collate([[f] for f in features], max(len(f.ids) for f in features))
    torch.manual_seed(0)
    head = build(Eagle3Options(layer_ids=[2, 4, 5]), target, None)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(25 if sampling.greedy else 6):
        steps = head(batch, 4).steps
        tokens = batch.ids.flatten()
        loss = sum((F.cross_entropy(s.logits, tokens[s.rows + 2 + s.offset]) for s in steps), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return target, head


def spread_requests(copies: int, new_tokens: int = NEW_TOKENS) -> list[Request]:
    return [
        Request.seeded(f"{r.sample_id}-{n}", "a", r.prompt_ids, new_tokens, 1)
        for n in range(copies)
        for r in make_requests(6)
    ]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.8, top_k=30, top_p=0.9), Sampling(1.0, min_p=0.1, repetition_penalty=1.3)],
    ids=["plain", "filtered", "penalty"],
)
@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_simulation_predicts_sampled_decoding(sampling: Sampling, greedy_drafts: bool) -> None:
    """Drafts sampled from q, and drafts that are q's argmax at every temperature (as vLLM drafts)."""
    # Small weights make the target's distribution flat, so that sampled texts differ.
    target, head = trained(sampling=Sampling(1.0))
    drafter = EagleDrafter(head, 3, greedy_drafts=greedy_drafts)
    found = decode_batch(target, drafter, spread_requests(8), sampling).generations
    decoded = [tally_generation(g, 3) for g in found]
    by_k = head_simulator(head, greedy_drafts=greedy_drafts)(target, found, sampling, 3)
    simulated = [t[2] for t in by_k.tallies]
    errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
    assert total(decoded, 3).accepted_K[0] > (0 if greedy_drafts else 20), "too few accepted drafts to mean something"
    if greedy_drafts:
        # Given the text, an argmax draft was accepted or not: nothing is left to chance.
        assert errors == pytest.approx([0] * len(errors), abs=1e-9)
    else:
        assert abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


def test_a_repetition_penalty_changes_greedy_texts_alike_with_and_without_drafts() -> None:
    """Against transformers, and against the simulator: the penalty is that of each position."""
    target, head = trained()
    sampling, requests = Sampling(repetition_penalty=1.4), make_requests(6)
    alone = decode_batch(target, TargetAlone(), requests, sampling).generations
    for generation in alone:
        ids = torch.tensor([generation.request.prompt_ids])
        expected = target.model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, repetition_penalty=1.4
        )
        assert generation.output_ids == expected[0, ids.shape[1] :].tolist()
    plain = decode_batch(target, TargetAlone(), requests, GREEDY).generations
    assert [g.output_ids for g in plain] != [g.output_ids for g in alone]
    for shape in ({}, {"tree": StaticTree.of("small", [[0], [1], [0, 0], [0, 1]])}, {"tree": DynamicTree(4, 3, 10)}):
        drafter = EagleDrafter(head, 4, **shape)
        drafted = decode_batch(target, drafter, requests, sampling, rows=2).generations
        assert [g.output_ids for g in drafted] == [g.output_ids for g in alone]
        if not shape:
            decoded = total([tally_generation(g, 4) for g in drafted], 4)
            simulation = head_simulator(head)(target, drafted, sampling, 4)
            assert simulation.off_text == 0
            assert decoded.tau == pytest.approx(total([t[3] for t in simulation.tallies], 4).tau, abs=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=10), Sampling(1.0, top_p=0.5)], ids=str)
def test_rounding_at_the_edge_of_a_filter_is_not_taken_for_a_foreign_text(sampling: Sampling) -> None:
    """In bf16 one long pass and many short ones disagree about the k-th token now and then."""
    exact, head = trained(sampling=Sampling(1.0))
    target = Target(copy.deepcopy(exact.model).to(torch.bfloat16), path="tiny", fingerprint="0")
    found = decode_batch(target, TargetAlone(), spread_requests(6, 48), sampling).generations
    simulation = head_simulator(copy.deepcopy(head).to(torch.bfloat16))(target, found, sampling, 2)
    tokens = sum(len(g.output_ids) - 1 for g in found)
    assert simulation.off_text < 0.05 * tokens
    assert total([t[1] for t in simulation.tallies], 2).tokens == tokens


def test_eos_and_the_limit_are_exact() -> None:
    target, (request,) = make_target(), make_requests(1)
    (free,) = decode_batch(target, TargetAlone(), [request], Sampling()).generations
    drafter = known(target, [request], 1.0)
    for new_tokens in (1, 2, 3, 7):
        short = Request("p", "a", request.prompt_ids, new_tokens)
        (found,) = decode_batch(target, drafter, [short], Sampling()).generations
        assert found.output_ids == free.output_ids[:new_tokens]
        assert found.finish_reason == "length"
        # Four right drafts and a bonus per round; none is drafted past the limit.
        assert len(found.rounds) == -(-(new_tokens - 1) // 5)
        assert sum(r.drafted for r in found.rounds) <= new_tokens - 1
    stop = free.output_ids[6]
    target.model.generation_config.eos_token_id = [stop, 159]
    (found,) = decode_batch(target, drafter, [request], Sampling()).generations
    assert found.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    assert found.finish_reason == "eos"
    tally = tally_generation(found, 4)
    assert tally.tokens == len(found.output_ids) - 1
    assert tally.accepted_K.sum() <= tally.drafted


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("x", "a", (), 4), "empty"),
        (Request("x", "a", (1, 2), 0), "max_new_tokens is 0"),
        (Request("x", "a", (1, 999), 4), "outside the target's vocabulary"),
        (Request("x", "a", (1, 160, 2), 4), "outside the target's vocabulary of 160"),
        (Request("x", "a", (1, -1, 2), 4), "outside the target's vocabulary"),
        (Request("x", "a", (1,) * 250, 20), "context has 256"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(request_: Request, words: str) -> None:
    with pytest.raises(UserError, match=words):
        decode_batch(make_target(), TargetAlone(), [request_], Sampling())
