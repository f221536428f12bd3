"""Everybody's acceptance from one set of counts, out of the lines and records that each engine writes."""

import json
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.eval.ledger.counts import LEDGER, Counts
from draftsmith.eval.ledger.sources import Told, read_source
from tests.eval.engines.fake_server import Engine, serving

K = 3
ANSWERS = [[0, 3, 1, 0], [2, 2], [0], [3, 0, 1, 1, 1]]
"""Accepted tokens of every round of four answers, K drafted in each."""
ROUNDS = sum(map(len, ANSWERS))
ACCEPTED = sum(map(sum, ANSWERS))


def histogram(accepted: list[int]) -> list[int]:
    return [accepted.count(length) for length in range(K + 1)]


def vllm(accepted: list[int]) -> dict[str, Any]:
    """vLLM's record of an answer, as its documentation shows it."""
    block = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / (K * len(accepted)),
        "acceptance_histogram": {str(j): n for j, n in enumerate(histogram(accepted)) if n},
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": K * len(accepted),
        "num_spec_tokens": K,
    }
    usage = {"completion_tokens": 1 + sum(accepted) + len(accepted)}
    return {"choices": [{"index": 0, "finish_reason": "stop", "speculative_decoding_stats": block}], "usage": usage}


def vllm_of_request(accepted: list[int]) -> dict[str, Any]:
    """The same under the name of other versions, the histogram a list."""
    record = vllm(accepted)
    block = record["choices"][0].pop("speculative_decoding_stats")
    return record | {"metrics": {"speculative_decoding": block | {"acceptance_histogram": histogram(accepted)}}}


def tensorrt(accepted: list[int]) -> dict[str, Any]:
    block = {
        "acceptance_rate": sum(accepted) / (K * len(accepted)),
        "acceptance_histogram": histogram(accepted),
        "num_spec_steps": len(accepted),
        "total_accepted_draft_tokens": sum(accepted),
        "total_draft_tokens": K * len(accepted),
        "num_spec_tokens": K,
    }
    usage = {"completion_tokens": 1 + sum(accepted) + len(accepted)}
    return {"choices": [{"index": 0, "finish_reason": "stop", "speculative_decoding": block}], "usage": usage}


def sglang(accepted: list[int], names: tuple[str, str, str]) -> dict[str, Any]:
    correct, proposed, lengths = names
    tokens = 1 + sum(accepted) + len(accepted)
    meta = {
        "completion_tokens": tokens,
        "spec_verify_ct": len(accepted),
        "spec_accept_length": tokens / len(accepted),
        correct: sum(accepted),
        proposed: K * len(accepted),
        lengths: histogram(accepted),
    }
    return {"text": "a", "meta_info": meta}


NAMES = (
    ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
    ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
)


def llama(accepted: list[int]) -> dict[str, Any]:
    tokens = 1 + sum(accepted) + len(accepted)
    return {"timings": {"predicted_n": tokens, "draft_n": K * len(accepted), "draft_n_accepted": sum(accepted)}}


def bench(accepted: list[int]) -> dict[str, Any]:
    return {"question_id": 1, "choices": [{"index": 0, "accept_lengths": [n + 1 for n in accepted]}]}


def told_by(tmp_path: Path, text: str) -> Told:
    (tmp_path / "source").write_text(text)
    return read_source(str(tmp_path / "source"))


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


RECORDS = {
    "vLLM": [vllm(one) for one in ANSWERS],
    "vLLM of a request": [vllm_of_request(one) for one in ANSWERS],
    "TensorRT-LLM": [tensorrt(one) for one in ANSWERS],
    **{f"SGLang, {names[0]}": [sglang(one, names) for one in ANSWERS] for names in NAMES},
    "llama.cpp": [llama(one) for one in ANSWERS],
    "Spec-Bench": [bench(one) for one in ANSWERS],
}


@pytest.mark.parametrize(("name", "as_list"), [*product(RECORDS, (False, True))])
def test_answers_of_every_engine_give_the_same_ledger(tmp_path: Path, name: str, as_list: bool) -> None:
    told = told_by(tmp_path, json.dumps(RECORDS[name], indent=1) if as_list else lines(RECORDS[name]))
    assert told.engine == name.split(",")[0].removesuffix(" of a request")
    assert [(one.rounds, one.accepted) for one in told.answers] == [(len(one), sum(one)) for one in ANSWERS]
    counts = told.counts
    assert counts.tau == 1 + ACCEPTED / ROUNDS
    assert counts.accepted_per_round == ACCEPTED / ROUNDS
    if name != "Spec-Bench":
        assert counts.acceptance_rate == ACCEPTED / (K * ROUNDS)
        assert counts.tokens_per_pass == (len(ANSWERS) + ACCEPTED + ROUNDS) / ROUNDS
    if name != "llama.cpp":
        every = [n for one in ANSWERS for n in one]
        at = [sum(n >= i for n in every) for i in range(K + 1)]
        assert counts.acceptance_at == tuple(n / ROUNDS for n in at[1:])
        assert counts.alpha_at == tuple(b / a for a, b in pairwise(at))


def test_a_histogram_may_be_shorter_than_another(tmp_path: Path) -> None:
    told = told_by(tmp_path, lines([bench([0, 0]), bench([2])]))
    assert told.counts.by_length == (2, 0, 1)
    assert (Counts(1, 0) + Counts(1, 1, 3)).drafted is None


def test_iterations_of_tensorrt_are_sums(tmp_path: Path) -> None:
    spec = {"numDraftTokens": 24, "numAcceptedTokens": 12, "numRequestsWithDraftTokens": 8, "acceptanceLength": 2.5}
    idle = {"numDraftTokens": 0, "numAcceptedTokens": 0, "numRequestsWithDraftTokens": 0, "acceptanceLength": 0.0}
    records = [{"iter": 1, "specDecodingStats": idle}, {"iter": 2, "specDecodingStats": spec}, {"iter": 3}]
    told = told_by(tmp_path, json.dumps(records))
    assert (told.engine, told.answers, told.counts.tau, told.counts.acceptance_rate) == ("TensorRT-LLM", (), 2.5, 0.5)


# From a run of llama-server: rounds are 36 - 1 - 11 and 37 - 1 - 12, five tokens drafted in each.
LLAMA_LOG = """
0.00.303.405 I slot print_timing: id  0 | task 0 | prompt eval time =      29.60 ms /    28 tokens (    1.06 ms per token)
0.00.303.417 I slot print_timing: id  0 | task 0 |        eval time =     170.81 ms /    36 tokens (    4.88 ms per token)
0.00.303.463 I slot print_timing: id  0 | task 0 | draft acceptance = 0.09167 (   11 accepted /   120 generated), mean len =  1.46
0.00.303.473 I slot print_timing: id  0 | task 0 |      acc per pos = (0.375, 0.083, 0.000, 0.000, 0.000)
0.00.507.552 I slot print_timing: id  0 | task 26 | prompt eval time =      21.80 ms /    25 tokens (    0.87 ms per token)
0.00.507.575 I slot print_timing: id  0 | task 26 |        eval time =     174.49 ms /    37 tokens (    4.85 ms per token)
0.00.507.613 I slot print_timing: id  0 | task 26 | draft acceptance rate = 0.10000 (   12 accepted /   120 generated)
"""


def test_the_log_of_llama_server_tells_every_answer(tmp_path: Path) -> None:
    told = told_by(tmp_path, LLAMA_LOG)
    assert told.engine == "llama.cpp"
    assert [(one.rounds, one.accepted, one.drafted) for one in told.answers] == [(24, 11, 120), (24, 12, 120)]
    assert told.answers[0].by_length == (15, 7, 2, 0, 0, 0)
    assert round(told.answers[0].tau or 0, 2) == 1.46


def vllm_line(accepted: int, drafted: int, at: list[int]) -> str:
    """A line in the words of vLLM's v1/spec_decode/metrics.py."""
    rounds = Fraction(drafted, len(at))
    rates = ", ".join(f"{float(n / rounds):.3f}" for n in at)
    return (
        f"INFO [metrics.py:100] SpecDecoding metrics: Mean acceptance length: {1 + float(accepted / rounds):.2f}, Accepted throughput: 1.20 "
        f"tokens/s, Drafted throughput: 3.60 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: "
        f"{rates}, Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%\n"
    )


def test_the_log_of_vllm_gives_back_its_counts(tmp_path: Path) -> None:
    told = told_by(tmp_path, vllm_line(7, 21, [4, 2, 1]) + "other\n" + vllm_line(131, 300, [80, 40, 11]))
    assert (told.counts.rounds, told.counts.accepted, told.counts.drafted) == (107, 138, 321)
    assert told.counts.by_length == (23, 42, 30, 12)
    assert (told.answers, told.counts.rounded) == ((), False)
    assert "off by default" in told.note


def test_a_line_of_drafts_of_several_lengths_is_read_as_printed(tmp_path: Path) -> None:
    line = vllm_line(100, 300, [60, 30, 10]).replace("Drafted: 300", "Drafted: 240")
    told = told_by(tmp_path, line)
    assert told.counts.rounded
    assert told.counts.tau == pytest.approx(2.0)
    assert told.counts.acceptance_rate == 100 / 240


def test_the_log_of_sglang_is_weighted_by_its_requests(tmp_path: Path) -> None:
    text = "[2026-11-20 10:00:00 TP0] Decode batch, #running-req: {}, #token: 9, accept len: {}, accept rate: {}, cuda graph: True\n"
    idle = text.format(0, "0.00", "0.00")
    told = told_by(tmp_path, idle + text.format(1, "3.00", "0.50") + text.format(3, "2.00", "0.25") + idle)
    assert (told.engine, told.counts.rounded) == ("SGLang", True)
    assert told.counts.tau == pytest.approx(2.25)
    assert told.counts.acceptance_rate == pytest.approx(5 / 16)


PAGE = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 2.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 11.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
"""
GAUGES = 'sglang:spec_accept_length{model_name="m"} 2.5\nsglang:spec_accept_rate{model_name="m"} 0.5\n'
SGLANG = f"""{GAUGES}sglang:spec_verify_calls_total{{model_name="m"}} 20.0
sglang:generation_tokens_total{{model_name="m"}} 53.0
sglang:num_requests_total{{model_name="m"}} 3.0
"""


@pytest.mark.parametrize(
    ("page", "rounded", "tau", "rate"),
    [
        (PAGE, False, 23 / 12, 11 / 36),
        (PAGE.replace("vllm:", "llamacpp:"), False, 23 / 12, 11 / 36),
        (GAUGES, True, 2.5, 0.5),
        (SGLANG, False, 50 / 20, None),
    ],
)
def test_a_running_server_is_asked_for_its_counters(
    monkeypatch: pytest.MonkeyPatch, page: str, rounded: bool, tau: float, rate: float | None
) -> None:
    monkeypatch.setattr(Engine, "page", lambda _: page)
    with serving(Engine(), 0) as url:
        told = read_source(url)
    assert told.counts.rounded == rounded
    assert (told.counts.tau, told.counts.acceptance_rate) == (pytest.approx(tau), pytest.approx(rate))
    assert told.note
    if "per_pos" in page:
        assert told.counts.by_length == (4, 5, 3)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("vllm:spec_decode_num_drafts_total 3.0\n", "counts no drafts"),
        (PAGE.replace(" 11.0", " NaN"), "counts NaN at /metrics"),
    ],
)
def test_counters_that_are_missing_or_no_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, page: str, words: str
) -> None:
    monkeypatch.setattr(Engine, "page", lambda _: page)
    with serving(Engine(), 0) as url, pytest.raises(UserError, match=words):
        read_source(url)


def test_a_server_without_drafts_and_one_without_counters_are_named() -> None:
    for engine in (Engine(), Engine("llama.cpp", 3), Engine(metrics=False)):
        with serving(engine, 0) as url, pytest.raises(UserError, match="counts no drafts at /metrics"):
            read_source(url)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a poem\n", "no log that is known"),
        ("", "no log that is known"),
        ('{"choices": [{"text": "a"}]}', "tells of no drafts"),
        (lines([vllm([1]), llama([1])]), "mixes answers of llama.cpp and vLLM"),
        (lines([vllm([1, 2])]).replace('"num_spec_steps": 2', '"num_spec_steps": 3'), "do not belong together"),
        (lines([vllm([1, 2])]).replace('"num_spec_steps": 2', '"num_spec_steps": 2.5'), "do not belong together"),
        (lines([llama([1, 2])]).replace('"predicted_n": 6', '"predicted_n": 3'), "do not belong together"),
        (lines([sglang([1], NAMES[0])]).replace("num_proposed", "num_other"), "do not belong together"),
        (lines([bench([1])]).replace("[2]", "[0]"), "do not belong together"),
        (lines([bench([1])]).replace("[2]", "[99999999]"), "do not belong together"),
        (lines([vllm([1])]).replace('"1": 1', '"1": 1, "99999999": 0'), "do not belong together"),
        ('{"choices": 3, "metrics": [1]}', "tells of no drafts"),
        ('{"a": 1}\n{"b": \n', "JSON"),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        told_by(tmp_path, text)
    assert str(tmp_path / "source") in str(error.value)


def test_intervals_are_over_answers() -> None:
    answers = [Counts.of_rounds([i % 4, 1, 0], tokens=6) for i in range(40)]
    low, high = LEDGER[0].interval(answers) or (0.0, 0.0)
    assert low < 1 + sum(one.accepted for one in answers) / 120 < high
    assert LEDGER[2].interval(answers) is not None
    assert LEDGER[3].interval(answers) is None  # drafted tokens are not told
    assert LEDGER[0].interval(answers[:9]) is None


RESULT = "docs/results/smollm2/eagle3/t0/result.json"


@pytest.mark.parametrize(
    ("accepted", "words"), [([1, 1, 2, 1], "do not differ"), ([0, 1], "accepts less"), ([5, 5], "accepts more")]
)
def test_the_command_prints_the_ledger_beside_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accepted: list[int], words: str
) -> None:
    (tmp_path / "answers.jsonl").write_text(lines([bench(accepted)] * 12))
    assert main(["acceptance", str(tmp_path / "answers.jsonl"), "--report", RESULT]) == 0
    out = capsys.readouterr().out
    assert words in out
    for one in LEDGER:
        assert one.what in out
    assert f"{1 + sum(accepted) / len(accepted):.3f}" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "0 are named"),
        (["--bogus"], "no option --bogus"),
        (["a", "--drafter", "eagle3"], "--report"),
        (["a", "--report", RESULT, "--drafter", "egle3"], "no drafter 'egle3'"),
        (["none.log"], "none.log"),
    ],
)
def test_a_wrong_word_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["acceptance", *argv]) == 2
    assert words in capsys.readouterr().err
