"""`draftsmith watch`: files that grow, a server on loopback that restarts, alarms with their codes, what is kept, and bad input."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.cli.main import main
from draftsmith.data.conversations.load import load_conversations
from draftsmith.errors import UserError
from draftsmith.eval.results.result import read_result
from draftsmith.eval.watch.follow import Event, FileSource, ServerSource
from draftsmith.eval.watch.keep import FILE, Keeper, redact
from draftsmith.eval.watch.sequential import LOW, Observation, Watched
from draftsmith.foreign.server import ModelServer
from tests.eval.engines.fake_server import Engine, serving
from tests.eval.ledger.test_ledger import LLAMA_LOG, llama, vllm, vllm_line

REPORT = Path(__file__).parents[3] / "docs/results/smollm2/eagle3/t0/result.json"
BASELINE = ["--baseline", "300"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answers(n: int, alpha: Callable[[int], float], start: int = 0, text: str = "an answer") -> Iterator[dict[str, Any]]:
    """Yield answers of vLLM to two slices in turns, of prompts that differ; one every ten seconds."""
    rng = np.random.default_rng(start)
    for i in range(start, start + n):
        p = alpha(i) * rng.uniform(0.8, 1.2)
        accepted = (rng.random((int(rng.integers(5, 60)), 3)) < p).cumprod(1).sum(1).tolist()
        record = vllm(accepted) | {"id": f"r{i}", "created": 1_700_000_000 + 10 * i, "slice": ("chat", "code")[i % 2]}
        record["choices"][0]["message"] = {"role": "assistant", "content": text}
        yield record | {"messages": [{"role": "user", "content": f"I am jo{i}@mail.org, call +49 170 1234567"}]}


def write(rows: Iterator[dict[str, Any]] | list[dict[str, Any]], mode: str = "w") -> None:
    with Path("answers.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def watch(*words: str) -> int:
    return main(["watch", *words])


def follow(*words: str) -> int:
    return watch("--records", "answers.jsonl", "--once", *BASELINE, *words)


def code_falls(i: int) -> float:
    return 0.5 if i % 2 and i > 1200 else 0.65


def test_a_fall_is_found_in_its_slice_alone_and_named_with_its_requests(capfd: pytest.CaptureFixture[str]) -> None:
    write(answers(2400, code_falls))
    assert follow("--prometheus", "w.prom") == 3
    out, err = capfd.readouterr()
    chat, code = sorted(out.splitlines())[::-1]
    assert chat.startswith("chat: 1,200 requests, tau ")
    assert "no alarm" in chat
    assert code.startswith("ALARM code: acceptance fell, tau ")
    assert "too low, so train" in code
    assert all(int(name[1:]) % 2 and int(name[1:]) > 1200 for name in code.rstrip(".").split("most by ")[1].split(", "))
    assert "a fall of 10% is seen within about" in err
    page = Path("w.prom").read_text()
    assert 'draftsmith_watch_alarm{slice="code",direction="low"} 1\n' in page
    assert 'draftsmith_watch_alarm{slice="chat",direction="low"} 0\n' in page
    assert 'draftsmith_watch_requests_total{slice="chat"} 1200\n' in page


def test_loops_are_too_high(capfd: pytest.CaptureFixture[str]) -> None:
    write(answers(800, lambda _: 0.5))
    write(answers(500, lambda _: 0.8, 800, "round and " * 20), "a")
    assert follow("--tag", "kind", "--report", str(REPORT)) == 4
    out, err = capfd.readouterr()
    assert "warning: all: tau of the first requests is 1.8" in err  # the report's head accepts less
    assert out.startswith("ALARM all: acceptance rose")
    assert "(repeats itself)" in out
    assert follow("--tag", "kind") == 4  # nothing new: the alarm stands


def test_a_baseline_of_loops_is_named_by_what_the_drafter_can_reach(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which may draft fewer tokens than the evaluation was asked for."""
    report = json.loads(REPORT.read_text())
    assert report["drafters"]["eagle3"]["draft"]["num_speculative_tokens"] == 3
    report["settings"]["num_speculative_tokens"] = 15
    (tmp_path / "result.json").write_text(json.dumps(report))
    write(answers(400, lambda _: 1.25))
    assert follow("--tag", "kind", "--report", "result.json") == 0
    assert (
        "nearly every drafted token of the first requests was accepted (tau 4.000 of at most 4)"
        in capfd.readouterr().err
    )


def test_a_file_that_grows_and_a_watch_that_is_ended_come_to_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    rows = list(answers(2400, code_falls))
    write(rows)
    follow()
    whole = capfd.readouterr().out
    Path("watch.json").unlink()
    write(rows[:500])
    assert follow() == 0
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path("answers.jsonl").write_text(text[: len(text) // 2])  # ends within a line
    assert watch("--records", "answers.jsonl", *BASELINE, "--requests", "1000", "--every", "0.05") == 0
    Path("answers.jsonl").write_text(text)
    capfd.readouterr()
    assert follow() == 3
    assert capfd.readouterr().out == whole


def test_worst_requests_are_kept_only_when_asked_and_redacted(tmp_path: Path) -> None:
    write(answers(700, lambda _: 0.6))
    assert follow() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".watch.json.lock", "answers.jsonl", "watch.json"]
    Path("watch.json").unlink()
    Path("mine.py").write_text(
        "def hook(text):\n    return None if 'jo7@' in text else text.replace('call', '[VERB]')\n"
    )
    assert follow("--keep", "kept", "--keep-limit", "5", "--redact", "mine:hook") == 0
    rows = [json.loads(line) for line in (tmp_path / "kept" / FILE).read_text().splitlines()]
    assert len(rows) == 5
    assert [row["lost"] for row in rows] == sorted((row["lost"] for row in rows), reverse=True)
    assert rows[0]["messages"][0]["content"] == "I am [EMAIL], [VERB] [NUMBER]"
    assert (tmp_path / "kept").stat().st_mode & 0o77 == 0
    assert len(load_conversations([str(tmp_path / "kept" / FILE)])) == 5
    # What is older than --keep-days goes, though nothing new comes.
    old = [row | {"kept_at": row["kept_at"] - 3} for row in rows[:2]] + rows[2:]
    (tmp_path / "kept" / FILE).write_text("".join(json.dumps(row) + "\n" for row in old))
    assert follow("--keep", "kept", "--keep-limit", "5", "--keep-days", "2") == 0
    assert [json.loads(line) for line in (tmp_path / "kept" / FILE).read_text().splitlines()] == rows[2:]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("postgres://admin:Tr0ub4dor&3@db.example.com/x", "postgres://[PASSWORD]@db.example.com/x"),
        ("https://user:p@ss!word@host.com", "https://[PASSWORD]@host.com"),
        ("redis://:pw@cache:6379", "redis://[PASSWORD]@cache:6379"),
        ("github_pat_11ABCDEFG0123456789_abcdefgh", "[KEY]"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic [KEY]"),
        ("from 2001:db8::8a2e:370:7334, at 12:30:45", "from [ADDRESS], at 12:30:45"),
        ("http://host:8000/a to me@host.org", "http://host:8000/a to [EMAIL]"),
        ("ghs_abcdefghijklmnop1234, glpat-abcdefghijklmnop1, ASIAABCDEFGHIJKLMNOP", "[KEY], [KEY], [KEY]"),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b", "a [KEY] b"),
        ("a skateboarding-competition", "a skateboarding-competition"),
        ("sk1234567890abcdefgh, AKIA-ABCDEFGHIJKLMNOP", "[KEY], [KEY]"),
    ],
)
def test_passwords_and_keys_go_whatever_stands_around_them(text: str, kept: str) -> None:
    assert redact(text) == kept


def test_of_requests_of_one_name_the_worst_stays(tmp_path: Path) -> None:
    """Without ids they are called by their lines, which begin anew in the next file."""
    record = {"messages": [{"role": "user", "content": "why?"}]}
    keeper = Keeper(tmp_path, 5, 9.0, None, lambda: 1.0)
    for tokens in (50.0, 149.0, 20.0):
        seen = Observation(100.0, tokens, 1.0, 1.0, "line 1", False, False)
        keeper.add({"all": [Event("all", seen, record)]}, {"all": 1.5})
    assert [(row["id"], row["lost"]) for row in keeper.rows] == [("line 1", 130.0)]


def test_redaction_knows_shapes_of_secrets() -> None:
    text = "a.b@c.de 10.0.0.1 sk-abcdefghijklmnop1234 https://me:pw@host/x Bearer abcdefghij 4111 1111 1111 1111 in 2026, 3.14"
    assert redact(text) == "[EMAIL] [ADDRESS] [KEY] https://[PASSWORD]@host/x Bearer [KEY] [NUMBER] in 2026, 3.14"


def counting(rounds: float, accepted: float, requests: float) -> str:
    numbers = {"drafts": rounds, "draft_tokens": 3 * rounds, "accepted_tokens": accepted}
    page = "".join(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {n}\n' for name, n in numbers.items())
    return f'{page}vllm:request_success_total{{finished_reason="stop"}} {requests}\n'


def test_a_server_that_restarts_is_followed_and_one_that_accepts_less_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rng, counts, polls, total = np.random.default_rng(0), np.zeros(3), iter(range(10_000)), np.zeros(3)

    def page(_: Engine) -> str:
        poll = next(polls)
        if poll == 150:
            counts[:] = 0
        rounds = int(rng.integers(300, 500))
        grown = np.array((rounds, rng.binomial(3 * rounds, 0.5 if poll < 400 else 0.35), 10))
        counts[:] += grown
        total[:] += grown * (poll > 0)
        return counting(*counts)

    monkeypatch.setattr(Engine, "page", page)
    monkeypatch.setattr("draftsmith.cli.watch.time.sleep", lambda _: None)
    with serving(Engine(model="path/SmolLM2"), 0) as url:
        words = ["--url", url, "--report", str(REPORT), "--model", "smollm2", "--baseline", "250"]
        assert watch(*words, "--requests", "2000") == 0
        known = json.loads(Path("watch.json").read_text())["slices"]["all"]
        assert [known["rounds"], known["tokens"], known["requests"]] == [total[0], total[:2].sum(), total[2]]
        assert watch(*words) == 3
    out, err = capfd.readouterr()
    assert "began to count anew" in err
    assert "ALARM all: acceptance fell, tau 2.0" in out
    assert "after 2.5" in out
    assert out.rstrip().endswith("newest ones.")


def test_what_a_server_cannot_tell_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    target = Path(read_result(REPORT).target.path).name
    for page, words, sentence in (
        (counting(5, 3, 1), ["--report", str(REPORT)], f"serves served, not .*{target}"),
        (None, [], "counts no drafts at /metrics"),
        ("sglang:spec_accept_length 2.5\n", [], "ratios or rounded sums of SGLang.*--records"),
    ):
        if page is not None:
            monkeypatch.setattr(Engine, "page", lambda _, page=page: page)
        with serving(Engine(metrics=page is not None), 0) as url:
            assert watch("--url", url, *words) == 2
        found = capfd.readouterr().err
        assert re.search(sentence, found)
        assert found.count("draftsmith: ") == 1


def test_a_clock_that_runs_backwards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "page", lambda _: counting(5, 3, 1))
    with serving(Engine(), 0) as url:
        times = iter((1000.0, 1000.5, 900.0))
        source = ServerSource(ModelServer(url, "--url"), now=lambda: next(times))
        assert (source.read(), source.read()) == ([], [])
        with pytest.raises(UserError, match="ran backwards, by 100 seconds"):
            source.read()


def test_a_log_of_llama_server_is_read_wherever_it_is_cut(tmp_path: Path) -> None:
    path, text = tmp_path / "server.log", "noise\n" * 30 + LLAMA_LOG + "noise\n" * 30
    for cut in range(0, len(text), 7):
        path.write_text(text[:cut])
        source = FileSource(path, per_day=100)
        seen = source.read()
        path.write_text(text)
        seen += source.read() + source.read()
        assert [(one.seen.rounds, one.seen.tokens) for one in seen] == [(24, 35), (24, 36)]
        assert [one.seen.at for one in seen] == [0.01, 0.02]


def test_a_log_of_vllm_tells_intervals_and_one_that_began_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(vllm_line(12, 24, [6, 4, 2]) + "\n" + vllm_line(14, 24, [6, 4, 4]) + "\n")
    source = FileSource(path, per_day=100)
    assert [(one.seen.rounds, one.seen.tokens, one.seen.interval) for one in source.read()] == [
        (8, 20, True),
        (8, 22, True),
    ]
    path.write_text(vllm_line(12, 24, [6, 4, 2]) + "\n")
    assert [one.seen.at for one in source.read()] == [0.03]


SGLANG_LINE = "[2026-11-20 10:00:00 TP0] Decode batch, #running-req: {}, #token: 9, accept len: {}, accept rate: 0.50, cuda graph: True\n"


def test_moments_without_a_request_are_no_observations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SGLang writes them while it is idle."""
    log = tmp_path / "answers.jsonl"
    log.write_text(SGLANG_LINE.format(0, "0.00") + SGLANG_LINE.format(3, "2.00") + SGLANG_LINE.format(3, "0.00"))
    (only,) = FileSource(log, per_day=100).read()
    assert (only.seen.rounds, only.seen.tokens) == (3, 6)
    assert watch("--records", "answers.jsonl", "--once", *BASELINE, "--per-day", "9") == 0
    assert "all: 1 intervals, tau 2.000" in capfd.readouterr().out
    nothing = "Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance rate: 0.000, 0.000"
    log.write_text(f"SpecDecoding metrics: {nothing}\n")
    assert FileSource(log, per_day=100).read() == []


def test_answers_behind_a_line_that_is_none_are_taken(capfd: pytest.CaptureFixture[str]) -> None:
    """Wherever the file is cut, also where a poll or the file begins with it."""
    path, rows = Path("answers.jsonl"), [json.dumps(row) + "\n" for row in answers(30, lambda _: 0.5)]
    broken = "Traceback (most recent call last):\n"
    for parts in ((rows[:10], [broken, *rows[10:]]), ([broken, *rows[:10]], rows[10:]), ([broken], rows)):
        path.write_text("")
        source, seen = FileSource(path), 0
        for part in parts:
            with path.open("a") as file:
                file.writelines(part)
            seen += len(source.read())
        assert seen == 30
        assert "Traceback" not in capfd.readouterr().out


def test_a_log_is_read_to_its_end_wherever_it_tells(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a server that is asked for its health for long, before and between its drafts."""
    monkeypatch.setattr("draftsmith.eval.watch.follow._CHUNK", 1 << 12)
    idle, tells = 'INFO: "GET /health HTTP/1.1" 200 OK\n' * 2000, vllm_line(12, 24, [6, 4, 2]) + "\n"
    Path("answers.jsonl").write_text(idle + 3 * tells + idle + 5 * tells)
    assert watch("--records", "answers.jsonl", "--once", *BASELINE, "--per-day", "9") == 0
    out, err = capfd.readouterr()
    assert "all: 8 intervals" in out
    assert err.count("lines of answers.jsonl tells of drafts: it is followed on") == 1
    Path("answers.jsonl").write_text("x" * 5000 + "\n" + tells)
    source = FileSource(Path("answers.jsonl"), per_day=9)
    assert len(source.read() + source.read()) == 1, "a line longer than a part does not hold it up"


GOOD = vllm([1, 2])
MADE = {"created": 1_700_000_000}


@pytest.mark.parametrize(
    ("lines", "words", "sentence"),
    [
        (["a poem"], [], "is no log that is known"),
        ([""] * 1001, [], "is no log that is known"),
        ([GOOD], [], "tells no times"),
        (
            ['{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}}]}'],
            [],
            "--per-request-spec-decode-metrics",
        ),
        ([GOOD | MADE, llama([1, 2]) | MADE], [], "mixes what vLLM and llama.cpp tell"),
        ([GOOD | MADE | {"slice": f"s{i}"} for i in range(60)], [], "more than 50 slices by 'slice'"),
        ([GOOD | MADE] * 300, [], "no time passed while the baseline of all came"),
        ([GOOD | MADE], ["--baseline", "5"], "too few to know acceptance by"),
        ([GOOD | MADE], ["--redact", "a:b"], "says something of --keep"),
        ([GOOD | MADE], ["--keep", "k", "--redact", "nowhere:f"], "--redact is nowhere:f, which is not there"),
        ([GOOD | MADE], ["--model", "m"], "says something of --url"),
        ([GOOD | MADE], ["--url", "http://x"], "either a server"),
        ([GOOD | MADE], ["--state", "answers.jsonl"], "--state is answers.jsonl, which has another ending"),
        ([GOOD | MADE], ["more"], "takes options alone"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_and_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], lines: list[Any], words: list[str], sentence: str
) -> None:
    Path("answers.jsonl").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    assert (
        watch("--records", "answers.jsonl", "--once", *(words if "--baseline" in words else [*BASELINE, *words])) == 2
    )
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert not list(tmp_path.glob("*.json"))


def test_a_damaged_line_is_left_out_and_a_state_of_another_source_refused(capfd: pytest.CaptureFixture[str]) -> None:
    rows = list(answers(20, lambda _: 0.5))
    write(rows[:10])
    with Path("answers.jsonl").open("a") as file:
        file.write('{"id": "cut of\n')
    write(rows[10:], "a")
    assert follow() == 0
    out, err = capfd.readouterr()
    assert out.count("the baseline has 10 of 300") == 2
    assert "warning: a line of --records is left out: answers.jsonl, line 11 is not JSON" in err
    Path("answers.jsonl").rename("others.jsonl")
    assert watch("--records", "others.jsonl", "--once") == 2
    assert "watch.json is about answers.jsonl, not others.jsonl" in capfd.readouterr().err
    assert LOW in Path("watch.json").read_text()


def test_calls_schemas_and_thoughts_are_kept_with_what_was_asked(tmp_path: Path) -> None:
    call = {"id": "4", "type": "function", "function": {"name": "mail", "arguments": '{"to": "jo@mail.org"}'}}
    asked = [
        {"role": "user", "content": "write to jo@mail.org"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "4", "content": "sent"},
    ]
    answer = {"role": "assistant", "content": "Done.", "reasoning_content": "jo@mail.org has it"}
    tools = [{"type": "function", "function": {"name": "mail", "parameters": {"type": "object"}}}]
    only_call = {"role": "assistant", "content": None, "tool_calls": [call]}
    keeper = Keeper(tmp_path, 5, 9.0, None, lambda: 1.0)
    for name, more in (
        ("a", {"messages": asked, "tools": tools, "choices": [{"message": answer}]}),
        ("b", {"messages": asked[:1], "tools": tools, "choices": [{"message": only_call}]}),
        ("c", {"choices": [{"message": answer}]}),
    ):
        seen = Observation(100.0, 110.0, 1.0, 1.0, name, False, False)
        keeper.add({"all": [Event("all", seen, more)]}, {"all": 1.5})
    whole, called = load_conversations([str(tmp_path / FILE)])
    assert "jo@mail.org" not in (tmp_path / FILE).read_text()
    assert whole.tools == called.tools == tuple(tools)
    assert [m["role"] for m in whole.messages] == ["user", "assistant", "tool", "assistant"]
    assert whole.messages[1]["tool_calls"][0]["function"]["arguments"] == {"to": "[EMAIL]"}
    assert whole.messages[3]["reasoning_content"] == "[EMAIL] has it"
    assert called.messages[1]["tool_calls"][0]["function"]["name"] == "mail"


def test_an_answer_that_comes_late_does_not_end_a_watch(capfd: pytest.CaptureFixture[str]) -> None:
    rows = list(answers(700, lambda _: 0.6))
    rows[500]["created"] -= 3 * 3600
    write(rows)
    assert follow() == 0
    assert (
        "line 501, was made 3.0 hours before one above it, and is taken to come with that one" in capfd.readouterr().err
    )


def test_a_watch_goes_on_with_the_clock_and_the_baseline_that_it_began_with(capfd: pytest.CaptureFixture[str]) -> None:
    write(answers(700, lambda _: 0.6))
    assert follow() == 0
    state = Path("watch.json").read_text()
    for words, what in (
        (["--per-day", "9600"], "--per-day is 9600.0, but watch.json was begun with None: give the same, name another"),
        (["--tag", "kind"], "--tag is kind, but watch.json was begun with slice"),
        (["--baseline", "500"], "--baseline is 500, but watch.json was begun with 300"),
    ):
        assert follow(*words) == 2
        assert what in capfd.readouterr().err
    assert Path("watch.json").read_text() == state


def test_what_a_call_passes_on_is_redacted_whatever_its_keys_are(tmp_path: Path) -> None:
    """The hook sees it, too."""
    seen = list[str]()
    passed = {"id": "b@c.de", "name": "Bob", "type": "4111 1111 1111 1111", "to": [{"role": "b@c.de"}]}
    passed |= {"card": 4111111111111111, "amount": 12.5, "sure": True, "none": None}
    call = {"id": "call-1", "type": "function", "function": {"name": "send_mail", "arguments": json.dumps(passed)}}
    asked = [
        {"role": "user", "name": "a@b.de", "content": [{"type": "text", "text": "hi a@b.de"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "name": "send_mail", "content": "sent"},
    ]
    told = {
        "name": "send_mail",
        "description": "Ask a@b.de",
        "parameters": {"properties": {"name": {"type": "string"}, "card": {"maximum": 9999999999999999}}},
    }
    record = {
        "messages": asked,
        "tools": [{"type": "function", "function": told}],
        "choices": [{"message": {"role": "assistant", "content": "Done."}}],
    }
    keeper = Keeper(tmp_path, 5, 9.0, lambda text: seen.append(text) or text, lambda: 1.0)  # type: ignore[func-returns-value]
    keeper.add({"all": [Event("all", Observation(100.0, 110.0, 1.0, 1.0, "a"), record)]}, {"all": 1.5})
    (row,) = keeper.rows
    assert "@" not in (tmp_path / FILE).read_text()
    user, called, answered, _ = row["messages"]
    assert (user["name"], user["role"]) == ("[EMAIL]", "user")
    (made,) = called["tool_calls"]
    assert (made["id"], made["function"]["name"], answered["name"]) == ("call-1", "send_mail", "send_mail")
    assert made["function"]["arguments"] == {
        "id": "[EMAIL]",
        "name": "Bob",
        "type": "[NUMBER]",
        "to": [{"role": "[EMAIL]"}],
        "card": "[NUMBER]",
        "amount": 12.5,
        "sure": True,
        "none": None,
    }
    assert {"Bob", "[NUMBER]", "Ask [EMAIL]", "Done."} <= set(seen)
    assert row["tools"] == [{"type": "function", "function": told | {"description": "Ask [EMAIL]"}}]


def test_sglang_is_followed_over_a_restart(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Until its first answer it shows no counter of drafts, or none but a gauge."""
    pages = [(40, 90, 10), (80, 180, 20), (), ("sglang:spec_accept_length 2.5\n",), (20, 45, 5)]

    def page(_: Engine) -> str:
        shown = pages.pop(0)
        names = ("spec_verify_calls", "generation_tokens", "num_requests")
        rows = [f'sglang:{name}_total{{a="b"}} {one}\n' for name, one in zip(names, shown, strict=False)]
        return "".join(rows) if len(shown) == 3 else "".join(shown)

    monkeypatch.setattr(Engine, "page", page)
    with serving(Engine(), 0) as url:
        times = iter(range(1, 9))
        source = ServerSource(ModelServer(url, "--url"), now=lambda: float(next(times)))
        seen = [[(one.seen.rounds, one.seen.tokens, one.seen.requests) for one in source.read()] for _ in range(5)]
    assert seen == [[], [(40, 80, 10)], [], [], [(20, 40, 5)]]
    assert capfd.readouterr().err.count("began to count anew") == 1


def test_a_log_that_shows_a_template_is_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.log"
    path.write_text("chat_template: {% for m in messages %}\n    {{- '<|im_start|>' }}\n{%- else %}\n")
    source = FileSource(path, per_day=100)
    assert source.read() == []
    path.write_text(path.read_text() + LLAMA_LOG)
    assert len(source.read()) == 2
    assert "left out" not in capfd.readouterr().err


def test_an_answer_that_is_half_written_is_read_when_it_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "answers.jsonl", "\n".join(json.dumps(row) for row in answers(3, lambda _: 0.5))
    source = FileSource(path, whole=True)
    path.write_text(text[:-9])
    assert len(source.read()) == 2
    path.write_text(text)
    assert len(source.read()) == 1
    assert "left out" not in capfd.readouterr().err


def test_the_baseline_of_intervals_is_tokens_over_rounds() -> None:
    """Though each weighs the root of its rounds in the test."""
    one = Watched(1.0, 200, 200)
    for n in range(200):
        busy = n % 2
        rounds, tau = (10_000.0, 3.0) if busy else (100.0, 2.0)
        one.take([Observation(rounds, rounds * (tau + 0.01 * (n % 3)), n / 100, 1.0, "", True)])
    assert one.baseline is not None
    assert one.baseline_tau == pytest.approx(one.tokens / one.rounds)
    assert one.baseline_tau > one.baseline.tau + 0.05
