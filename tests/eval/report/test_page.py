"""The page as a reader decides: the finding first, numbers no more precise than what made them, one script that may run."""

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from draftsmith.eval.report.losslessness import evidence
from draftsmith.eval.report.page_model import view_of
from draftsmith.eval.report.report import render_html, render_markdown
from draftsmith.eval.results.conditions import Group
from draftsmith.eval.results.intervals import prompts_needed
from draftsmith.eval.results.result import Divergence, DrafterResult, Lossless, Result
from tests.eval.report.test_report import EAGLE, PROMPT_LOOKUP, bare_result, invented_result


def with_overall(result: Result, **changes: object) -> Result:
    """Change the overall measures of a result's first drafter, which then has no slices."""
    overall = replace(result.drafters[EAGLE].overall, **changes)  # type: ignore[arg-type]
    return replace(result, drafters={EAGLE: DrafterResult(overall, {})})


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_nothing_but_the_pages_own_script_may_run() -> None:
    page = render_html([invented_result()])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert page.index("Content-Security-Policy") < page.index("<title>")


def test_findings_come_before_details() -> None:
    page = render_html([invented_result(), invented_result(1.0, drafters=(EAGLE, PROMPT_LOOKUP))])
    order = [
        "eagle3 · T=0 decodes",
        "<nav",
        "Every system, over all slices",
        "<figure",
        "Counts and accepted length",
        "Command",
    ]
    places = [page.index(words) for words in order]
    assert places == sorted(places)
    main = page[page.index("<main") :]
    shown = re.sub(r"<details>.*?</details>", "", main, flags=re.DOTALL)
    assert re.findall(r"<caption>(.*?)</caption>", shown) == [
        "Every system, over all slices",
        "Accepted length by tokens before the draft",
        "Every first divergence",
    ]


def test_acceptance_by_context_has_intervals_and_is_left_out_where_all_rounds_are_of_one_group() -> None:
    page = render_html([invented_result()])
    assert page.count('class="interval"') == 1
    assert "with 95% intervals over prompts" in page
    caption = "Conditional acceptance α of each draft position by tokens before the draft"
    assert caption in page
    alone = (Group("32 to 63", 9, 2.0, alpha_at=(0.5,)),)
    page = render_html([with_overall(invented_result(), contexts=alone, training_split=None)])
    assert caption not in page
    assert "All rounds stand behind 32 to 63 tokens" in page[page.index('id="missing"') :]


def test_what_was_not_measured_is_one_list_at_the_end() -> None:
    page = render_html([bare_result()])
    listed = page[page.index('id="missing"') : page.index("</main>")]
    assert listed.count("<li>") >= 6
    assert listed.count("</section>") == 1
    assert "Draft length: The draft-length sweep was not measured." in listed
    assert "sweep was not measured" not in page[: page.index('id="missing"')]


def test_every_row_names_its_slice_also_when_it_is_sorted_apart() -> None:
    page = render_html([invented_result(drafters=(EAGLE, PROMPT_LOOKUP))])
    table = next(part for part in page.split("<table ")[1:] if "Counts and accepted length" in part)
    rows = re.findall(r'<tr class="(.*?)"><th scope="row">(.*?)</th><th scope="row">(.*?)</th>', table)
    assert rows[:4] == [
        ("strong", "overall", EAGLE),
        ("strong same", "overall", PROMPT_LOOKUP),
        ("", "chat", EAGLE),
        (" same", "chat", PROMPT_LOOKUP),
    ]
    assert "rowspan" not in page


@pytest.mark.parametrize(("repeats", "prompts", "given"), [(3, 60, True), (1, 60, False), (3, 9, False)])
def test_a_speed_has_an_interval_only_of_several_repeats_and_ten_prompts(
    repeats: int, prompts: int, given: bool
) -> None:
    result = with_overall(invented_result(), prompts=prompts)
    result = replace(result, settings=replace(result.settings, repeats=repeats))
    low, high = result.drafters[EAGLE].overall.speedup_spread or (0.0, 0.0)
    for text in (render_html([result]), render_markdown([result])):
        assert (f"({low:.2f}× to {high:.2f}×)" in text) == given
        assert ("(188 to 193)" in text) == given
        assert f"{result.drafters[EAGLE].overall.speedup:.2f}×" in text
    assert render_html([result]).count('class="whisker"') == (2 if given else 1 if prompts > 9 else 0)


def test_how_many_prompts_it_takes() -> None:
    assert prompts_needed(2.0, (1.92, 2.08), 50) == 200
    assert prompts_needed(2.0, (2.0, 2.0), 50) == 1
    text = render_markdown([with_overall(invented_result(), tau=2.0, tau_interval=(1.92, 2.08), prompts=50)])
    assert "50 prompts give τ to ±4.0%; for ±2% it takes about 200 of this kind." in text
    assert row_of(text, "| overall | eagle3 | 50 |")[-1] == "200"
    few = render_markdown([with_overall(invented_result(), tau_interval=None, prompts=4)])
    assert "τ has no interval: 4 prompts are too few." in few


def test_rates_show_their_rounds() -> None:
    m = invented_result().drafters[EAGLE].overall
    text = render_markdown([invented_result()])
    assert m.acceptance_at is not None
    alphas = row_of(
        text, f"| overall | eagle3 | {100 * (m.alpha_at or ())[0]:.1f}% | {100 * (m.alpha_at or ())[1]:.1f}%"
    )
    assert alphas[-2:] == [f"{m.rounds:,}", f"{round((m.rounds or 0) * (m.acceptance_at[3] or 0)):,}"]
    assert row_of(text, "| eagle3 |")[-2:] == ["60", f"{m.rounds:,}"]


def test_differences_in_the_measured_dtype_open_the_page_with_a_scale() -> None:
    gaps = (Divergence("a", "code", 3, 1, 2, 0.0625), Divergence("b", "chat", 5, 1, 2, -0.125))
    timed = Lossless("bfloat16", 60, 58, gaps)
    result = with_overall(invented_result(), lossless=Lossless("float32", 60, 60), lossless_timed=timed)
    result = replace(result, settings=replace(result.settings, dtype="bfloat16"))
    words = (
        "58 of 60 greedy answers checked in bfloat16, as measured, equal the target's own, token for token; where they part, the "
        "target's logits of the two tokens differ by at most 0.125, so that its own token was 1.13 times as likely. bfloat16 rounds a "
        "logit of 16 to steps of 0.125."
    )
    page, text = render_html([result]), render_markdown([result])
    assert words.replace("'", "&#39;") in page[: page.index("<nav")]
    assert words in text[: text.index("## ")]
    assert row_of(text, "| eagle3 | code | a |")[-2:] == ["0.0625", "1.06"]


def test_equality_in_another_dtype_is_not_claimed_for_the_measured_one() -> None:
    result = with_overall(invented_result(), lossless=Lossless("float32", 60, 60))
    served = replace(result, settings=replace(result.settings, dtype="bfloat16"))
    assert "All 60 greedy answers checked in float32, as measured," in evidence(view_of([result, result]))
    assert "in float32 (not in bfloat16, as measured)," in evidence(view_of([served]))
    other = replace(with_overall(invented_result(), lossless=Lossless("float32", 15, 3)), command="another run")
    assert "63 of 75 greedy answers checked in float32" in evidence(view_of([result, other]))
    assert evidence(view_of([bare_result()])) == ""
    tuned = with_overall(invented_result(), lossless=Lossless("float32", 60, 60), agreement=0.9)
    assert "equal those of the tuned target alone," in evidence(view_of([tuned]))
