"""What a report opens with, and how the head came to be."""

from dataclasses import replace

import pytest

from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.decision import Decision, decision_json, make_decision
from draftsmith.eval.report.report import render_html, render_markdown
from draftsmith.eval.results.result import Pick, TargetInfo
from draftsmith.eval.training.history import History, Point
from draftsmith.heads.vocab import Coverage
from draftsmith.machine import Clocks
from tests.eval.planner.plans import result, served_table, table

GOOD = {"overall": 0.8, "code": 0.9, "rag": 0.02}


def decided(alphas: dict[str, float] = GOOD, price: float | None = None, **changes: object) -> Decision:
    found = make_decision([replace(result(0, alphas), **changes)], table(), "costs.json", price_per_hour=price)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(("alpha", "kind", "words"), [(0.8, "good", "Deploy eagle3"), (0.02, "bad", "Do not deploy")])
def test_a_page_opens_with_its_verdict(alpha: float, kind: str, words: str) -> None:
    decision = decided({"overall": alpha})
    page = render_html(decision.plan.results, decision)
    assert f'class="verdict {kind}"' in page
    assert words in page[: page.index("<nav")]
    for reason in decision.verdict.reasons:
        assert reason.replace("'", "&#39;") in page


def test_a_busy_machine_is_said_before_anything_else() -> None:
    busy = decided(clocks=Clocks(10.0, 9.0, 0.6, 4.0))
    page, text = render_html(busy.plan.results, busy), render_markdown(busy.plan.results, busy)
    for shown in (page, text):
        assert shown.index("Measured on a busy machine, do not quote: other programs used 60%") < shown.index("Deploy")
        assert "Evaluate again with --redo evaluate on a quiet machine, with more evaluate.repeats." in shown
    quiet = decided(clocks=Clocks(10.0, 9.0, 0.0, 0.5))
    assert "do not quote" not in render_html(quiet.plan.results, quiet)


def test_a_gguf_target_is_still_to_be_timed_in_llama_cpp() -> None:
    found = decided(target=replace(result(0, GOOD).target, path="models/my.Q4_1.gguf"))
    for shown in (render_html(found.plan.results, found), render_markdown(found.plan.results, found)):
        assert (
            "draftsmith costs --server URL --server URL"
            in shown[shown.index("Not timed in llama.cpp") : shown.index("Deploy eagle3")]
        )
    other = decided()
    assert "Not timed in" not in render_html(other.plan.results, other)


def test_times_of_one_of_several_temperatures_say_of_which() -> None:
    """Of servers whole rounds were timed, at one temperature for all."""
    for costs, parts in (
        (table(), "target ms, T=0 | draft ms, T=0 | rest ms, T=0"),
        (served_table({2: 12.0, 4: 15.0}), "round ms"),
    ):
        both = make_decision([result(t, GOOD) for t in (0, 1)], costs, "costs.json")
        assert both is not None
        heads = f"| drafter | K | τ, T=0 | {parts} | speedup, T=0 | speedup, T=1 |"
        assert heads in render_markdown(both.plan.results, both)
    alone = decided()
    assert "| drafter | K | τ | target ms | draft ms | rest ms | speedup, T=0 |" in render_markdown(
        alone.plan.results, alone
    )


def test_every_place_of_the_plan_is_in_a_table() -> None:
    decision = decided(price=3.6)
    text = render_markdown(decision.plan.results, decision)
    places = decision_json(decision)["places"]
    assert len(places) == 3 * 9
    for place in places:
        if place["slice"] == "overall":
            best = place["best"]
            shown = f"{best['speedup']:.2f}×"
            row = f"| T=0 | {place['batch']} | {place['context']} | "
            line = next(line for line in text.splitlines() if line.startswith(row))
            assert shown in line
            assert ("none" in line) == (not place["pays"])
    assert "target alone, per million" in text
    alone = places[0]["target_alone_tok_s"]
    assert places[0]["target_alone_per_million"] == pytest.approx(3.6 / 3600 * 1e6 / alone)
    assert places[0]["best"]["per_million"] == pytest.approx(
        places[0]["target_alone_per_million"] / places[0]["best"]["speedup"]
    )


def test_memory_stands_at_every_place_of_the_plan_and_beside_the_peak() -> None:
    mib = 2**20
    target = TargetInfo("target", "f1", weight_bytes=100 * mib, cache_bytes=mib)
    drafter = result(0, GOOD).drafters["eagle3"]
    draft = DraftInfo("eagle3", 4, 4, weight_bytes=20 * mib, cache_bytes=mib // 2, cache_slots=6)
    peaks = replace(drafter.overall, peak_memory_bytes=500 * mib, peak_memory_baseline_bytes=400 * mib)
    made = replace(drafter, draft=draft, overall=peaks)
    settings = replace(result(0, GOOD).settings, longest_text=200)
    decision = decided(target=target, settings=settings, drafters={"eagle3": made})
    both = [*decision.plan.results, replace(decision.plan.results[0], settings=replace(settings, temperature=1.0))]
    text = render_markdown(both, decision)
    rows = [line for line in text.splitlines() if "| 100.0 | " in line]
    assert len(rows) == 9 + 1, "both temperatures take the same"
    # Weights; 4 * (64 + 1) and 4 * 4 tokens in the target's cache, 4 * (64 + 6) halves in the drafter's.
    assert "| eagle3 | 4 | 64 | 100.0 | 260.0 | 16.0 | 20.0 | 140.0 | 360.0 | 536.0 | 48.9% |" in rows
    own = "| **eagle3** | **1** | **200** | **100.0** | **201.0** | **4.0** | **20.0** | **103.0** | **301.0** | **428.0** | **42.2%** |"
    assert own.replace("**", "") in [row.replace("**", "") for row in rows]
    assert "| eagle3 · T=0 | chain | 4 | – | 20.0 | 428.0 | 500 | 301.0 | 400 |" in text
    unknown = render_markdown([result(0, GOOD)])
    assert "Memory in MiB" not in unknown
    assert "| eagle3 | chain | 4 | – | – | – | – | – | – |" in unknown


def test_predicted_stands_beside_measured() -> None:
    option = decided().plan.over_temperatures(1)[0]
    exact = option.cost.speedup(2.5)
    picks = (
        Pick("eagle3", 4, 9, 2.5, exact, (exact, exact)),
        Pick("eagle3", 4, 9, 2.5, exact / 1.2, (exact / 1.3, exact / 1.1)),
    )
    decision = decided(picks=picks)
    first, second = decision.checks
    assert first.predicted == pytest.approx(exact)
    assert (first.holds, second.holds) == (True, False)
    assert second.difference == pytest.approx(0.2)
    wide = decided(picks=(Pick("eagle3", 4, 9, 2.5, exact / 1.2, (exact / 1.5, exact * 1.1)),))
    assert wide.checks[0].holds, "within the spread of the repeats"
    rows = [line for line in render_markdown(decision.plan.results, decision).splitlines() if "eagle3, K = 4" in line]
    assert [row.split(" | ")[-1].rstrip(" |") for row in rows] == ["yes", "no"]


def test_settings_are_there_to_be_pasted() -> None:
    decision = decided()
    page, text = (render(decision.plan.results, decision) for render in (render_html, render_markdown))
    for shown, end in ((page, "<nav"), (text, "## ")):
        opening = shown[: shown.index(end, 10)]
        assert "vllm serve target" in opening
        assert "num_speculative_tokens_per_batch_size" in opening
        assert "adaptive.json" in opening
    off = decided({"overall": 0.02})
    assert 'class="paste"' not in render_html(off.plan.results, off), "nothing to paste where speculation stays off"


def test_without_costs_a_page_says_so() -> None:
    page = render_html([result(0, GOOD)])
    assert "Costs were not measured" in page
    assert "No plan was made" in page
    assert "The training of this head is not in the run." in page


def test_how_the_head_came_to_be() -> None:
    points = tuple(Point(10 * i, 40_000 * i, 1.2 + 0.3 * i) for i in range(1, 9))
    past = History(
        method="eagle3",
        answers=1200,
        heldout_answers=100,
        supervised_tokens=90_000,
        epochs=3.0,
        points=points,
        accuracy=0.5,
        chance=0.05,
        num_speculative_tokens=4,
        coverage=Coverage(0.999, 0.87, {"chat": 0.82, "code": 0.9}),
        finished=True,
        forecast=None,
    )
    page, text = (render([result(0, GOOD)], None, past) for render in (render_html, render_markdown))
    assert "Learned from 1,200 answers, 90,000 supervised tokens, 3 epochs" in text
    assert "covers 87.0% of the held-out answers" in text
    assert "| 80 | 320,000 | 3.60 |" in text
    assert "| chat | 82.0% |" in text
    section = page[page.index('id="training"') :]
    assert "<svg" in section[: section.index("</section>")]
