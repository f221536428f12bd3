"""What the evaluation adds up: speeds, time split, intervals, loops, costs, and the comparison of texts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from draftsmith.decoder.answers import Decoded, Generation, Request, Round, Tally, tally_generation
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import LengthRule, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.clocks.turns import Turns, run_systems
from draftsmith.eval.drafters.baselines import GENERATE, GenerateSystem, plain
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.measure import is_looping, measure_pick, of_slice, sampling_error, summarize
from draftsmith.eval.measure.texts import Text, Texts, collect_texts, compare_texts
from draftsmith.eval.results.conditions import Group
from draftsmith.eval.results.intervals import bootstrap_tau, mean_tau
from draftsmith.eval.results.result import Costs, DrafterResult, Measures, Percentiles, PromptSums
from draftsmith.eval.simulate.texts import Simulation
from draftsmith.target.target import Target


def answer(name: str, slice_name: str, rounds: list[int], drafted: int = 2) -> Generation:
    """An answer whose rounds accepted the given numbers of drafts."""
    generation = Generation(Request(name, slice_name, (1, 2), 99), [7], "length")
    for accepted in rounds:
        generation.rounds.append(Round(len(generation.output_ids) - 1, drafted, accepted))
        generation.output_ids += [7 + i for i in range(accepted + 1)]
    return generation


def decoded(generation: Generation, **seconds: float) -> Decoded:
    generation.ttft_s = 0.5
    parts = {"ttft": 0.5, "draft": 0.0, "verify": 0.0, "commit": 0.0, "other": 0.0, **seconds}
    return Decoded([generation], parts, len(generation.rounds))


def unused(*_: object) -> Simulation:
    """Stands for a simulation where the tallies are given."""
    raise AssertionError


def system(name: str, max_k: int = 2) -> SystemUnderTest:
    """The target alone under another name."""
    return SystemUnderTest(name, "eagle3", lambda k: TargetAlone(), 2, max_k, simulate=unused)


def turns_of(timings: dict[str, Any]) -> Turns:
    return Turns(timings, cast(Any, None))


def text(generation: Generation) -> Text:
    tally = tally_generation(generation, 2)
    return Text(generation, tally, [tally, tally])


def summarized(texts: list[Text], **changes: Any) -> DrafterResult:
    """The measures of texts that took a second each, and as long without a draft."""
    timings = {name: [[decoded(t.generation, verify=1.0) for t in texts]] for name in ("", "eagle3")}
    return summarize(replace(system("eagle3"), **changes), Texts(texts), turns_of(timings))


def test_speeds_are_sums_over_slices_and_medians_over_repeats() -> None:
    a, b = answer("a", "chat", [2, 1, 0]), answer("b", "code", [2, 2])
    drafted = [[decoded(a, draft=1, verify=s), decoded(b, draft=1, verify=s)] for s in (2.0, 1.0, 4.0)]
    plain = [[decoded(a, verify=6.0), decoded(b, verify=6.0)] for _ in range(3)]
    costs = Costs({"1": 10.0, "3": 12.0}, {"eagle3": {"2": 3.0}})
    timings = {"": plain, "eagle3": drafted}
    found = summarize(system("eagle3"), Texts([text(a), text(b)]), turns_of(timings), costs)
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
    alphas = (pytest.approx(0.8), 0.75)
    same = {"alpha_at": alphas, "alpha_at_simulated": alphas}
    assert m.contexts == (Group("1 to 31", 5, pytest.approx(2.4), 5, pytest.approx(2.4), **same),)
    assert m.training_split is None
    assert m.token_wait_s is None, "these were not read along"
    assert found.slices["code"].tau == pytest.approx(3.0)
    assert found.slices["code"].acceptance_rate == 1.0


def test_waits_for_tokens_are_percentiles_over_all_tokens() -> None:
    read, alone = answer("a", "chat", [2, 1]), answer("a", "chat", [0] * 5)
    read.emitted_at, alone.emitted_at = [10.0, 14.0, 16.0], [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert read.waits == [4.0, 0.0, 0.0, 2.0, 0.0]
    timings = {"": [[decoded(alone)]], "eagle3": [[decoded(read)]]}
    m = summarize(system("eagle3"), Texts([text(read)]), turns_of(timings)).overall
    assert m.token_wait_s == Percentiles(0.0, pytest.approx(3.6))
    assert m.token_wait_baseline_s == Percentiles(1.0, 1.0)


def test_both_are_compared_with_generate_on_its_own_prompts() -> None:
    """The first prompt is drafted twice as fast as it is answered alone, the second four times; generate had the second."""
    a, b = answer("a", "chat", [2, 2]), answer("b", "chat", [2, 2])
    drafted = [[decoded(a, verify=3.0), decoded(b, verify=3.0)]]
    plain = [[decoded(a, verify=6.0), decoded(b, verify=12.0)]]
    timings = {"": plain, "eagle3": drafted, GENERATE: [[Decoded([b], {"ttft": 1.0, "decode": 24.0})]]}
    m = summarize(system("eagle3"), Texts([text(a), text(b)]), turns_of(timings)).overall
    assert (m.speedup, m.speedup_vs_generate, m.baseline_vs_generate) == pytest.approx((3, 8, 2))


def test_drafted_tokens_are_not_told_where_drafts_end_by_their_own_tokens() -> None:
    for ends in (None, 0.3):
        m = summarized([text(answer("a", "chat", [2, 1, 0]))], rule=ends and LengthRule((ends,) * 3)).overall
        assert m.k_sweep is not None
        assert all(point.tau_simulated is not None for point in m.k_sweep)
        assert all((point.acceptance_rate is None) == (ends is not None) for point in m.k_sweep)


def test_what_was_not_measured_is_null() -> None:
    only = answer("a", "chat", [])
    timings = {"": [[decoded(only)]], "eagle3": [[decoded(only)]]}
    m = summarize(system("eagle3"), Texts([text(only)]), turns_of(timings)).overall
    assert m.tokens == 0
    for value in (m.tau, m.decode_tok_s, m.speedup, m.ms_per_round, m.ideal_speedup, m.speedup_vs_generate):
        assert value is None


def test_intervals_and_sampling_error() -> None:
    texts = [text(answer(str(i), "a", [2] if i % 2 else [0, 0, 0])) for i in range(40)]
    pairs = [(t.decoded.tokens, t.decoded.rounds) for t in texts]
    low, high = bootstrap_tau(pairs) or (0, 0)
    assert low < 1.5 < high
    assert high - low < 0.6
    assert mean_tau(pairs) == pytest.approx(2.0)
    assert mean_tau([*pairs, (0, 0)]) == pytest.approx(2.0), "an answer of one token has no round"
    assert mean_tau([(0, 0)]) is None
    assert bootstrap_tau(pairs[:10]) is not None
    assert bootstrap_tau([*pairs[:10], (0, 0)]) is not None, "nothing was decoded of the last one"
    assert bootstrap_tau([*pairs[:9], (0, 0)]) is None
    assert bootstrap_tau([]) is None
    assert sampling_error(texts, 2) == 0
    parts = [(t, t.decoded) for t in texts]
    off = [replace(t, simulated=[Tally(1, 3, 1.5, 2, d.accepted_K, d.reached_K)] * 2) for t, d in parts]
    rounds = sum(t.decoded.rounds for t in off)
    expected = 120 / rounds**2 * sum((t.decoded.rounds - 1.5) ** 2 for t in off) ** 0.5
    assert sampling_error(off, 2) == pytest.approx(expected)


def test_both_taus_have_intervals_over_prompts() -> None:
    texts = [text(answer(str(i), "ab"[i % 2], [2] if i % 3 else [0, 0, 0])) for i in range(18)]
    one_round = Tally(1, 3, 1.5, 2, np.zeros(2), np.zeros(2), np.array([1.0, 0, 0]), np.array([2.0, 0, 0]))
    texts = [replace(t, simulated=[t.simulated[0], one_round]) for t in texts]
    found = summarized(texts)
    assert found.overall.tau_interval == bootstrap_tau([(t.decoded.tokens, t.decoded.rounds) for t in texts])
    assert found.overall.tau_simulated_interval == (2.0, 2.0), "all answers are alike at K = 2"
    assert found.slices["a"].tau_interval is None, "9 prompts"


def test_a_result_holds_what_each_prompt_adds_to_tau() -> None:
    half = Tally(1, 3, 1.5, 2, np.zeros(2), np.zeros(2), np.array([1.0, 0.5, 0]), np.array([2.0, 1.0, 0]))
    texts = [text(answer(*words)) for words in (("p", "a", [2]), ("q", "b", [0, 0, 0]), ("p", "a", [1, 0]))]
    texts = [replace(t, simulated=[half, half]) for t in texts]
    found = summarized(texts)
    assert found.prompts == {"p": PromptSums("a", 6, 3, 3.0), "q": PromptSums("b", 3, 3, 1.5)}
    assert (found.overall.tau, found.overall.tau_simulated) == (9 / 6, 9 / 4.5)
    found = summarized([replace(t, simulated=[]) for t in texts], simulate=None)
    assert found.prompts["p"] == PromptSums("a", 6, 3, None)


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    """Two answers of one prompt, 6 tokens in 1 round and 6 in 6: tau is 12/7, whereas the mean of both is 3.5."""

    def measured(*answers: Generation) -> Measures:
        tallies = [[tally_generation(one, k + 1) for k in range(5)] for one in answers]
        texts = [Text(one, tally_K[4], tally_K) for one, tally_K in zip(answers, tallies, strict=True)]
        return summarized(texts, num_speculative_tokens=5, max_k=5).overall

    fast, slow = ([5], [0] * 6)
    both = measured(answer("p", "chat", fast, 5), answer("p", "chat", slow, 5))
    assert (both.prompts, both.tau, both.tau_mean_over_prompts) == (1, 12 / 7, 12 / 7)
    apart = measured(answer("p", "chat", fast, 5), answer("q", "chat", slow, 5))
    assert (apart.prompts, apart.tau, apart.tau_mean_over_prompts) == (2, 12 / 7, 3.5)

    # Every prompt has both answers, so that all prompts are alike; as many answers of different prompts are not.
    alike = measured(*(answer(f"p{i}", "chat", rounds, 5) for i in range(10) for rounds in (fast, slow)))
    for interval in (alike.tau_interval, alike.tau_simulated_interval):
        assert interval == (pytest.approx(12 / 7), pytest.approx(12 / 7))
    varied = measured(*(answer(f"p{i}{j}", "chat", (fast, slow)[j], 5) for i in range(10) for j in range(2)))
    assert varied.tau_interval is not None
    assert varied.tau_interval[1] - varied.tau_interval[0] > 0.5


def test_pairs_count_prompts_for_which_one_drafter_alone_had_a_round() -> None:
    """A sampled answer of one token has no round; the change is of all tokens over all rounds, as each tau is."""
    before = [(6.0, 3.0)] * 10 + [(0.0, 0.0)] * 10
    after = [(6.0, 3.0)] * 10 + [(6.0, 1.0)] * 10
    low, high = bootstrap_tau(after, before) or (0, 0)
    assert low < 120 / 40 - 2 < high
    assert bootstrap_tau(after, [*before[:9], *[(0.0, 0.0)] * 11]) is None, "nine prompts with a round"


def test_loops_are_a_six_gram_four_times() -> None:
    gram = [1, 2, 3, 4, 5, 6]
    assert is_looping([9, *gram * 4])
    assert is_looping([9] * 9)
    assert is_looping([*range(10, 30)] * 4), "a loop may be longer than six tokens"
    assert not is_looping([*gram * 3, 1, 2, 3, 4, 5])
    assert not is_looping([*range(10, 30)] * 3)
    assert not is_looping([1, 2])


@pytest.mark.parametrize("length", [1, 2, 30])
def test_costs_are_measured_for_every_size_also_after_short_prompts(target: Target, length: int) -> None:
    tree = StaticTree.of("bush", [[0], [1], [2], [0, 0], [1, 0]])
    lineup = [system("none", max_k=3), replace(system("tree"), tree=tree)]
    lineup.append(replace(system("wild"), tree=DynamicTree(2, 3, 9), simulate=None))
    costs = measure_costs(target, lineup, list(range(3, 3 + length)), Sampling(), repeats=1)
    assert list(costs.verify_ms) == ["1", "2", "3", "4", "6", "9"]
    assert list(costs.draft_ms["none"]) == ["1", "2", "3"]
    assert list(costs.draft_ms["wild"]) == ["2"], "what cannot be simulated at other lengths is timed at its own"
    assert costs.nodes == {"tree": {"1": 4, "2": 6}, "wild": {"2": 9}}
    assert costs.speedup("tree", 2, 2.0) == pytest.approx(
        2 * costs.verify_ms["1"] / (costs.verify_ms["6"] + costs.draft_ms["tree"]["2"])
    )
    assert all(value > 0 for value in costs.verify_ms.values())


@pytest.mark.parametrize(("batch", "groups"), [(1, [1] * 9), (2, [8, 1])])
def test_systems_answer_the_same_requests_slice_by_slice(
    target: Target, monkeypatch: pytest.MonkeyPatch, batch: int, groups: list[int]
) -> None:
    """With a batch more prompts than rows are given, so that rows which are done are taken over."""
    requests = [Request(str(i), "aab"[i % 3], (3 + i, 5), 2 + i % 3) for i in range(13)]
    rows: list[int] = []

    def spy(*arguments: Any, **options: Any) -> Decoded:
        rows.append(options.get("rows", 1))
        return decode_batch(*arguments, **options)

    monkeypatch.setattr("draftsmith.eval.drafters.system.decode_batch", spy)
    timings = run_systems(target, [system("again")], [requests, requests], Sampling(), batch=batch).by_name
    assert [[len(d.generations) for d in repeat] for repeat in of_slice(timings["again"], "a")] == [groups, groups]
    assert set(rows[2:]) == {batch}
    for mine, other in zip(timings[""][0], timings["again"][0], strict=True):
        assert [g.output_ids for g in mine.generations] == [g.output_ids for g in other.generations]
        assert len({g.request.slice for g in mine.generations}) == 1
        most, needed = sum(len(g.rounds) for g in mine.generations), max(len(g.rounds) for g in mine.generations)
        assert needed <= mine.passes <= most
        assert all(g.ttft_s > 0 for g in mine.generations)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=5)], ids=str)
def test_planned_lengths_and_generate_take_turns_on_the_first_prompts_of_each_slice(
    target: Target, sampling: Sampling
) -> None:
    requests = [Request(str(i), "ab"[i % 2], (3 + i, 5), 4) for i in range(8)]

    def counted(target: Target, generations: Any, sampling: Sampling, max_k: int) -> Simulation:
        return Simulation(
            [[tally_generation(g, 1)] for g in generations], off_text=0, by_budget=[[] for _ in generations]
        )

    pick = replace(system("again"), name="again, K = 1", num_speculative_tokens=1, simulate=counted)
    order: list[str] = []
    baseline = plain(target)

    class Watched(GenerateSystem):
        def decode(self, requests: Sequence[Request], sampling: Sampling, rows: int = 1) -> Decoded:
            order.extend(request.sample_id for request in requests)
            return baseline.decode(requests, sampling)

    picks = [pick, Watched(GENERATE, target)]
    timings = run_systems(target, [system("again")], [requests, requests], sampling, batch=1, picks=picks).by_name
    generate = timings[GENERATE]
    first = ["0", "2", "1", "3"]
    assert order == ["0", *first, *first], "a warm-up, then two prompts of each slice in each repeat"
    assert [[d.generations[0].request.sample_id for d in repeat] for repeat in generate] == [first, first]
    assert all(d.timed_tokens == 3 and d.decode_s > 0 for repeat in generate for d in repeat)
    assert [len(repeat) for repeat in timings[pick.name]] == [4, 4]
    assert [len(repeat) for repeat in timings["again"]] == [8, 8]
    found = measure_pick(target, pick, "again", timings, sampling)
    assert (found.drafter, found.num_speculative_tokens, found.prompts) == ("again", 1, 4)
    assert found.speedup is not None
    assert found.spread is not None
    assert found.spread[0] <= found.speedup <= found.spread[1]
    assert found.tau_simulated == 1, "the target alone"
    again = replace(pick, name="again")
    whole = measure_pick(target, again, "again", timings, sampling, pick.name)
    assert whole.prompts == 4
    same = [[d for d in r if d.generations[0].request.sample_id in first] for r in timings["again"]]
    alone = measure_pick(target, again, "again", {**timings, "again": same}, sampling)
    assert whole == alone, "on the prompts of the pick alone"


def test_rounds_and_first_tokens_are_those_of_a_continuous_batch() -> None:
    """Answers that follow each other in a row: their passes add up, and each has its own first token."""
    generations = [answer(name, "chat", [0] * 4) for name in "abcd"]
    for generation, seconds in zip(generations, (0.1, 0.1, 0.3, 0.5), strict=True):
        generation.ttft_s = seconds
    both = Decoded(generations, {"ttft": 0.9, "draft": 0.2, "verify": 0.6, "commit": 0.0, "other": 0.0}, passes=8)
    timings = {"": [[both]], "eagle3": [[both]]}
    found = summarize(system("eagle3"), Texts([text(g) for g in generations]), turns_of(timings))
    assert found.overall.ttft_s == pytest.approx(0.2)
    assert found.overall.decode_tok_s == pytest.approx(16 / 0.8)
    assert found.overall.ms_per_round is not None
    assert found.overall.ms_per_round.verify == pytest.approx(75)
    assert found.overall.latency_s is None, "in a batch a request's own end is not on the clock"


def test_what_cannot_be_simulated_is_decoded_and_null() -> None:
    """Dynamic trees and drawn children: everything that is counted, nothing that is computed from the text."""
    one, other = answer("a", "chat", [2, 1]), answer("b", "code", [0])
    timings = {name: [[decoded(one, verify=1.0), decoded(other, verify=1.0)]] for name in ("", "tree")}
    wild = replace(system("tree"), simulate=None, tree=DynamicTree(2, 3, 8))
    costs = Costs({"1": 10.0, "8": 15.0}, {"tree": {"2": 5.0}}, {"tree": {"2": 8}})
    found = collect_texts(cast(Target, None), wild, timings, Sampling())
    m = summarize(wild, found, turns_of(timings), costs).overall
    assert m.tau == pytest.approx(2.0)
    assert m.ideal_speedup == pytest.approx(1.0)
    for value in (m.tau_simulated, m.tau_difference_se, m.alpha_at_simulated, m.k_sweep, m.perplexity):
        assert value is None
    info = summarize(wild, found, turns_of(timings), costs).draft
    assert info is not None
    assert (info.tree, info.nodes, info.lossy) == ("dynamic 2x3, 8 tokens", 7, False)


def test_taus_by_the_size_of_a_tree_are_sums_over_tokens_and_rounds() -> None:
    """Of the answers of each slice; the sizes are the drafter's."""
    one, other = answer("a", "chat", [2, 1, 0]), answer("b", "code", [0, 0])
    smaller = {"a": tally_generation(answer("a", "chat", [1, 1, 0, 0]), 2), "b": tally_generation(other, 2)}
    texts = [
        replace(t, by_budget=[smaller[t.generation.request.sample_id], t.simulated[1]])
        for t in (text(one), text(other))
    ]
    found = summarized(texts, budgets=(4, 8))
    assert found.overall.budget_sweep == {"4": pytest.approx(8 / 6), "8": pytest.approx(8 / 5)}
    assert found.slices["code"].budget_sweep == {"4": 1.0, "8": 1.0}
    assert summarized(texts).overall.budget_sweep is None


def test_where_drafts_vary_no_speedup_is_predicted_from_their_length() -> None:
    """Prompt lookup often drafts nothing: a round does not cost what K says."""
    one = answer("a", "chat", [2, 1])
    timings = {name: [[decoded(one, verify=1.0)]] for name in ("", "x")}
    costs = Costs({"1": 10.0, "2": 11.0, "3": 12.0}, {"x": {"1": 1.0, "2": 1.0}})
    steady, varying = (
        summarize(replace(system("x"), fixed_length=s), Texts([text(one)]), turns_of(timings), costs).overall
        for s in (True, False)
    )
    assert steady.ideal_speedup is not None
    assert varying.ideal_speedup is None
    assert [p.predicted_speedup for p in varying.k_sweep or ()] == [None, None]
    assert [p.tau_simulated for p in varying.k_sweep or ()] == [p.tau_simulated for p in steady.k_sweep or ()]


def test_first_divergence_is_found_with_its_gap(target: Target) -> None:
    request = Request("p", "a", (3, 4, 5), 6)
    (alone,) = decode_batch(target, TargetAlone(), [request], Sampling()).generations
    other = Generation(request, list(alone.output_ids), "length")
    other.output_ids[3] = (other.output_ids[3] + 1) % 150
    tally = Tally.empty(1)
    texts = [Text(one, tally, [tally]) for one in (alone, other)]
    found = compare_texts(target, [alone, alone], texts, 1, Sampling())["overall"]
    assert (found.checked, found.equal) == (2, 1)
    (divergence,) = found.first_divergences
    assert (divergence.position, divergence.expected, divergence.got) == (3, alone.output_ids[3], other.output_ids[3])
    assert divergence.logit_gap is not None
    assert divergence.logit_gap > 0


def test_the_gap_is_that_of_the_logits_that_were_compared(target: Target) -> None:
    """With a repetition penalty the likeliest token may be one that the plain logits put behind another."""
    request, penalized = Request("p", "a", (3, 4, 5), 12), Sampling(repetition_penalty=3.0)
    (alone,) = decode_batch(target, TargetAlone(), [request], penalized).generations
    (plain,) = decode_batch(target, TargetAlone(), [request], Sampling()).generations
    place = next(i for i, (a, b) in enumerate(zip(alone.output_ids, plain.output_ids, strict=True)) if a != b)
    ids = [*alone.output_ids[:place], plain.output_ids[place], *alone.output_ids[place + 1 :]]
    other = Generation(request, ids, "length")
    tally = Tally.empty(1)
    gaps = []
    for setting in (penalized, Sampling()):
        found = compare_texts(target, [alone], [Text(other, tally, [tally])], 1, setting)["overall"].first_divergences
        gaps.append(found[0].logit_gap)
    assert gaps[0] > 0 > gaps[1]
