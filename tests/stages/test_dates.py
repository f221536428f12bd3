"""Templates that print today's date: all texts of a run are of one day, so that it goes on after midnight, and grows later."""

import json
import re
from datetime import date, datetime, tzinfo
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.data.conversations.day import set_day
from draftsmith.data.conversations.templates import render_text
from tests.helpers import tiny_tokenizer
from tests.workplace import fails, make_workplace, options, save_untrained

pytestmark = pytest.mark.full
TEMPLATE = """Today: {{ strftime_now("%d %B %Y") }}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize(
    "begin", ["", "\n", "  ", " {% set a = 1 %}", "\t{#+ no #}", "\n\n {%- set a = 1 %}\n", "{{ 1 }}\n"]
)
def test_nothing_but_the_day_is_another(begin: str) -> None:
    """Whatever stands before it, and in any of its parts."""
    tokenizer, today = tiny_tokenizer(), datetime.now().date()
    rest = "{% macro m() %}{{ strftime_now('%A, %-d. %b %y') }}{% endmacro %}{% if strftime_now is defined %}{{ m() }}{% endif %}"
    tokenizer.chat_template = begin + rest + "\n{{ strftime_now('%Y-%m-%d, %H:%M') }}|{{ messages[0].content }}"
    asked = [{"role": "user", "content": "hello"}]
    plain = render_text(tokenizer, asked, generation_prompt=True)
    set_day(tokenizer, today)
    told = render_text(tokenizer, asked, generation_prompt=True)
    assert re.sub(r"\d\d:\d\d", "", told) == re.sub(r"\d\d:\d\d", "", plain)
    set_day(tokenizer, date(2026, 7, 1))
    told = render_text(tokenizer, asked, generation_prompt=True)
    assert told.endswith("Wednesday, 1. Jul 262026-07-01, 00:00|hello")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workplace(tmp_path_factory.mktemp("dates"))
    (folder / "dated.jinja").write_text(TEMPLATE)
    save_untrained(folder)
    return folder


def at(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command begin on a day in July."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 7, day, 12, tzinfo=tz)

    monkeypatch.setattr("draftsmith.stages.session.datetime", Clock)


def test_answers_grow_on_another_day(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*options(workplace, tmp_path / "run"), "--data.chat_template", str(workplace / "dated.jinja")]
    command = ["regenerate", *words, "--answers.max_new_tokens", "4", "--data.limit"]
    at(1, monkeypatch)
    assert main([*command, "6"]) == 0
    before = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    at(2, monkeypatch)
    capsys.readouterr()
    assert main([*command, "6"]) == 0
    assert "answers: reusing" in capsys.readouterr().err
    assert main([*command, "10"]) == 0
    after = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert len(after) == 10
    assert set(before) < set(after)
    begins = {tuple(json.loads(line)["prompt_ids"][:12]) for line in after}
    assert len(begins) == 1, "all of the first day"
    said = fails([*command, "10", "--data.date", "2026-07-05"], capsys)
    assert "data.date was '2026-07-01', is '2026-07-05'" in said
    other = [*command, "10", "--data.date", "2026-07-05", "--output_dir", str(tmp_path / "other")]
    assert main(other) == 0
    rows = [json.loads(line) for line in (tmp_path / "other" / "answers.jsonl").read_text().splitlines()]
    assert tuple(rows[0]["prompt_ids"][:12]) not in begins


def test_a_finished_evaluation_stays_so_on_the_next_day(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*options(workplace, tmp_path / "run"), "--data.chat_template", str(workplace / "dated.jinja")]
    command = ["evaluate", "--no-decode", *words, "--head", str(workplace / "head"), "--evaluate.temperatures", "[0.0]"]
    at(1, monkeypatch)
    assert main(command) == 0
    made = (tmp_path / "run" / "simulation" / "t0" / "result.json").read_bytes()
    at(2, monkeypatch)
    capsys.readouterr()
    assert main(command) == 0
    assert (tmp_path / "run" / "simulation" / "t0" / "result.json").read_bytes() == made


def test_a_day_that_no_text_tells_and_one_that_is_none_are_refused(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["regenerate", *options(workplace, tmp_path / "run")]
    assert "prints no date: leave it out" in fails([*words, "--data.date", "2026-07-05"], capsys)
    assert "data.date is 'today', which is no day: write it as" in fails([*words, "--data.date", "today"], capsys)
    assert not (tmp_path / "run").exists()
