"""Traces of what was drafted and accepted: ours against plain forwards, llama.cpp's counting against its loop, written out
plainly, and the comparison of two sides."""

import os
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.draft import DecodeState, Draft, TargetAlone
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import EngineAnswer, EngineRound, compare_answers, logit_gaps, trace_ours
from draftsmith.eval.engines.llama_cpp import (
    UNSEEN,
    LlamaServerProcess,
    ServerSettings,
    as_seen,
    counted_by_llama_cpp,
    read_rounds,
)
from draftsmith.target.target import Target
from tests.models import tiny_model

GREEDY = Sampling(temperature=0.0)
Chooser = Callable[[tuple[int, ...]], int]


@cache
def models() -> tuple[Target, Target]:
    """A target, and a copy with noise on its weights, some of whose drafts are accepted."""
    target, draft = (tiny_model("llama", num_hidden_layers=2) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, weight in zip(draft.parameters(), target.parameters(), strict=True):
            parameter.copy_(weight + 0.009 * torch.randn(weight.shape, generator=generator))
    return Target(target, path="target", fingerprint="0"), Target(draft, path="draft", fingerprint="1")


def best(model: Target, ids: list[int]) -> int:
    return int(model.head.logits(model.forward(torch.tensor([ids])).last[0, -1]).argmax())


@torch.no_grad()
def test_our_rounds_are_what_plain_forwards_draft() -> None:
    target, draft = models()
    requests = [Request(str(i), "s", tuple(range(7 + i, 20 + 2 * i)), 12) for i in range(3)]
    answers = trace_ours(target, DraftModel(draft, 3, 160, greedy_drafts=True), requests, GREEDY)
    for request, answer in zip(requests, answers, strict=True):
        text, drafted = [*request.prompt_ids, answer.output_ids[0]], 0
        for found in answer.rounds:
            guesses = list(text)
            for token in found.drafted:
                assert token == best(draft, guesses)
                guesses.append(token)
            for token in (*found.drafted[: found.accepted], None):
                if len(text) < len(request.prompt_ids) + len(answer.output_ids):
                    text.append(best(target, text))
                    assert token in (None, text[-1])
            drafted += len(found.drafted)
        assert tuple(text[len(request.prompt_ids) :]) == answer.output_ids
        assert answer.drafted == drafted
        assert answer.accepted == sum(r.accepted for r in answer.rounds)
    assert sum(a.accepted for a in answers) > 3
    assert any(r.accepted < len(r.drafted) for a in answers for r in a.rounds)


def test_padding_is_not_recorded() -> None:
    class Padded(TargetAlone):
        max_nodes = 4

        def propose(self, state: DecodeState) -> Draft:
            return Draft.chain(state.root_B, torch.tensor([[5, 6, 7]]), torch.tensor([2]))

    (found,) = trace_ours(models()[0], Padded(), [Request("a", "s", (5, 6), 5)], GREEDY)
    assert {r.drafted for r in found.rounds} == {(5, 6)}


def server_loop(target: Chooser, draft: Chooser, K: int, n_predict: int, ends: set[int]) -> EngineAnswer:
    """tools/server/server-context.cpp of llama.cpp for one slot at temperature 0: its names, its order."""
    tokens = [target(())]
    rounds = []
    while tokens[-1] not in ends and n_predict - len(tokens) > 0:
        n_draft_max = n_predict - len(tokens) - 1
        spec_draft: list[int] = []
        while n_draft_max > 0 and len(spec_draft) < K:
            spec_draft.append(draft((*tokens, *spec_draft)))
        spec_draft = spec_draft[:n_draft_max]
        # common_sampler_sample_and_accept_n
        ids: list[int] = []
        for i, token in enumerate(spec_draft):
            ids.append(target((*tokens, *ids)))
            if token != ids[-1] or (ids[-1] in ends and i + 1 < len(spec_draft)):
                break
        else:
            ids.append(target((*tokens, *ids)))
        if spec_draft:
            rounds.append(EngineRound(tuple(spec_draft), len(ids) - 1))
        for token in ids:
            tokens.append(token)
            if token in ends or len(tokens) == n_predict:
                break
    return EngineAnswer("x", tuple(tokens), tuple(rounds))


def our_loop(target: Chooser, draft: Chooser, K: int, limit: int, eos: int) -> EngineAnswer:
    """Our decoder for one row at temperature 0, as draftsmith.decoder.answers counts."""
    tokens, rounds = [target(())], []
    while tokens[-1] != eos and len(tokens) < limit:
        drafted: list[int] = []
        while len(drafted) < min(K, limit - len(tokens)):
            drafted.append(draft((*tokens, *drafted)))
        accepted = 0
        for token in (*drafted, None):
            tokens.append(target(tuple(tokens)))
            accepted += token == tokens[-1]
            if token != tokens[-1] or tokens[-1] == eos or len(tokens) == limit:
                break
        rounds.append(EngineRound(tuple(drafted), accepted))
    return EngineAnswer("x", tuple(tokens), tuple(rounds))


def test_llama_cpp_counts_by_its_own_loop() -> None:
    """Random texts over six tokens, two of which end an answer; drafts are right most of the time."""
    seen = {"shorter": 0, "eos": 0, "earlier": 0, "same": 0}
    for case in range(600):
        rng = random.Random(case)
        K, limit = rng.randint(1, 5), rng.randint(1, 14)
        text = [rng.choices(range(6), (1, 1, 9, 9, 9, 9))[0] for _ in range(40)]
        guess = [t if rng.random() < 0.7 else rng.randrange(6) for t in text]
        target, draft = (lambda s, t=line: t[len(s)] for line in (text, guess))
        ends = {0, 1} if case % 3 else {0}
        ours = our_loop(target, draft, K, limit, eos=0)
        theirs = server_loop(target, draft, K, limit, ends)
        assert counted_by_llama_cpp(ours, limit, ends) == theirs, case
        seen["same"] += ours == theirs
        seen["earlier"] += len(theirs.output_ids) < len(ours.output_ids)
        seen["shorter"] += theirs.drafted < ours.drafted
        seen["eos"] += (
            theirs.output_ids[-1] in ends and theirs.drafted == ours.drafted and theirs.accepted < ours.accepted
        )
    assert min(seen.values()) > 20, "every rule had something to do"


LOG = """\
0.00.184.061 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:     70 (   0.994) 'd'
0.00.184.087 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:    307 (   0.002) 'or'
0.00.184.235 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:    262 (   0.993) '
 a'
0.00.196.142 I slot   operator(): id  0 | task 0 | accepted  2/ 2 draft tokens
0.00.196.176 D slot   operator(): id  0 | task 0 | add accepted tokens: sampled=829, ids.size=3, n_draft=2
0.00.196.225 D slot   operator(): id  0 | task 0 | accepted 2/2 draft tokens, new n_tokens = 31
0.00.204.061 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:      5 (   0.994) 'd'
0.00.204.061 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:      6 (   0.994) 'd'
0.00.204.061 D spec        draft: truncating draft to 1 tokens
0.00.206.142 I slot   operator(): id  0 | task 0 | accepted  0/ 1 draft tokens
"""


def test_rounds_in_the_log_of_llama_server() -> None:
    assert read_rounds(LOG) == (EngineRound((70, 262), 2), EngineRound((5,), 0))
    assert read_rounds("") == ()
    hidden = read_rounds("I slot: accepted  2/ 3 draft tokens\n")
    assert hidden == (EngineRound((UNSEEN,) * 3, 2),)
    theirs, ours = EngineAnswer("a", (1, 2), hidden), EngineAnswer("a", (1, 2), (EngineRound((7, 8, 9), 2),))
    assert as_seen(ours, [theirs]) == theirs
    assert as_seen(ours, [ours]) == ours


def answer(
    name: str = "a", output: tuple[int, ...] = (1, 2, 3, 4), *rounds: tuple[tuple[int, ...], int]
) -> EngineAnswer:
    return EngineAnswer(name, output, tuple(EngineRound(*r) for r in rounds or (((2, 9), 1), ((4, 5), 1))))


def test_differences_are_found_where_they_begin() -> None:
    ours = answer()
    assert compare_answers([ours, answer("b")], [ours, answer("b")]) == []

    def kind(theirs: EngineAnswer) -> tuple[str, int]:
        (found,) = compare_answers([ours], [theirs], lambda *where: 0.5)
        assert ("0.5" in str(found)) == (found.gap is not None)
        return found.kind, found.place

    assert kind(answer("a", (1, 2, 7, 4))) == ("output", 2)
    assert kind(answer("a", (1, 2, 3))) == ("output", 3)
    assert kind(answer("a", (1, 2, 3, 4), ((2, 8), 1), ((4, 5), 1))) == ("drafts", 0)
    assert kind(answer("a", (1, 2, 3, 4), ((2, 9), 1), ((4, 5), 0))) == ("accepted", 1)
    assert kind(answer("a", (1, 2, 3, 4), ((2, 9), 1))) == ("rounds", 0)
    # A draft that differs before the token does is named; one behind it follows from it.
    assert kind(answer("a", (1, 2, 7, 4), ((2, 9), 1), ((8, 8), 1))) == ("output", 2)
    assert kind(answer("a", (1, 2, 3, 7), ((2, 9), 1), ((8, 8), 1))) == ("drafts", 1)
    assert kind(answer("a", (1, 2, 7, 4), ((2, 8), 1), ((4, 5), 1))) == ("drafts", 0)
    assert kind(answer("a", (1, 7, 3, 4), ((2, 9), 0), ((8, 8), 1))) == ("output", 1)
    (found,) = compare_answers([ours], [answer("a", (1, 2, 3, 4), ((2, 9), 1))])
    assert str(found) == "a: rounds: ours 2, theirs 1"
    with pytest.raises(AssertionError):
        compare_answers([ours], [answer("b")])


def test_logits_where_two_answers_part() -> None:
    target, _ = models()
    request = Request("a", "s", (5, 6, 7), 4)
    (ours,) = trace_ours(target, DraftModel(models()[1], 2, 160), [request], GREEDY)
    gap = logit_gaps(target, [request], [ours])
    logits_V = target.head.logits(target.forward(torch.tensor([[5, 6, 7, *ours.output_ids[:2]]])).last[0, -1])
    assert gap("a", 2, ours.output_ids[2], 11) == pytest.approx(float(logits_V.max() - logits_V[11]))


SERVER = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
if "broken.gguf" in words:
    sys.exit("error: failed to load model.")
print("print_info: EOG token             = 2 '<|im_end|>'\\nprint_info: EOG token             = 0 '</s>'", flush=True)
asked = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"build_info": "b7", "words": words, "pid": os.getpid(), "env": sorted(os.environ)}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [9]:
            return self.answer({{"error": "no nines"}}, 400)
        timings = {{}} if body["prompt"] == [8] else {{"draft_n": 2, "draft_n_accepted": 1}}
        if timings:
            print("draft candidate   0, pos   0:     70 (   0.9) 'd'")
            print("draft candidate   0, pos   1:     71 (   0.9) 'd'")
            print("accepted  1/ 2 draft tokens", flush=True)
        self.answer({{"tokens": body["prompt"] + [70, 2], "timings": timings, "body": body}})
    def answer(self, found, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *words):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(SERVER)
    path.chmod(0o755)
    return path


def test_the_server_is_started_asked_and_stopped(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_TEMP", "3")
    settings = ServerSettings(Path("t.gguf"), Path("d.gguf"), "draft-eagle3", num_speculative_tokens=3, context=64)
    with LlamaServerProcess(program, settings, tmp_path / "log") as server:
        assert server.version() == "b7"
        assert server.end_ids == (0, 2)
        for _ in range(2):
            found = server.complete("a", (5,), 4)
            assert found == EngineAnswer("a", (5, 70, 2), (EngineRound((70, 71), 1),))
        assert server.complete("b", (8,), 4) == EngineAnswer("b", (8, 70, 2), ())
        with pytest.raises(UserError, match="no nines"):
            server.complete("c", (9,), 4)
        started = server.http.ask("/props")
        body = server.http.post("/completion", {"prompt": [8]})["body"]
        assert body == {"prompt": [8]}
    words = started["words"]
    for flag, value in (("--spec-type", "draft-eagle3"), ("--spec-draft-n-max", "3"), ("-c", "64"), ("-md", "d.gguf")):
        assert words[words.index(flag) + 1] == value
    assert "LLAMA_ARG_TEMP" not in started["env"], "it would be a flag"
    with pytest.raises(ProcessLookupError):
        os.kill(started["pid"], 0)


def test_a_server_that_does_not_start(program: Path, tmp_path: Path) -> None:
    def start(program: Path, target: str, timeout: float = 60) -> str:
        with (
            pytest.raises(UserError) as caught,
            LlamaServerProcess(
                program, ServerSettings(Path(target), Path("d.gguf"), "s", 3, 64), tmp_path / "log", timeout
            ),
        ):
            pass
        return str(caught.value)

    assert "ended while it loaded: error: failed to load model (see" in start(program, "broken.gguf")
    assert "No such file" in start(tmp_path / "nothing", "t.gguf")
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    assert "was not ready after 0.2 seconds" in start(program, "t.gguf", 0.2)
