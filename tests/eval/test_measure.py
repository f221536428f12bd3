"""What the evaluation adds up: speeds, time split, intervals, loops, costs, and the comparison of texts."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from draftsmith.eval.cache import KVCache, build_mask
from draftsmith.eval.clock import Stopwatch
from draftsmith.eval.contender import Contender
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.decode import Decoded, Generation, Request, Round, decode_batch
from draftsmith.eval.draft import Draft, TargetAlone
from draftsmith.eval.generate_baseline import time_generate
from draftsmith.eval.lossless import compare_texts
from draftsmith.eval.measure import Texts, Timings, run_systems, summarize
from draftsmith.eval.passes import run_draft
from draftsmith.eval.result import Costs
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tally import Tally, tally_generation
from draftsmith.eval.texts import Text, bootstrap_tau, is_looping, mean_tau, sampling_error
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.base import DraftHead
from draftsmith.heads.target import Target
from tests.models import KINDS, tiny_model


def answer(name: str, slice_name: str, rounds: list[int], drafted: int = 2) -> Generation:
    """An answer whose rounds accepted the given numbers of drafts."""
    generation = Generation(Request(name, slice_name, (1, 2), 99), [7], "length")
    for accepted in rounds:
        generation.rounds.append(Round(len(generation.output_ids) - 1, drafted, accepted))
        generation.output_ids += [7 + i for i in range(accepted + 1)]
    return generation


def decoded(generation: Generation, **seconds: float) -> Decoded:
    return Decoded([generation], {"ttft": 0.5, "draft": 0.0, "verify": 0.0, "commit": 0.0, "other": 0.0, **seconds})


class NoHead(nn.Module):
    """Stands for a head where nothing asks it for logits."""

    method = "eagle3"


def contender(name: str, max_k: int = 2) -> Contender:
    """The target alone under another name."""
    return Contender(name, cast(DraftHead, NoHead()), lambda k: TargetAlone(), 2, max_k)


def text(generation: Generation) -> Text:
    tally = tally_generation(generation, 2)
    return Text(generation, tally, [tally, tally])


def test_speeds_are_sums_over_slices_and_medians_over_repeats() -> None:
    a, b = answer("a", "chat", [2, 1, 0]), answer("b", "code", [2, 2])
    drafted = Timings([[decoded(a, draft=1, verify=s), decoded(b, draft=1, verify=s)] for s in (2.0, 1.0, 4.0)])
    plain = Timings([[decoded(a, verify=6.0), decoded(b, verify=6.0)] for _ in range(3)])
    costs = Costs({"1": 10.0, "3": 12.0}, {"eagle3": {"2": 3.0}})
    timings = {"": plain, "eagle3": drafted}
    found = summarize(contender("eagle3"), Texts([text(a), text(b)]), timings, costs, {}, {}, [])
    assert set(found.slices) == {"chat", "code"}
    m = found.overall
    assert (m.tokens, m.rounds, m.prompts) == (12, 5, 2)
    assert m.tau == pytest.approx(12 / 5)
    assert m.decode_tok_s == pytest.approx(12 / 6)
    assert m.decode_tok_s_spread == pytest.approx((12 / 10, 12 / 4))
    assert m.baseline_tok_s == pytest.approx(1.0)
    assert m.speedup == pytest.approx(2.0)
    assert m.ttft_s == 0.5
    assert m.ms_per_round is not None
    assert m.ms_per_round.draft == pytest.approx(1000 * 6 / 15)
    assert m.ms_per_round.verify == pytest.approx(1000 * 14 / 15)
    assert m.ideal_speedup == pytest.approx(2.4 / ((12 + 3) / 10))
    assert found.slices["code"].tau == pytest.approx(3.0)
    assert found.slices["code"].acceptance_rate == 1.0


def test_what_was_not_measured_is_null() -> None:
    only = answer("a", "chat", [])
    timings = {"": Timings([[decoded(only)]]), "eagle3": Timings([[decoded(only)]])}
    m = summarize(contender("eagle3"), Texts([text(only)]), timings, Costs({}, {}), {}, {}, []).overall
    assert m.tokens == 0
    for value in (m.tau, m.decode_tok_s, m.speedup, m.ms_per_round, m.ideal_speedup, m.speedup_vs_generate):
        assert value is None


def test_intervals_and_sampling_error() -> None:
    texts = [text(answer(str(i), "a", [2] if i % 2 else [0, 0, 0])) for i in range(40)]
    low, high = bootstrap_tau(texts) or (0, 0)
    assert low < 1.5 < high
    assert high - low < 0.6
    assert mean_tau(texts) == pytest.approx(2.0)
    assert bootstrap_tau(texts[:1]) is None
    assert sampling_error(texts, 2) == 0
    off = [
        Text(t.generation, t.decoded, [Tally(1, 3, 1.5, 2, t.decoded.accepted_K, t.decoded.reached_K)] * 2)
        for t in texts
    ]
    rounds = sum(t.decoded.rounds for t in off)
    expected = 120 / rounds**2 * sum((t.decoded.rounds - 1.5) ** 2 for t in off) ** 0.5
    assert sampling_error(off, 2) == pytest.approx(expected)


def test_loops_are_a_six_gram_four_times() -> None:
    gram = [1, 2, 3, 4, 5, 6]
    assert is_looping([9, *gram * 4])
    assert is_looping([9] * 9)
    assert is_looping([*range(10, 30)] * 4), "a loop may be longer than six tokens"
    assert not is_looping([*gram * 3, 1, 2, 3, 4, 5])
    assert not is_looping([*range(10, 30)] * 3)
    assert not is_looping([1, 2])


def test_stopwatch_laps_add_up() -> None:
    watch = Stopwatch()
    for name in ("a", "b", "a"):
        watch.lap(name)
    assert set(watch.seconds) == {"a", "b"}
    assert all(value >= 0 for value in watch.seconds.values())


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), path="tiny", fingerprint="0")


@pytest.mark.parametrize("length", [1, 2, 30])
def test_costs_are_measured_for_every_size_also_after_short_prompts(target: Target, length: int) -> None:
    tree = StaticTree.of("bush", [[0], [1], [2], [0, 0], [1, 0]])
    lineup = [contender("none", max_k=3), replace(contender("tree"), tree=tree)]
    costs = measure_costs(target, lineup, list(range(3, 3 + length)), Sampling(), repeats=1)
    assert list(costs.verify_ms) == ["1", "2", "3", "4", "6"]
    assert list(costs.draft_ms["none"]) == ["1", "2", "3"]
    assert costs.nodes == {"tree": {"1": 4, "2": 6}}
    assert costs.speedup("tree", 2, 2.0) == pytest.approx(
        2 * costs.verify_ms["1"] / (costs.verify_ms["6"] + costs.draft_ms["tree"]["2"])
    )
    assert all(value > 0 for value in costs.verify_ms.values())


def test_systems_answer_the_same_requests_slice_by_slice(target: Target) -> None:
    requests = [Request(str(i), "ab"[i % 2], (3 + i, 5), 6) for i in range(5)]
    seen: list[int] = []
    timings = run_systems(
        target,
        [contender("again")],
        [requests, requests],
        Sampling(),
        batch=2,
        on_batch=seen.append,
    )
    assert [len(r) for r in timings["again"].of("a")] == [2, 2]
    assert sum(seen) == 10
    for mine, other in zip(timings[""].batches[0], timings["again"].batches[0], strict=True):
        assert [g.output_ids for g in mine.generations] == [g.output_ids for g in other.generations]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=5)], ids=str)
def test_generate_is_timed_per_slice(target: Target, sampling: Sampling) -> None:
    requests = [Request(str(i), "ab"[i % 2], (3 + i, 5), 8) for i in range(6)]
    timings = time_generate(target, requests, sampling, per_slice=2)
    assert {t.sample_id for t in timings} <= {"0", "1", "2", "3"}
    assert all(t.tokens <= 7 for t in timings)


def test_first_divergence_is_found_with_its_gap(target: Target) -> None:
    request = Request("p", "a", (3, 4, 5), 6)
    (alone,) = decode_batch(target, TargetAlone(), [request], Sampling()).generations
    other = Generation(request, list(alone.output_ids), "length")
    other.output_ids[3] = (other.output_ids[3] + 1) % 150
    tally = Tally.empty(1)
    found = compare_texts(target, [alone, alone], [alone, other], [tally] * 2, [tally] * 2, 1)["overall"]
    assert (found.checked, found.equal) == (2, 1)
    (divergence,) = found.first_divergences
    assert (divergence.position, divergence.expected, divergence.got) == (3, alone.output_ids[3], other.output_ids[3])
    assert divergence.logit_gap is not None
    assert divergence.logit_gap > 0


@pytest.mark.parametrize("kind", KINDS)
def test_tree_nodes_equal_their_paths_and_commit_keeps_the_path(kind: str) -> None:
    """A tree pass against a plain forward of every root-to-node path; then the cache after a commit and a rollback."""
    target = Target(tiny_model(kind), path="tiny", fingerprint="0")
    context = torch.tensor([[5, 9, 21, 33, 40, 8, 17, 60, 71, 13, 29], [7, 12, 99, 4, 6, 31, 18, 0, 0, 0, 0]])
    lengths = torch.tensor([11, 7])
    cache = KVCache(target.num_layers, 2, 24)
    run_draft(target, cache, Draft.chain(context[:, 0], context[:, 1:]))
    cache.lengths_B = lengths
    tokens = torch.tensor([[50, 51, 52, 53, 54], [60, 61, 62, 63, 64]])
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, 0, 3]])
    draft = Draft(tokens, parents, torch.tensor([5, 5]))
    states = run_draft(target, cache, draft).last
    for row in range(2):
        for node in range(5):
            path = [node]
            while parents[row, path[0]] >= 0:
                path.insert(0, int(parents[row, path[0]]))
            whole = [*context[row, : lengths[row]].tolist(), *tokens[row, path].tolist()]
            plain = target.forward(torch.tensor([whole])).last[0, -1]
            torch.testing.assert_close(states[row, node], plain, atol=2e-5, rtol=1e-4)
    cache.commit(draft, torch.tensor([[0, 2, 3], [0, 3, -1]]))
    assert cache.lengths_B.tolist() == [14, 9]
    follow = Draft.chain(torch.tensor([80, 81]), torch.zeros(2, 0, dtype=torch.long))
    kept = [[*context[0].tolist(), 50, 52, 53, 80], [*context[1, :7].tolist(), 60, 63, 81]]
    check_rows(target, run_draft(target, cache, follow).last, kept)
    cache.rollback(lengths)
    check_rows(
        target, run_draft(target, cache, follow).last, [[*context[0].tolist(), 80], [*context[1, :7].tolist(), 81]]
    )


def check_rows(target: Target, states: torch.Tensor, texts: list[list[int]]) -> None:
    for row, whole in enumerate(texts):
        plain = target.forward(torch.tensor([whole])).last[0, -1]
        torch.testing.assert_close(states[row, 0], plain, atol=2e-5, rtol=1e-4)


def test_windows_count_positions_not_slots() -> None:
    """Two children of the root stand at the same position, whatever their slots."""
    draft = Draft(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[-1, 0, 0]]), torch.tensor([3]))
    mask = build_mask(torch.tensor([4]), draft.ancestors_BNN, draft.depth_BN, 7, 2)[0, 0]
    assert mask.int().tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 1]]
