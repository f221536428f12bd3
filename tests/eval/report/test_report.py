"""The report: every number it was given, nothing from outside, nothing executed, the same bytes every time."""

import io
import math
import random
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.report import report
from draftsmith.eval.report.analysis import _reached
from draftsmith.eval.report.cells import significant
from draftsmith.eval.report.page_model import best_k, view_of
from draftsmith.eval.report.report import (
    fenced,
    headline_table,
    markdown_cell,
    render_html,
    render_markdown,
    write_report,
)
from draftsmith.eval.results.conditions import Group
from draftsmith.eval.results.result import (
    Costs,
    Divergence,
    DrafterResult,
    Example,
    Hardware,
    Lossless,
    Measures,
    MsPerRound,
    Percentiles,
    Piece,
    Result,
    Settings,
    SweepPoint,
    TargetInfo,
)

K = 5
ALPHAS = {"chat": 0.52, "code": 0.78, "math": 0.66, "rag": 0.72, "json": 0.8}
VERIFY = {str(n): round(5.0 + 0.22 * n, 3) for n in range(1, 10)}
PROMPT_LOOKUP, EAGLE = "prompt_lookup", "eagle3"
DRAFT = {EAGLE: {str(k): 0.7 + 0.55 * k for k in range(1, 9)}, PROMPT_LOOKUP: {str(k): 0.1 for k in range(1, 9)}}
COSTS = Costs(VERIFY, DRAFT)


def invented_measures(name: str, alpha: float, slice_name: str, prompts: int) -> Measures:
    """Numbers that hang together but that nobody measured: acceptance falls a little at every position."""
    alphas = [alpha - 0.03 * i for i in range(8)]
    ats = [math.prod(alphas[: i + 1]) for i in range(8)]
    taus = [1 + sum(ats[:k]) for k in range(1, 9)]
    tau, rounds = taus[K - 1], 40 * prompts
    speedup = 0.87 * (COSTS.speedup(name, K, tau) or 0.0)
    gaps = (Divergence("code-3", "code", 17, 311, 9, 0.0012),) if slice_name in ("code", "overall") else ()
    return Measures(
        prompts=prompts,
        tokens=round(tau * rounds),
        rounds=rounds,
        tau=tau,
        tau_mean_over_prompts=tau + 0.04,
        tau_interval=(tau - 0.13, tau + 0.12),
        tau_simulated=tau + 0.004,
        tau_difference_se=0.031,
        acceptance_rate=sum(ats[:K]) / K,
        acceptance_at=tuple(ats[:K]),
        alpha_at=tuple(alphas[:K]),
        contexts=(
            Group("32 to 63", rounds - 9, tau, rounds - 9.5, tau, (tau - 0.1, tau + 0.2), alpha_at=tuple(alphas[:K])),
            Group("64 to 127", 9, 1.23, 9.5, 1.234, alpha_at=(0.2, None)),
        ),
        training_split=(Group("within", rounds - 9, tau), Group("past", 9, 1.23)),
        k_sweep=tuple(
            SweepPoint(k, taus[k - 1], sum(ats[:k]) / k, COSTS.speedup(name, k, taus[k - 1])) for k in range(1, 9)
        ),
        budget_sweep={"8": tau + 0.1, "16": tau + 0.3},
        decode_tok_s=191.0 * speedup,
        decode_tok_s_spread=(188.0 * speedup, 195.0 * speedup),
        baseline_tok_s=191.0,
        baseline_tok_s_spread=(188.4, 192.8),
        speedup=speedup,
        speedup_spread=(speedup - 0.05, speedup + 0.04),
        speedup_vs_generate=1.3 * speedup,
        ttft_s=0.0213,
        ttft_baseline_s=0.0211,
        latency_s=Percentiles(0.31, 0.52),
        latency_baseline_s=Percentiles(0.49, 0.83),
        token_wait_s=Percentiles(0.0, 0.0087),
        token_wait_baseline_s=Percentiles(0.0053, 0.0061),
        ms_per_round=MsPerRound(DRAFT[name]["5"], VERIFY["6"], 0.11, 0.9),
        ideal_speedup=COSTS.speedup(name, K, tau),
        lossless=Lossless("float32", prompts, prompts - len(gaps), gaps, tau, tau),
        looping=0.14 if slice_name == "json" else 0.0,
    )


def invented_drafter(name: str, slices: dict[str, float], shift: float) -> DrafterResult:
    per_slice = {s: invented_measures(name, a + shift, s, 12) for s, a in slices.items()}
    mean = sum(slices.values()) / len(slices) + shift
    return DrafterResult(invented_measures(name, mean, "overall", 12 * len(slices)), per_slice)


def invented_example() -> Example:
    texts = ["def", " add", "(", "a", ",", " b", "):", "\n    ", "return", " a", " +", " b", "\n"]
    positions = [None, 0, 1, 2, None, 0, None, 0, 1, 2, 3, 4, None]
    prompt = "Write a Python function that adds two numbers."
    return Example(EAGLE, "code", prompt, tuple(Piece(t, p) for t, p in zip(texts, positions, strict=True)))


def invented_result(
    temperature: float = 0.0,
    drafters: tuple[str, ...] = (EAGLE,),
    slices: dict[str, float] = ALPHAS,
    shift: float = 0.0,
) -> Result:
    """A result of no machine: the hardware's name says so."""
    return Result(
        command=f"draftsmith evaluate --recipe recipes/eagle3/invented.yaml --evaluate.temperature {temperature:g}",
        commit="0123456789abcdef0123456789abcdef01234567",
        date="2001-02-03T04:05:06+00:00",
        hardware=Hardware("Invented CPU (test)", 2, 2, 16.0, None),
        versions={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "draftsmith": "0.0.0"},
        recipe={
            "target": {"path": "invented"},
            "head": {"method": "eagle3", "steps": 5},
            "train": {"lr": 6e-4, "epochs": 10},
        },
        target=TargetInfo("models/invented-target", "00ff00ff00ff00ff", 3_300_000, 16, 128, 1024),
        settings=Settings(temperature, None, None, K, 1, "float32", 0, 3),
        drafters={d: invented_drafter(d, slices, shift - 0.25 * (d == PROMPT_LOOKUP)) for d in drafters},
        costs=COSTS,
        examples=(invented_example(),),
        supplement={"prompt set": "invented.jsonl", "max_new_tokens": 48},
    )


def bare_result() -> Result:
    """Nothing measured at all, in one slice."""
    result = invented_result()
    nothing = DrafterResult(Measures(prompts=0), {"chat": Measures(prompts=0)})
    return replace(result, drafters={EAGLE: nothing}, costs=None, examples=(), recipe=None, commit=None, supplement={})


CASES = {
    "one": [invented_result()],
    "two temperatures": [invented_result(), invented_result(1.0, shift=-0.06)],
    "several drafters": [invented_result(drafters=(EAGLE, PROMPT_LOOKUP))],
    "single slice": [invented_result(slices={"chat": 0.5})],
    "many slices": [invented_result(slices={f"slice number {i}": 0.4 + 0.02 * i for i in range(20)})],
    "no slices": [
        replace(invented_result(), drafters={EAGLE: DrafterResult(invented_measures(EAGLE, 0.6, "overall", 3), {})})
    ],
    "nothing measured": [bare_result()],
    "measured and not": [invented_result(), bare_result()],
    "no drafters": [replace(invented_result(), drafters={})],
}

SCRIPT = (Path(report.__file__).parent / "templates" / "report.js").read_text(encoding="utf-8")
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects text, ids and everything that could load or run something."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.active: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in {"script", "iframe", "object", "embed", "link", "img", "image", "use", "form"}:
            self.active.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in {"href", "src", "srcset", "xlink:href", "action", "data", "poster"}:
                self.links.append(value or "")
            if name.startswith("on") or name == "style":
                self.active.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("case", CASES)
def test_html_stands_alone_and_its_pictures_tell_their_numbers_in_words(case: str) -> None:
    html = render_html(CASES[case])
    page = Page(html)
    assert page.active == ["script"]
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in html
    assert "url(" not in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        root = ElementTree.fromstring(svg)
        width, height = (float(v) for v in (root.get("viewBox") or "").split()[2:])
        assert root.get("class") != "plot" or (root.get("role") == "img" and len(root.get("aria-label") or "") > 10)
        for shape in root.iter("rect"):
            assert 0 <= float(shape.get("x", 0)) <= float(shape.get("x", 0)) + float(shape.get("width", 0)) <= width
            assert 0 <= float(shape.get("y", 0)) <= height
    text = " ".join(page.text).replace(SCRIPT, "")
    for leak in ("None", "nan", "inf ", "Undefined", "Piece(", "{{", "{%"):
        assert leak not in text, leak


def test_same_results_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_report([invented_result()], tmp_path / folder)
    first, second = ({p.name: p.read_text(encoding="utf-8") for p in (tmp_path / f).iterdir()} for f in ("a", "b"))
    assert first == second == {"report.html": render_html(CASES["one"]), "report.md": render_markdown(CASES["one"])}


@pytest.mark.parametrize("case", CASES)
def test_markdown_tables_have_as_many_cells_as_columns(case: str) -> None:
    lines = render_markdown(CASES[case]).splitlines()
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"\|( -+:? \|)+", line)]
    assert heads
    for i in heads:
        count = len(re.findall(r"(?<!\\)\|", lines[i]))
        assert lines[i - 1].startswith("|")
        assert lines[i - 2] == ""
        for line in [lines[i - 1], *lines[i + 1 : lines.index("", i)]]:
            assert len(re.findall(r"(?<!\\)\|", line)) == count, line


def test_right_answers_of_a_lossy_drafter_stand_beside_the_targets() -> None:
    result = invented_result(slices={"chat": 0.5})
    assert "Answers against references" not in render_markdown([result])
    drafter = result.drafters[EAGLE]
    json = {"valid_json": 0.5, "valid_json_baseline": 1.0, "json_answers": 6}
    judged = replace(drafter.overall, exact_match=0.25, exact_match_baseline=0.75, referenced=8, **json)
    result = replace(result, drafters={EAGLE: replace(drafter, overall=judged)})
    assert "| overall | eagle3 | 8 | 25.0% | 75.0% |" in render_markdown([result])
    assert "| overall | eagle3 | 6 | 50.0% | 100.0% |" in render_markdown([result])
    for caption in ("Answers against references", "Answers that are valid JSON"):
        assert caption in render_html([result])


def test_acceptance_by_context_is_shown_and_a_fall_past_the_trained_length_stands_in_the_headline() -> None:
    result = invented_result(slices={"chat": 0.5})
    drafter = replace(result.drafters[EAGLE], draft=DraftInfo(EAGLE, K, K, trained_length=4096))
    few, many = drafter.overall.training_split or ()
    split = (few, replace(many, rounds=few.rounds))
    drafter = replace(drafter, overall=replace(drafter.overall, training_split=split))
    result = replace(result, drafters={EAGLE: drafter})
    html, markdown = render_html([result]), render_markdown([result])
    assert "| eagle3 | 64 to 127 | 9 | 1.23 | 10 | 1.23 |" in markdown
    assert "| chat | eagle3 | 64 to 127 | 9 | 1.23 | 10 | 1.23 |" in markdown
    assert f"| eagle3 | past 4,096 | {few.rounds} | 1.23 | – | – |" in markdown
    (warning,) = result.warnings
    assert "4,096 tokens" in warning
    for page in (html, markdown):
        assert f"Warning: {warning}" in page


def test_the_numbers_given_are_the_numbers_shown() -> None:
    results = CASES["two temperatures"]
    for page in (render_html(results), render_markdown(results)):
        for result in results:
            for m in [result.drafters[EAGLE].overall, *result.drafters[EAGLE].slices.values()]:
                speeds = [f"{m.decode_tok_s:.0f}", f"{m.speedup:.2f}×", f"{m.tau:.2f}"]
                for number in [*speeds, "0.0012", "21.3 ms", "8.70 ms", "6.10 ms", result.command]:
                    assert number in page, number


def test_every_number_stands_in_its_own_row() -> None:
    """Two drafters at two temperatures: a value in the wrong row or column is caught."""
    pair = (EAGLE, PROMPT_LOOKUP)
    results = [invented_result(drafters=pair), invented_result(1.0, drafters=pair, shift=-0.06)]
    lines = render_markdown(results).splitlines()
    for result, label in zip(results, ("T=0", "T=1"), strict=True):
        speed = lines.index(f"<details><summary>Decoding per slice, {label}</summary>")
        for name in pair:
            for where, m in result.drafters[name].slices.items():
                low, high = m.speedup_spread or (0, 0)
                row = f"| {where} | {name} | {m.tau:.2f} ({m.tau - 0.13:.2f} to {m.tau + 0.12:.2f}) | {m.speedup:.2f}× ({low:.2f}× to "
                assert sum(line.startswith(row) for line in lines[speed : speed + 30]) == 1, row
                system, split = f"| {where} | {name} · {label} |", m.ms_per_round or MsPerRound()
                assert f"{high:.2f}×)" in next(line for line in lines[speed:] if line.startswith(row))
                rows = [line for line in lines if line.startswith(system)]
                alphas = " | ".join(f"{100 * a:.1f}%" for a in m.alpha_at or () if a is not None)
                ats = " | ".join(f"{100 * a:.1f}%" for a in m.acceptance_at or () if a is not None)
                taus = " | ".join(f"{p.tau_simulated:.2f}" for p in m.k_sweep or ())
                sizes = " | ".join(f"{one:.2f}" for one in (m.budget_sweep or {}).values())
                gains = " | ".join(f"{p.predicted_speedup:.2f}×" for p in m.k_sweep or ())
                parts = " | ".join(significant(v) for v in (split.draft, split.verify, split.commit, split.other))
                ends = f"{m.ideal_speedup:.2f}× | {m.speedup:.2f}× | 87% |"
                counts = f"{m.prompts} | {m.tokens:,} | {m.rounds:,} | {m.tau:.3f} | {m.tau_simulated:.3f} | -0.004 ± 0.031 |"
                for text in (
                    f"{system} {alphas} |",
                    f"{system} {ats} |",
                    f"{system} {taus} |",
                    f"{system} {sizes} |",
                    f"{system} {counts}",
                ):
                    assert sum(row.startswith(text) for row in rows) == 1, text
                assert f"{system} {gains} | {best_k(m)} |" in rows
                assert any(row.startswith(f"{system} {parts} |") and row.endswith(ends) for row in rows)
                gone = len(m.lossless.first_divergences) if m.lossless else 0
                assert (
                    f"{system} float32 | {m.prompts} | {m.prompts - gone} | {gone} | {m.tau:.6f} | {m.tau:.6f} |"
                    in rows
                )


def test_pictures_draw_the_numbers_where_they_belong() -> None:
    html = render_html([invented_result(drafters=(EAGLE, PROMPT_LOOKUP))])
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="plot".*?</svg>', html, re.DOTALL)]
    bars = next(plot for plot in plots if (plot.get("aria-label") or "").startswith("Speedup."))
    rects = [float(rect.get("width", 0)) for rect in bars.iter("rect")]
    drafters = invented_result(drafters=(EAGLE, PROMPT_LOOKUP)).drafters
    speedups = [d.overall.speedup for d in drafters.values()]
    for name in ALPHAS:
        speedups += [d.slices[name].speedup for d in drafters.values()]
    assert rects == pytest.approx([rects[0] * (s or 0) / (speedups[0] or 1) for s in speedups], abs=0.2)
    curve = next(plot for plot in plots if (plot.get("aria-label") or "").startswith("math, by draft position"))
    first = next(path.get("d") or "" for path in curve.iter("path") if path.get("class") == "line")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", first)]
    alphas = drafters[EAGLE].slices["math"].alpha_at or ()
    top, bottom = (sorted(float(line.get("y1", 0)) for line in curve.iter("line"))[i] for i in (0, -1))
    assert heights == pytest.approx([bottom - (a or 0) * (bottom - top) for a in alphas], abs=0.1)


def test_summary_in_plain_words() -> None:
    result = CASES["one"][0]
    m = result.drafters[EAGLE].overall
    text = render_markdown([result])
    assert f"Each target pass writes {m.tau:.2f} tokens on average, from" in text
    assert f"decoding is {m.speedup:.2f}× as fast as the target alone on this machine" in text
    assert "59 of 60 greedy answers checked in float32 equal the target's own; the others are listed below." in text
    assert "Beware: 14% of the json answers run in loops" in text
    assert f"K = {best_k(m)} is the best draft length" in text
    slow = replace(result, drafters={EAGLE: DrafterResult(replace(m, speedup=0.8), {})})
    assert "decoding is 0.80× as fast as the target alone on this machine, that is slower" in render_markdown([slow])


def test_simulation_only_is_labelled() -> None:
    m = Measures(
        prompts=5, tau_simulated=2.5, alpha_at_simulated=(0.9, 0.8), k_sweep=(SweepPoint(1, 1.9), SweepPoint(2, 2.5))
    )
    text = render_markdown([replace(invented_result(), drafters={EAGLE: DrafterResult(m, {})})])
    assert "would write, by simulation, 2.50 tokens" in text
    assert "2.50 simulated" in text
    assert "By simulation, as nothing was decoded: eagle3." in text
    assert "no best K is given" in text


@pytest.mark.parametrize("missing", [name for name in Measures.__dataclass_fields__ if name != "prompts"])
def test_any_single_number_may_be_missing(missing: str) -> None:
    result = invented_result()
    drafter = result.drafters[EAGLE]
    slices = {name: replace(m, **{missing: None}) for name, m in drafter.slices.items()}
    results = [replace(result, drafters={EAGLE: DrafterResult(replace(drafter.overall, **{missing: None}), slices)})]
    Page(render_html(results))
    assert "None" not in render_markdown(results)
    headline_table(results)


def test_worked_example_shows_rounds_and_positions() -> None:
    html, markdown = render_html([invented_result()]), render_markdown([invented_result()])
    assert "def│ add(a,│ b):│\n    return a + b\n" in markdown
    first = """<span class="round"><span class="own" title="the target&#39;s own">def</span></span>"""
    assert (
        first.replace("&#39;", "'") + '<span class="round"><span class="token p0" title="accepted at draft position 1">'
        in html
    )
    told = re.findall(r"<li>(.*?)</li>", html[html.index('class="told"') : html.index("</ol>")])
    assert [unescape(line) for line in told][:3] == [
        "none accepted; the target's own: 'def'",
        "3 accepted: ' add', '(', 'a'; the target's own: ','",
        "1 accepted: ' b'; the target's own: '):'",
    ]


def test_labels_tell_results_apart() -> None:
    base = invented_result()
    half = replace(base, settings=replace(base.settings, dtype="bfloat16"))
    assert [s.label for s in view_of([base]).systems] == ["eagle3"]
    assert [s.label for s in view_of([base, invented_result(1.0)]).systems] == ["eagle3 · T=0", "eagle3 · T=1"]
    assert [s.label for s in view_of([base, half]).systems] == ["eagle3 · T=0, float32", "eagle3 · T=0, bfloat16"]
    assert [s.label for s in view_of([base, base]).systems] == ["eagle3 · T=0, result 1", "eagle3 · T=0, result 2"]


def test_best_k_is_the_largest_predicted_speedup_and_the_shortest_of_equals() -> None:
    rng = random.Random(0)
    for _ in range(200):
        gains = [rng.choice([None, 1.0, 1.2, 1.4]) for _ in range(6)]
        m = Measures(prompts=1, k_sweep=tuple(SweepPoint(k + 1, 2.0, 0.5, gain) for k, gain in enumerate(gains)))
        known = [gain for gain in gains if gain is not None]
        assert best_k(m) == (gains.index(max(known)) + 1 if known else None)


def test_no_results_is_a_users_mistake() -> None:
    for render in (render_html, render_markdown, headline_table):
        with pytest.raises(UserError, match="at least one result"):
            render([])


def test_no_figure_is_cut_on_a_narrow_terminal_beside_a_long_name() -> None:
    result = invented_result()
    drafter = result.drafters[EAGLE]
    long = replace(result, drafters={"suffix decoding, alpha 2.0, after answers.jsonl": drafter})
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=None).print(headline_table([long]))
    text, overall = stream.getvalue(), drafter.overall
    assert f" {overall.tau:.2f} " in text
    assert f" {overall.speedup:.2f}× " in text
    assert "…" not in text


def test_terminal_table() -> None:
    results = CASES["two temperatures"]
    stream = io.StringIO()
    Console(file=stream, width=140, color_system=None).print(headline_table(results))
    text = stream.getvalue()
    for result in results:
        overall = result.drafters[EAGLE].overall
        assert f"{overall.tau:.2f}" in text
        assert f"{overall.speedup:.2f}×" in text
        taus = sorted((m.tau, name) for name, m in result.drafters[EAGLE].slices.items() if m.tau is not None)
        assert f"{taus[0][0]:.2f} {taus[0][1]} to {taus[-1][0]:.2f} {taus[-1][1]}" in text
    assert len(text.splitlines()) == 5 + 2, "a line for each system"


def test_significant() -> None:
    values = (None, 0.0, 0.12345, 1.2345, 12.345, 123.45, 12345.6)
    assert [*map(significant, values)] == ["–", "0.000", "0.123", "1.23", "12.3", "123", "12,346"]


def test_markdown_escapes() -> None:
    assert markdown_cell("a|b\nc<d>`e`") == "a\\|b c&lt;d&gt;\\`e\\`"
    assert fenced("x ```` y") == "`````text\nx ```` y\n`````"


def test_rounds_that_reached_a_position_are_those_that_drafted_there() -> None:
    """Of 100 rounds 40 drafted a second token, and 20 of these were accepted."""
    measures = Measures(5, rounds=100, acceptance_at=(1.0, 0.2), alpha_at=(1.0, 0.5))
    assert [_reached(measures, width) for width in (1, 2)] == [100, 40]
    assert _reached(replace(measures, alpha_at=(1.0, 0.0), acceptance_at=(1.0, 0.0)), 2) is None
