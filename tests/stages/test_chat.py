"""`draftsmith chat` on a miniature target: what it writes is what the decoder gives, and mistakes end in a sentence."""

import io
import os
import pty
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.cli.main import main
from draftsmith.data.conversations.show import LiveAnswer, printable
from draftsmith.data.conversations.templates import render_prompt
from draftsmith.decoder.answers import Decoded, Generation, Request, Round, tally_generation
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.errors import UserError
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.chat import ALONE_TOKENS, Chat, converse, describe
from draftsmith.stages.session import Session
from tests.helpers import GEMMA, hearing_signals
from tests.models import save_tiny_target
from tests.workplace import digests, fails, make_workplace

pytestmark = pytest.mark.full

FIGURES = r"\[(\d+) tokens?, [\d.e+]+ tok/s, tau ([\d.]+), (≈ )?[\d.]+x the target alone \(([^()]*)\)([^\]]*)\]"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained EAGLE-3 head in `run`."""
    torch.set_num_threads(1)
    folder = make_workplace(tmp_path_factory.mktemp("chat"))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"output_dir": str(folder / "run")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--recipe", str(folder / "recipe.yaml")]) == 0
    return folder


def words(workplace: Path, *more: str) -> list[str]:
    return ["chat", "--recipe", str(workplace / "recipe.yaml"), *more]


def make_chat(workplace: Path, *more: str, **how: Any) -> Chat:
    return Chat(Session(parse_recipe(words(workplace, *more)[1:])), **how)


@pytest.fixture(scope="module")
def shared(workplace: Path) -> Chat:
    return make_chat(workplace)


@pytest.fixture
def chat(shared: Chat) -> Chat:
    """A chat at temperature 0 that has no turns yet."""
    shared.reset()
    return shared


def prompt_of(chat: Chat, *turns: str) -> list[int]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return render_prompt(chat.session.tokenizer, messages)


def decoded_alone(chat: Chat, ids: list[int], most: int) -> Generation:
    return decode_batch(chat.target, TargetAlone(), [Request("x", "x", tuple(ids), most)], chat.sampling).generations[0]


@pytest.mark.parametrize("how", [(), ("--evaluate.drafts", '[{"tree": "dynamic"}, {"tree": "chain"}]')])
def test_one_prompt_gives_what_the_decoder_gives(
    how: tuple[str, ...], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(workplace / "run")
    assert main(words(workplace, "--prompt", " chat question 7: why 49? ", *how)) == 0
    told = capsys.readouterr()
    chat = make_chat(workplace, *how)
    expected = decoded_alone(chat, prompt_of(chat, "chat question 7: why 49?"), 16)
    capsys.readouterr()
    answer = chat.ask("chat question 7: why 49?")
    assert answer.output_ids == expected.output_ids
    shown = capsys.readouterr()
    text = chat.session.tokenizer.decode(expected.output_ids, skip_special_tokens=True)
    assert told.out == shown.out == f"{printable(text)}\n"  # plain, and nothing but the answer
    found = re.search(FIGURES, told.err)
    assert found
    tokens, tau, about, compared, cut = found.groups()
    assert int(tokens) == len(expected.output_ids) == 16
    assert float(tau) == pytest.approx(tally_generation(answer, 6).tau, abs=0.006)
    assert about is None  # short enough to be compared as a whole
    assert compared.endswith("tok/s, the same text")
    assert cut == "; cut at evaluate.max_new_tokens (16)"
    way = "eagle3 dynamic .* drafting 6" if how else "eagle3 drafting 3"
    assert re.search(f"target, {way} tokens ahead, temperature 0\n", told.err)
    assert digests(workplace / "run") == before


def test_a_conversation_keeps_its_turns_until_it_is_reset(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(workplace, system="You are a helpful assistant.")
    answers: list[Generation] = []
    ask = chat.ask
    monkeypatch.setattr(chat, "ask", lambda question: answers.append(ask(question)))
    typed = "number 1?\n\n  number 2?\n/reset\nnumber 1?\n/exit\nnumber 3?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    converse(chat)
    first, second, anew = (list(answer.request.prompt_ids) for answer in answers)
    turns = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "number 1?"}]
    text = chat.session.tokenizer.decode(answers[0].output_ids, skip_special_tokens=True)
    assert first == anew == render_prompt(chat.session.tokenizer, turns)
    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "number 2?"}]
    assert second == render_prompt(chat.session.tokenizer, turns)
    assert len(chat.messages) == 3
    told = capsys.readouterr()
    assert told.out.startswith(f"{printable(text)}\n")
    assert len(re.findall(FIGURES, told.err)) == 3


def test_lines_that_begin_with_a_slash(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\x1b\n/etc/hosts says what?\n"))
    converse(chat)
    err = capsys.readouterr().err
    assert r"There is no /quit\x1b: /reset begins anew, /exit or Ctrl-D ends" in err
    assert chat.messages[0]["content"] == "/etc/hosts says what?"
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input, which is closed"):
        converse(chat)


def test_a_full_context_drops_the_turn(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")  # figures are what a chat is for
    chat = make_chat(workplace, "--evaluate.max_new_tokens", "300")
    with pytest.raises(UserError, match=r"no room for an answer within the 253 .* dropped; ask in fewer words"):
        chat.ask("why? " * 100)
    assert chat.messages == []
    chat.ask("chat question 1: why 7?")
    assert "; cut, as the context of 253 tokens is full: /reset begins anew]" in capsys.readouterr().err
    before = list(chat.messages)
    with pytest.raises(UserError, match=r"this turn is dropped; /reset begins anew"):
        chat.ask("and 8?")
    assert chat.messages == before
    chat.reset()
    assert chat.messages == []


def test_long_answers_are_compared_in_part_unless_asked(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--evaluate.max_new_tokens", "60")
    found = {}
    for compare in (False, True):
        answer = make_chat(workplace, *long, compare=compare).ask("number 1?")
        assert len(answer.output_ids) == 60
        found[compare] = re.search(FIGURES, capsys.readouterr().err)
    part, whole = found[False], found[True]
    assert part
    assert part[3] == "≈ "
    assert part[4].endswith(f"tok/s in {ALONE_TOKENS} tokens, the same text")
    assert whole
    assert whole[3] is None
    assert whole[4].endswith("tok/s, the same text")


def test_sampled_answers_change_from_question_to_question_and_not_from_run_to_run(workplace: Path) -> None:
    answers = []
    for _ in range(2):
        chat = make_chat(workplace, temperature=1.0)
        assert chat.sampling.temperature == 1
        for _ in range(2):
            chat.reset()
            answers.append(chat.ask("number 1?").output_ids)
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


@hearing_signals()
def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    workplace: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put, seen = LiveAnswer.put, list[int]()

    def pressed(self: LiveAnswer, token: int, position: int | None) -> None:
        put(self, token, position)
        seen.append(token)
        if len(seen) == 4:
            signal.raise_signal(number)

    monkeypatch.setattr(LiveAnswer, "put", pressed)
    number = signal.SIGINT
    answer = chat.ask("number 1?")
    assert answer.output_ids == seen
    assert 4 <= len(seen) < 16
    assert len(chat.messages) == 2
    assert "; interrupted]" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    number = signal.SIGTERM
    seen.clear()
    assert main(words(workplace, "--prompt", "number 1?")) == 143


def test_every_token_is_told_with_its_draft_position(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[int, int | None]]()
    monkeypatch.setattr(LiveAnswer, "put", lambda self, token, position: told.append((token, position)))
    answer = chat.ask("chat question 7: why 49?")
    assert [token for token, _ in told] == answer.output_ids
    positions: list[int | None] = [None]
    for round_ in answer.rounds:
        positions += [*range(1, round_.accepted + 1), None]
    assert [position for _, position in told] == positions[: len(told)]
    assert any(round_.accepted for round_ in answer.rounds)


def decoded(count: int, seconds: float, rounds: int = 1) -> Decoded:
    answer = Generation(Request("x", "x", (1,), 99), list(range(count)), "eos", [Round(0, 3, 2)] * rounds)
    return Decoded([answer], {"ttft": 5.0, "draft": 0.25 * seconds, "verify": 0.75 * seconds})


def test_figures_in_words() -> None:
    fast, slow = decoded(41, 0.5), decoded(41, 1.0)
    assert describe(fast, 2.5, slow, comparable=True) == (
        "41 tokens, 80 tok/s, tau 2.50, 2.00x the target alone (40 tok/s, the same text)"
    )
    assert describe(fast, 2.5, decoded(11, 0.25), comparable=False) == (
        "41 tokens, 80 tok/s, tau 2.50, ≈ 2.00x the target alone (40 tok/s in 11 tokens)"
    )
    other = decoded(11, 0.25)
    other.generations[0].output_ids[3] = 77
    assert describe(fast, 2.5, other, comparable=True).endswith("in 11 tokens, its text differs)")
    assert describe(fast, 2.5, None, comparable=True) == "41 tokens, 80 tok/s, tau 2.50"
    assert describe(decoded(1, 0.0, 0), None, decoded(1, 0.0, 0), comparable=True) == "1 token"


def test_mistakes_end_in_a_sentence(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask, nowhere = ("--prompt", "hi"), str(tmp_path / "none")
    assert "There is no trained head in" in fails(words(workplace, *ask, "--output_dir", nowhere), capsys)
    assert not Path(nowhere).exists()
    assert "--head: there is no folder" in fails(words(workplace, *ask, "--head", nowhere), capsys)
    assert "--temperature is '-1': give 0 (greedy)" in fails(words(workplace, *ask, "--temperature", "-1"), capsys)
    assert "--prompt is empty" in fails(words(workplace, "--prompt", ""), capsys)
    assert "--prompt is empty" in fails(words(workplace, "--prompt", "  "), capsys)
    assert "--system is empty" in fails(words(workplace, *ask, "--system", "\n"), capsys)
    assert "--prompt holds bytes that are no UTF-8" in fails(words(workplace, "--prompt", "a\udcff"), capsys)
    assert "leaves no room for an answer" in fails(words(workplace, "--prompt", "why? " * 100), capsys)
    assert "--system" not in fails(words(workplace, "--system", "why? " * 100, *ask), capsys)
    assert "chat needs a recipe" in fails(["chat", *ask], capsys)
    tree = ("--evaluate.drafts", '[{"tree": "chain", "heads": ["other"]}]')
    assert "evaluate.drafts names no way to draft for the head" in fails(words(workplace, *ask, *tree), capsys)
    other = save_tiny_target(tmp_path / "other", "llama", hidden_size=32)
    for file in (workplace / "target").glob("*token*"):
        (Path(other) / file.name).write_bytes(file.read_bytes())
    for file in (workplace / "target").glob("*.jinja"):
        (Path(other) / file.name).write_bytes(file.read_bytes())
    head = ("--head", str(workplace / "run"), "--target.path", other)
    assert fails(words(workplace, *ask, *head), capsys)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (GEMMA, "cannot take messages of role 'system'"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}",
            "leaves the system text out: say it in your first question",
        ),
    ],
)
def test_a_template_without_system_texts(
    template: str, sentence: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (workplace / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    how = words(workplace, "--target.path", str(tmp_path), "--head", str(workplace / "run"), "--prompt", "hi")
    assert sentence in fails([*how, "--system", "Be brief."], capsys)


def read_until(terminal: int, mark: str, seconds: float = 300) -> str:
    """Return what comes out of a terminal up to `mark`, or to its end."""
    text, end = "", time.monotonic() + seconds
    while mark not in text:
        assert time.monotonic() < end, f"no {mark!r} in {text!r}"
        if select.select([terminal], [], [], 1)[0]:
            try:
                text += os.read(terminal, 4096).decode("utf-8", "replace")
            except OSError:  # how Linux says that the other side has gone
                return text
    return text


@pytest.mark.slow
def test_a_session_in_a_terminal(workplace: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job of a shell has ignored
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "200"}
        how = words(workplace, "--evaluate.max_new_tokens", "200")
        os.execve(sys.executable, [sys.executable, "-m", "draftsmith.cli.main", *how], environment)
    start = read_until(terminal, "\n> ")
    assert "drafting 3 tokens ahead, temperature 0" in start
    assert "plain: the target's own; accepted at draft position" in start
    os.write(terminal, b"chat question 7: why 49?\n")
    answered = read_until(terminal, "\n> ")
    assert re.search(FIGURES, answered)
    assert "\x1b[38;2;28;36;48;48;2;253;231;37m" in answered  # a token accepted at the first position
    os.write(terminal, b"/reset\nchat question 8: why 56?\n")
    assert "chat question 8" in read_until(terminal, "\x1b[0m")
    os.write(terminal, b"\x03")
    assert re.search(r"; (interrupted|cut[^\]]*)\]", read_until(terminal, "\n> "))
    told, end = "", time.monotonic() + 60
    while (
        "Ctrl-D ends" not in told
    ):  # input() misses a signal that comes between its prompt and its first look for keys
        assert time.monotonic() < end, told
        os.write(terminal, b"\x03")
        with suppress(AssertionError):
            told += read_until(terminal, "\n> ", seconds=3)
    os.write(terminal, b"\x04")
    read_until(terminal, "\0 that never comes")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
