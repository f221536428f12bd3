"""What changed between two results: the interval of a difference, what is called noise, and what is not compared."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.gate.compare import Comparison, Difference, compare_results, difference_interval
from draftsmith.eval.results.intervals import bootstrap_tau, wilson
from draftsmith.eval.results.result import (
    DrafterResult,
    Hardware,
    Lossless,
    Measures,
    PromptSums,
    Result,
    Settings,
    SweepPoint,
    TargetInfo,
)
from draftsmith.eval.results.served import Served

SERVED = Served((), (), 0.0, 11, 12, 1, False, Hardware("invented", 1, 1, 1.0, None), "", None, "")


def measures(tau: float, /, prompts: int = 12, **changes: Any) -> Measures:
    values: dict[str, Any] = {
        "tau": tau,
        "tau_interval": (tau - 0.1, tau + 0.2),
        "tau_simulated": tau,
        "tau_simulated_interval": (tau - 0.1, tau + 0.1),
        "acceptance_at": (0.8, 0.5),
        "acceptance_at_simulated": (0.9, 0.6),
        "speedup": tau / 2,
        "speedup_spread": (tau / 2 - 0.1, tau / 2 + 0.1),
        "decode_tok_s": 100.0,
        "decode_tok_s_spread": (90.0, 110.0),
        "baseline_tok_s": 50.0,
        "baseline_tok_s_spread": (49.0, 51.0),
        "ttft_s": 0.02,
        "looping": 0.0,
        "lossless": Lossless("float32", prompts, prompts),
        "lossless_timed": Lossless("bfloat16", prompts, prompts - 1),
    }
    return Measures(prompts=prompts, **{**values, **changes})


def decoded(tau: float = 3.0, /, prompts: int = 12, **changes: Any) -> Result:
    """A result of one drafter on the slices chat and code of `prompts` prompts each."""
    return Result(
        command="draftsmith evaluate",
        commit=None,
        date="",
        hardware=Hardware("invented", 4, 2, 1.0, None),
        versions={"torch": "2.13.0"},
        recipe=None,
        target=TargetInfo("models/old", "abcdefgh1234"),
        settings=Settings(0.0, None, None, 5, 1, "bfloat16", 0, 3, prompts=f"digest of {prompts}"),
        drafters={
            "eagle3": DrafterResult(
                measures(tau, 2 * prompts, **changes),
                {name: measures(tau, prompts, **changes) for name in ("chat", "code")},
                DraftInfo("eagle3", 5, 5),
            )
        },
    )


def scaled(result: Result, factor: float) -> Result:
    """The same result with another tau."""
    tau = factor * (result.drafters["eagle3"].overall.tau or 0)
    other = decoded(tau).drafters["eagle3"]
    return replace(result, drafters={"eagle3": other})


def set_in(result: Result, **settings: Any) -> Result:
    return replace(result, settings=replace(result.settings, **settings))


def of(comparison: Comparison, metric: str, slice_name: str = "overall") -> Difference:
    (found,) = [d for d in comparison.drafters[0].differences if (d.metric, d.slice) == (metric, slice_name)]
    return found


def test_changes_of_tau_are_over_pairs_of_the_same_prompts() -> None:
    """Prompts are hard or easy for both drafters, and the new one needs a twentieth fewer rounds on all of them: clear over pairs,
    noise between two numbers."""
    rounds = np.random.default_rng(0).uniform(10, 60, 24).tolist()

    def measured(factor: float, tau: float) -> Result:
        prompts = {
            f"p{i}": PromptSums("chat" if i < 12 else "code", 60, factor * r, factor * r) for i, r in enumerate(rounds)
        }
        result = decoded(tau, tau_interval=(tau - 0.4, tau + 0.5), tau_simulated_interval=(tau - 0.4, tau + 0.5))
        return replace(result, drafters={"eagle3": replace(result.drafters["eagle3"], prompts=prompts)})

    tau = 24 * 60 / sum(rounds)
    old, new = measured(1.0, tau), measured(0.95, tau / 0.95)
    for metric in ("tau", "tau_simulated"):
        for name in ("overall", "chat", "code"):
            found = of(compare_results(old, new), metric, name)
            assert found.interval is not None
            assert found.verdict == "better"
            if name == "overall":
                assert found.interval[0] < found.change < found.interval[1] < 0.2
    assert of(compare_results(old, old), "tau").verdict == "same"

    def without(result: Result, prompt: str) -> Result:
        drafter = result.drafters["eagle3"]
        kept = {name: sums for name, sums in drafter.prompts.items() if name != prompt}
        return replace(result, drafters={"eagle3": replace(drafter, prompts=kept)})

    assert of(compare_results(old, without(new, "p3")), "tau").verdict == "noise", "no pairs"
    few = [without(result, "p3") for result in (old, new)]
    for n in range(4, 6):
        few = [without(result, f"p{n}") for result in few]
    a, b = (of(compare_results(*few), "tau", name).verdict for name in ("chat", "code"))
    assert (a, b) == ("noise", "better"), "nine pairs are too few, so the two numbers' own intervals count"


def test_the_interval_over_pairs_holds_the_change_in_95_of_100_cases() -> None:
    """Of prompts drawn from lengths of rounds that two drafters share in part; the true change is that of very many prompts."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        hard = rng.gamma(4.0, 5.0, count)
        return np.stack([hard * rng.uniform(0.8, 1.2, count), hard * rng.uniform(0.7, 1.1, count)]) + 1

    tokens, many = 60.0, draw(np.random.default_rng(1), 400_000)
    change = float(np.diff(tokens / many.mean(1))[0])
    held = 0
    for seed in range(400):
        before, after = draw(np.random.default_rng(seed), 120)
        low, high = bootstrap_tau([(tokens, r) for r in after], [(tokens, r) for r in before]) or (0, 0)
        held += low <= change <= high
    assert 0.91 < held / 400 < 0.98


def test_wilsons_interval() -> None:
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    for hits, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(hits / count, count) == pytest.approx((low, high), abs=5e-5)


def test_shares_are_compared_by_newcombes_method() -> None:
    """Newcombe, Statistics in Medicine 17 (1998) 873, table II, method 10: 56/70 less 48/80 is 0.2, from 0.0524 to 0.3339."""
    found = difference_interval(48 / 80, 56 / 70, wilson(48 / 80, 80), wilson(56 / 70, 70))
    assert found == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_what_is_said_of_every_metric() -> None:
    slower = {"baseline_tok_s": 40.0, "baseline_tok_s_spread": (39.0, 41.0)}
    new = decoded(2.6, **slower, decode_tok_s=140.0, decode_tok_s_spread=(130.0, 150.0), ttft_s=0.03)
    found = compare_results(decoded(), new)
    tau = of(found, "tau")
    assert (tau.old, tau.new, tau.verdict) == (3.0, 2.6, "worse")
    assert tau.interval == pytest.approx((-0.4 - (0.1**2 + 0.2**2) ** 0.5, -0.4 + (0.2**2 + 0.1**2) ** 0.5))
    verdicts = {d.metric: d.verdict for d in found.drafters[0].differences if d.slice == "overall"}
    assert verdicts == {
        "tau": "worse",
        "tau_simulated": "worse",
        "speedup": "worse",
        "decode_tok_s": "better",
        "baseline_tok_s": "changed",
        "ttft_s": None,
        "looping": "same",
        "differing": "same",
        "differing_timed": "same",
        "acceptance_at[0]": None,
        "acceptance_at[1]": None,
    }
    assert {d.slice for d in found.drafters[0].differences} == {"overall", "chat", "code"}
    assert len(found.worse) == 9
    assert found.worse[0] == "eagle3: tau 2.6 is worse than 3 beyond noise (-0.624 to -0.176)."
    assert any(text.startswith("eagle3: code.tau 2.6 is worse") for text in found.worse)
    assert not compare_results(new, new).worse


def test_less_is_better_where_it_is() -> None:
    old, new = decoded(looping=0.0), decoded(looping=0.75)
    assert of(compare_results(old, new), "looping").verdict == "worse"
    assert of(compare_results(new, old), "looping").verdict == "better"


def test_a_single_greedy_answer_that_differs_in_float32_is_worse() -> None:
    one = decoded(lossless=Lossless("float32", 12, 11), lossless_timed=Lossless("bfloat16", 12, 10))
    found = compare_results(decoded(), one)
    assert (of(found, "differing").change, of(found, "differing").verdict) == (1, "worse")
    assert of(found, "differing_timed", "code").verdict == "noise"


def test_no_interval_of_few_prompts_or_a_single_repeat() -> None:
    few, once = decoded(prompts=9), set_in(decoded(), repeats=1, seed=5)
    assert of(compare_results(few, few), "tau", "chat").interval is None
    assert of(compare_results(few, few), "tau").interval is not None, "18 prompts in all"
    assert "fewer than 10 prompts, so without an interval: chat, code" in compare_results(few, few).notes
    assert of(compare_results(once, decoded()), "speedup").interval is None
    assert of(compare_results(once, decoded()), "tau").interval is not None


def test_what_only_one_result_has_is_left_out() -> None:
    nulls = ("tau", "tau_interval", "acceptance_at", "speedup", "decode_tok_s", "baseline_tok_s", "ttft_s", "lossless")
    simulated = decoded(**dict.fromkeys((*nulls, "lossless_timed")), acceptance_at_simulated=(0.95, 0.5))
    found = compare_results(decoded(), set_in(simulated, batch=32))
    left = {"tau_simulated", "looping", "acceptance_at[0]", "acceptance_at[1]"}
    assert {d.metric for d in found.drafters[0].differences} == left
    assert of(found, "acceptance_at[0]").change == pytest.approx(0.05), "both as simulated"
    assert not [note for note in found.notes if "speeds" in note]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, hardware=replace(r.hardware, threads=1)),
        lambda r: replace(r, hardware=replace(r.hardware, gpu="H100")),
        lambda r: set_in(r, batch=8),
        lambda r: replace(r, recipe={"target": {"tensor_parallel": 2}}),
    ],
)
def test_speeds_of_another_machine_or_batch_are_left_out_with_a_sentence(change: Any) -> None:
    found = compare_results(decoded(), change(decoded(2.0)))
    assert {d.metric for d in found.drafters[0].differences}.isdisjoint({"speedup", "decode_tok_s", "ttft_s"})
    assert of(found, "tau").verdict == "worse"
    (note,) = [note for note in found.notes if "speeds are left out" in note]
    assert "invented, 4 cores, 2 threads, batch 1; " in note


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 50}, "top-k off and 50"),
        ({"repetition_penalty": 1.1}, "repetition penalty off and 1.1"),
        ({"temperature": 0.5, "dtype": "float16"}, "temperature 0 and 0.5, dtype bfloat16 and float16"),
        ({"prompts": "others"}, "on other prompts: evaluate both with the same evaluate.prompts"),
    ],
)
def test_unlike_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"a and b .*{said}"):
        compare_results(decoded(), set_in(decoded(), **settings), ("a", "b"))


def test_prompts_and_slices_must_be_the_same() -> None:
    with pytest.raises(UserError, match=r"on other prompts \(chat: 12 and 4; code: 12 and 4\)"):
        compare_results(decoded(), decoded(prompts=4))
    drafter = decoded().drafters["eagle3"]
    renamed = replace(drafter, slices={"chat": drafter.slices["chat"], "math": drafter.slices["code"]})
    with pytest.raises(UserError, match=r"\(code: 12 and 0; math: 0 and 12\)"):
        compare_results(decoded(), replace(decoded(), drafters={"eagle3": renamed}))


def test_another_target_is_what_is_compared() -> None:
    assert "the same target: models/old" in compare_results(decoded(), decoded()).notes
    new = replace(decoded(), target=TargetInfo("models/new", "xyz"), versions={"torch": "2.14.0"})
    new = replace(new, supplement={"warning 1": "the head was made for models/old."})
    notes = compare_results(decoded(), new, ("a", "b")).notes
    assert "the target changed: models/old (abcdefgh) -> models/new (xyz)" in notes
    assert "versions changed: torch 2.13.0 -> 2.14.0" in notes
    assert "warning in the new result: the head was made for models/old" in notes
    notes = compare_results(new, new).notes
    assert [note for note in notes if "warning" in note] == [
        "warning in the old and the new result: the head was made for models/old"
    ]


def test_drafters_are_matched_by_name_or_as_asked() -> None:
    both = replace(decoded(), drafters={"a=b": decoded().drafters["eagle3"], "eagle3": decoded(2.0).drafters["eagle3"]})
    assert [one.name for one in compare_results(both, both).drafters] == ["a=b", "eagle3"]
    found = compare_results(both, both, ("x", "y"), ["a=b=eagle3", "eagle3", "eagle3"])
    assert [one.name for one in found.drafters] == ["a=b -> eagle3", "eagle3"]
    assert of(found, "tau").change == pytest.approx(-1)
    assert "not compared, in the new result: a=b" in found.notes
    alone = compare_results(both, decoded(), ("x", "y"))
    assert [one.name for one in alone.drafters] == ["eagle3"]
    assert "not compared, in the old result: a=b" in alone.notes
    with pytest.raises(UserError, match=r"'medusa=eagle3' names no drafter of each result.*x has a=b, eagle3"):
        compare_results(both, both, ("x", "y"), ["medusa=eagle3"])
    other = replace(decoded(), drafters={"medusa": decoded().drafters["eagle3"]})
    with pytest.raises(UserError, match="No drafter has the same name in both: x has medusa and y has eagle3"):
        compare_results(other, decoded(), ("x", "y"))


def drafting(k: int, taus: dict[int, float | None], draft: DraftInfo | None = None) -> Result:
    """A result whose drafter drafts `k` tokens, with this curve of simulated taus; its own tau is greater for more tokens."""
    result = decoded(3.0 + k / 10, k_sweep=tuple(SweepPoint(length, tau) for length, tau in taus.items()))
    drafter = replace(result.drafters["eagle3"], draft=draft)
    return set_in(replace(result, drafters={"eagle3": drafter}), num_speculative_tokens=k)


@pytest.mark.parametrize(("ours", "theirs"), [(None, None), (DraftInfo("eagle3", 5, 5), DraftInfo("eagle3", 3, 3))])
def test_drafts_of_another_length_are_compared_by_the_curves_of_both(
    ours: DraftInfo | None, theirs: DraftInfo | None
) -> None:
    """K = 3 gains at the lengths that both simulated, though its own tau is smaller: that is of fewer tokens."""
    old = drafting(5, {1: 1.5, 2: 1.8, 3: None, 4: 2.1, 5: 2.2}, ours)
    new = drafting(3, {1: 1.6, 2: 2.0, 3: 2.3, 4: 2.4}, theirs)
    found = compare_results(old, new, ("a", "b"))
    assert found.drafters[0].k == (5, 3)
    overall = {d.metric: (d.old, d.new, d.verdict) for d in found.drafters[0].differences if d.slice == "overall"}
    curve = {name: values for name, values in overall.items() if name.startswith("k_sweep")}
    assert curve == {"k_sweep[1]": (1.5, 1.6, None), "k_sweep[2]": (1.8, 2.0, None), "k_sweep[4]": (2.1, 2.4, None)}
    assert overall.keys() - curve.keys() == {"baseline_tok_s", "ttft_s", "looping", "differing", "differing_timed"}
    assert {d.slice for d in found.drafters[0].differences if d.metric == "k_sweep[2]"} == {"overall", "chat", "code"}
    (note,) = [note for note in found.notes if "drafts" in note]
    assert note.startswith("eagle3 drafts 3 tokens and not 5 as in the old result: tau is compared as simulated")
    with pytest.raises(UserError, match="eagle3 drafts 5 tokens in a and 3 in b, and taus of other draft lengths"):
        found.require_intervals()


def test_drafts_of_another_length_without_a_curve_in_common_are_refused() -> None:
    with pytest.raises(UserError, match="5 tokens in a and eagle3 3 in b, and no draft length was simulated in both"):
        compare_results(drafting(5, {4: 2.1, 5: 2.2}), drafting(3, {1: 1.6, 3: 2.3, 4: None}), ("a", "b"))
    assert compare_results(drafting(5, {}), decoded()).drafters, "of the same K no curve is needed"


def test_both_sides_are_named() -> None:
    old = replace(decoded(), date="2026-11-20T10:00:00+00:00", recipe={"name": "small", "output_dir": None})
    typed = "draftsmith evaluate --recipe r.yaml --head 'my heads/a'"
    sizes = [drafting(5, {}, DraftInfo("eagle3", 5, 5, parameters=n)) for n in (100, 200)]
    old = replace(old, drafters=sizes[0].drafters)
    new = replace(sizes[1], command=typed, recipe={"output_dir": "runs/b"})
    found = compare_results(old, new)
    assert found.sides == ("run small, 2026-11-20, temperature 0", "head 'my heads/a', run runs/b, temperature 0")
    assert "eagle3 in the new result has 200 parameters and not 100 as in the old one" in found.notes
    assert not [note for note in compare_results(old, old).notes if "parameters" in note]


def test_results_of_servers_are_not_compared_by_the_report_beside_them() -> None:
    served = replace(decoded(), served=SERVED)
    for old, new in ((served, decoded()), (decoded(), served)):
        with pytest.raises(
            UserError, match=r"^b is of running servers" if new is served else r"^a is of running servers"
        ):
            compare_results(old, new, ("a", "b"))


def test_a_gate_whose_head_is_gone_is_refused() -> None:
    drafters = decoded().drafters
    both = replace(decoded(), drafters=drafters | {"prompt lookup": drafters["eagle3"]})
    new = replace(both, drafters={"eagle3, bfloat16": drafters["eagle3"], "prompt lookup": drafters["eagle3"]})
    compare_results(both, both).require_intervals()
    compare_results(both, new, pairs=["prompt lookup"]).require_intervals()
    with pytest.raises(UserError, match="b has no eagle3, the head of a, so nothing could tell whether it is worse"):
        compare_results(both, new, ("a", "b")).require_intervals()


def test_a_gate_on_nothing_is_refused() -> None:
    compare_results(decoded(), decoded()).require_intervals()
    bare = decoded(tau_interval=None, tau_simulated_interval=None)
    with pytest.raises(UserError, match="tau of eagle3 has no interval in both a and b"):
        compare_results(bare, decoded(), ("a", "b")).require_intervals()
    compare_results(decoded(tau_interval=None), decoded()).require_intervals()
