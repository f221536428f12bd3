"""Text of others is shown in one way: nothing in it commands a terminal, hides, or becomes HTML, Markdown or colours."""

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.cli.boundary import put, tell
from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.show import show_conversation
from draftsmith.errors import UserError, first_line, one_line, printable
from draftsmith.eval.gate.compare import compare_results
from draftsmith.eval.report.comparison import comparison_markdown, comparison_text
from draftsmith.eval.report.report import headline_table, render_html, render_markdown
from draftsmith.eval.results.result import Result, read_result
from draftsmith.stages.planning import plan_stage
from draftsmith.stages.session import say
from tests.helpers import tiny_tokenizer

HIDDEN = "\x1b[2J\x1b]0;t\x07\x9b1m\x08\u202e\u2066\u200b\u200d\ufeff\u2028\u061c\x7f\U000e0041"
ATTACK = f"{HIDDEN}[red]x[/red]<img src=x onerror=y>\r</p><b>`*<script>x()</script>[c](http://x)\n# h\n"
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "smollm2" / "eagle3"
DRAFTERS = json.loads((RESULTS / "t0" / "result.json").read_text(encoding="utf-8"))["drafters"].keys()


def attacked(value: Any, key: str = "") -> Any:
    """Return JSON with the attack behind every text and every name of a drafter, a slice or a fact."""
    if isinstance(value, str):
        return value if key in ("dtype", "method", "date") else value + ATTACK
    if isinstance(value, list):
        return [attacked(one, key) for one in value]
    if isinstance(value, dict):
        free = key in ("slices", "supplement", "versions", "prompts")
        return {name + ATTACK if free or name in DRAFTERS else name: attacked(one, name) for name, one in value.items()}
    return value


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Results and costs of a run, with the attack in every text."""
    folder = tmp_path_factory.mktemp(one_line("run"))
    found = []
    for path in (RESULTS / "t0" / "result.json", RESULTS / "costs.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        (folder / path.name).write_text(json.dumps(attacked(value)), encoding="utf-8")
        found.append(folder / path.name)
    return found


@pytest.fixture(scope="module")
def result(paths: list[Path]) -> Result:
    return read_result(paths[0])


def printed(what: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400, color_system=None).print(what)
    return stream.getvalue()


def check(text: str) -> None:
    """Assert that nothing is hidden in a text, and that it is there, written out."""
    assert not [one for one in text if not one.isprintable() and one not in "\n\t"], text
    assert r"\x1b" in text
    assert r"\u202e" in text


WAYS: dict[str, Callable[[Result], str]] = {
    "closing table": lambda result: printed(headline_table([result])),
    "comparison": lambda result: printed(comparison_text(compare_results(result, result, (ATTACK, ATTACK)))),
    "sentence": lambda result: str(UserError(f"{next(iter(result.drafters))} is wrong.")),
    "path": lambda result: one_line(Path(ATTACK)),
    "library": lambda result: first_line(ValueError(ATTACK)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_terminal_is_not_commanded(way: str, result: Result) -> None:
    text = WAYS[way](result)
    check(text)
    assert "[red]x[/red]<img" in text or way == "library", "shown as it is written"


@pytest.mark.parametrize("way", [say, tell, put], ids=["say", "tell", "put"])
def test_lines_of_progress_and_results_are_printable(
    way: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    way(f"costs: http://localhost, vLLM {ATTACK}")
    said = capsys.readouterr()
    check(said.out + said.err)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {"onerror", "onclick"} & {name for name, _ in attrs}
        self.tags.append(tag)


def test_a_report_holds_no_html_of_others(paths: list[Path], result: Result, tmp_path: Path) -> None:
    decision = plan_stage([result], paths[1], tmp_path)
    assert decision is not None
    page, markdown = render_html([result], decision), render_markdown([result], decision)
    check(page)
    check(markdown.replace("\\\\", "\\"))
    assert not {"img", "b"} & set(_Page(page).tags)
    assert _Page(page).tags.count("script") == 1, "its own"
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    assert set(_Page(outside).tags) <= {"details", "summary"}
    assert not re.search(r"^# h", outside, re.MULTILINE)
    assert "](http" not in re.sub(r"\\.", "", outside)
    text = comparison_markdown(compare_results(result, result, (ATTACK, ATTACK)))
    check(text.replace("\\\\", "\\"))
    assert "<" not in text


def test_a_conversation_is_shown_with_its_hidden_characters() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], **_: Any) -> str:
            return ATTACK

    sample = Tokenized(torch.tensor([1, 2]), torch.tensor([False, True]), ATTACK, ATTACK)
    stream = io.StringIO()
    show_conversation(sample, Tokenizer(), Console(file=stream, width=400, color_system=None))  # type: ignore[arg-type]
    check(stream.getvalue())
    assert stream.getvalue().count("\n# h") == 2, "lines of an answer stay lines"


@pytest.mark.parametrize(
    "words",
    [
        ["compare", f"{ATTACK}.json", "b.json"],
        ["report", f"{ATTACK}.json"],
        ["plan", "--recipe", f"{ATTACK}.yaml"],
        ["plan", "--recipe", "keys.yaml"],
        ["plan", "--recipe", "plain.yaml", f"--{ATTACK}", "1"],
        ["doctor", "--head", ATTACK, "--target", "."],
        [ATTACK],
    ],
    ids=lambda words: words[0][:9].strip(ATTACK) or "command",
)
def test_what_is_typed_or_read_is_echoed_in_plain_letters(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = json.dumps({"method": "eagle3", ATTACK: 1, "train": {ATTACK: 2}})
    Path("keys.yaml").write_text(recipe, encoding="utf-8")
    Path("plain.yaml").write_text("method: eagle3", encoding="utf-8")
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("draftsmith: ")
    check(said.err)
    assert said.err.count("\n") == 1


def test_what_is_harmless_stays() -> None:
    for text in ("Grüße, 東京\u3000と\u00a0مرحبا 👩\u200d👩\u200d👧 é", "a\tb\nc", "\U0001fae9 new, \ue000 private"):
        assert printable(text) == text
    assert printable("a\ud800b") == r"a\ud800b"
    assert printable("a\u200db\u200c") == r"a\u200db\u200c"
    assert one_line("a\tb\nc") == r"a\tb\nc"
    assert len(one_line("x" * 10_000)) < 210
    assert len(str(UserError("x" * 10_000 + ": lower it."))) < 2_100
    assert str(UserError("x" * 10_000 + ": lower it.")).endswith(": lower it."), "the remedy stays"
    tokenizer = tiny_tokenizer()
    assert printable(tokenizer.decode([1, 2, 3])) == tokenizer.decode([1, 2, 3])
