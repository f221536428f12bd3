"""Reading counts of acceptance out of what engines write: answers and their statistics (JSON), logs, and /metrics of a running server.

The shapes were read in the code that counts.py names. An unknown one is refused, never guessed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, one_line
from draftsmith.eval.ledger.counts import Counts
from draftsmith.foreign.server import LLAMA_CPP, SGLANG, TENSORRT, VLLM, ModelServer
from draftsmith.foreign.text import parse_json, read_text

BENCH = "Spec-Bench"
_PER_ANSWER = "--per-request-spec-decode-metrics summary of `vllm serve` (--per-request-spec-decode-stats in other versions), off by default"
_GIVE = (
    f"give the answers or statistics of one engine as JSON, as it sends them: vLLM's with {_PER_ANSWER}; SGLang's with meta_info; "
    "TensorRT-LLM's with per_request_spec_decode_stats, or its iteration statistics; llama.cpp's with timings; Spec-Bench's answer files."
)
NO_COUNTS = f"tells of no drafts: {_GIVE}"
_MOST_TOKENS = 2**40
_LONGEST = 2**13
"""Tokens of the longest draft."""
_REMEDY = "give an engine's log, its answers as JSON, or the address of its server"


@dataclass(frozen=True)
class Told:
    """What a source tells. engine: whose. counts: of everything. answers: of each answer, none where it tells sums alone. note: what
    limits it, a sentence or nothing. requests: that ended, where a server counts them. parts: of each answer or interval of a log."""

    engine: str
    counts: Counts
    answers: tuple[Counts, ...] = ()
    note: str = ""
    requests: float | None = None
    parts: tuple[Counts, ...] = ()


def read_source(where: str) -> Told:
    """Return what a file or the server at an address tells. Raises UserError for an engine or a shape that is not known."""
    if where.startswith(("http://", "https://")):
        return read_server(ModelServer(where, "the address"))
    text = read_text(Path(where), _REMEDY)
    try:
        told = _records(text, where) if text.lstrip()[:1] in ("{", "[") else read_log(text.splitlines())
    except UserError:
        # Lines of a log may begin with a bracket, as SGLang's do before their time.
        if (told := read_log(text.splitlines())) is None:
            raise
    if told is None:
        raise UserError(f"{where} {UNKNOWN_LOG}")
    return told


def _records(text: str, where: str) -> Told:
    """Read JSON: an object, a list, or an object per line."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        parse_json(lines[0], where, _REMEDY)
    except UserError:  # one value over several lines
        lines = [text]
    values = [parse_json(line, where, _REMEDY) for line in lines]
    records = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    found = [told for record in records for told in read_record(record, where)]
    engines = {engine for engine, _ in found}
    if len(engines) != 1:
        raise UserError(
            f"{where} mixes answers of {' and '.join(sorted(engines))}: {_GIVE}" if engines else f"{where} {NO_COUNTS}"
        )
    counts = tuple(one for _, one in found)
    iterations = any("specDecodingStats" in record for record in records if isinstance(record, dict))
    return Told(engines.pop(), sum(counts[1:], counts[0]), () if iterations else counts)


def read_answer(record: Any, where: str) -> Counts | None:
    """Return what an answer, or a chunk of one, tells of its drafts. Raises UserError for numbers that contradict each other."""
    return next((counts for _, counts in read_record(record, where)), None)


def read_record(record: Any, where: str) -> Iterator[tuple[str, Counts]]:
    """Yield engine and counts of every answer in a record. Raises UserError for numbers that contradict each other."""
    if not isinstance(record, dict):
        return
    listed, metrics = record.get("choices"), record.get("metrics")
    choices = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    alone = len(choices) == 1
    usage = record.get("usage") if alone else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    blocks: list[tuple[str, _Reader, Any, Any]] = [
        (TENSORRT, _tensorrt_iteration, record.get("specDecodingStats"), None),
        (LLAMA_CPP, _llama, record.get("timings"), None),
        (SGLANG, _sglang, record.get("meta_info"), None),
        (VLLM, _vllm, metrics.get("speculative_decoding") if isinstance(metrics, dict) else None, tokens),
    ]
    for choice in choices:
        blocks += [
            (VLLM, _vllm, choice.get("speculative_decoding_stats"), tokens),
            (TENSORRT, _tensorrt, choice.get("speculative_decoding"), tokens),
            (SGLANG, _sglang, choice.get("meta_info"), None),
            (BENCH, _bench, {"accept_lengths": choice.get("accept_lengths")}, None),
        ]
    for engine, read, block, told in blocks:
        if not isinstance(block, dict):
            continue
        try:
            counts = read(block, told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{where} holds numbers of {engine} that do not belong together ({one_line(str(error) or type(error).__name__, 80)}): give "
                "the answers as the engine sent them."
            ) from error
        if counts is not None:
            yield engine, counts


_Reader = Callable[[dict[str, Any], Any], Counts | None]


def _vllm(block: dict[str, Any], tokens: Any) -> Counts | None:
    steps, accepted = _number(block["num_spec_steps"]), _number(block["num_accepted_draft_tokens"])
    return _checked(steps, accepted, block["num_draft_tokens"], block["acceptance_histogram"], tokens)


def _tensorrt(block: dict[str, Any], tokens: Any) -> Counts | None:
    steps, accepted = _number(block["num_spec_steps"]), _number(block["total_accepted_draft_tokens"])
    return _checked(steps, accepted, block["total_draft_tokens"], block["acceptance_histogram"], tokens)


def _tensorrt_iteration(block: dict[str, Any], _tokens: Any) -> Counts | None:
    drafted = _number(block["numDraftTokens"])
    rounds, accepted = _number(block["numRequestsWithDraftTokens"]), _number(block["numAcceptedTokens"])
    return _checked(rounds, accepted, drafted, None, None) if drafted else None


def _sglang(block: dict[str, Any], _tokens: Any) -> Counts | None:
    """SGLang's names changed twice; they count drafted tokens alone, the bonus token is none of them."""
    if "spec_verify_ct" not in block:
        return None

    def first(*names: str) -> Any:
        return next(block[name] for name in names if name in block)

    try:
        accepted = first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
        drafted = first("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    except StopIteration:
        raise ValueError("spec_verify_ct without accepted and drafted tokens") from None
    lengths = block.get("spec_correct_drafts_histogram", block.get("spec_accept_histogram"))
    return _checked(
        _number(block["spec_verify_ct"]), _number(accepted), drafted, lengths, block.get("completion_tokens")
    )


def _llama(block: dict[str, Any], _tokens: Any) -> Counts | None:
    """Each round ends with one token of the target's own, and the first token is that of the prompt's pass."""
    if "draft_n" not in block:
        return None
    tokens, accepted = _number(block["predicted_n"]), _number(block["draft_n_accepted"])
    return _checked(tokens - 1 - accepted, accepted, block["draft_n"], None, tokens)


def _bench(block: dict[str, Any], _tokens: Any) -> Counts | None:
    """Spec-Bench lists the tokens of every round, the bonus token among them."""
    lengths = block["accept_lengths"]
    if lengths is None:
        return None
    accepted = [_number(length) - 1 for length in lengths]
    if accepted and not 0 <= min(accepted) <= max(accepted) <= _LONGEST:
        raise ValueError(f"accept_lengths below 1 or above {_LONGEST + 1}")
    return Counts.of_rounds(accepted)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise ValueError(f"{value!r} is no count")
    return value


def _checked(rounds: int, accepted: int, drafted: Any, lengths: Any, tokens: Any) -> Counts | None:
    """Return the counts of an answer, None without a round. Raises ValueError where they contradict each other."""
    if rounds < 0 or (drafted is not None and accepted > _number(drafted)):
        raise ValueError(f"{accepted} tokens accepted of {drafted} in {rounds} rounds")
    by_length = None
    if lengths:
        pairs = lengths.items() if isinstance(lengths, dict) else enumerate(lengths)
        counted = {int(length): _number(n) for length, n in pairs}
        if not 0 <= min(counted) <= max(counted) <= _LONGEST:
            raise ValueError(f"a histogram of lengths below 0 or above {_LONGEST}")
        if (sum(counted.values()), sum(length * n for length, n in counted.items())) != (rounds, accepted):
            raise ValueError(f"a histogram of {sum(counted.values())} rounds beside {rounds}")
        by_length = tuple(float(counted.get(length, 0)) for length in range(max(counted) + 1))
    return Counts(rounds, accepted, drafted, by_length, None if tokens is None else _number(tokens)) if rounds else None


_VLLM_LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: ([\d.]+), .*?Accepted: (\d+) tokens, Drafted: (\d+) tokens, "
    r"Per-position acceptance rate: ([\d., ]+\d)"
)
_SGLANG_LINE = re.compile(r"#running-req: (\d+).*?accept len: ([\d.]+), accept rate: ([\d.]+)")
_LLAMA_TOKENS = re.compile(r"(?<!prompt )eval time =\s*[\d.]+ ms /\s*(\d+) tokens")
_LLAMA_POSITIONS = re.compile(r"acc per pos = \(([\d., ]+)\)")
_LLAMA_LINE = re.compile(r"draft acceptance(?: rate)? = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)")


UNKNOWN_LOG = (
    "is no log that is known: it has no line of vLLM (SpecDecoding metrics), SGLang (accept len) or llama.cpp (draft acceptance); give "
    "one written while the server drafted, or its answers as JSON."
)


def read_log(lines: Sequence[str]) -> Told | None:
    """Return what lines of an engine's log tell; None where none of them does."""
    if found := [_vllm_line(match) for line in lines if (match := _VLLM_LINE.search(line))]:
        note = (
            f"The log tells sums alone, of {len(found)} intervals; for each answer start the server with {_PER_ANSWER}."
        )
        return Told(VLLM, sum(found[1:], found[0]), (), note, parts=tuple(found))
    matches = (match for line in lines if (match := _SGLANG_LINE.search(line)))
    # Idle moments tell a length of 0.
    if found := [_sglang_line(match) for match in matches if int(match[1]) and float(match[2]) >= 1]:
        note = "SGLang's log has ratios of two digits, here weighted by running requests: for counts keep the answers' meta_info."
        return Told(SGLANG, sum(found[1:], found[0]), (), note, parts=tuple(found))
    answers, tokens = list[Counts](), 0
    for line in lines:
        if match := _LLAMA_TOKENS.search(line):
            tokens = int(match[1])
        elif (match := _LLAMA_LINE.search(line)) and tokens > int(match[1]):  # else the log begins between the two
            said = {"predicted_n": tokens, "draft_n_accepted": int(match[1]), "draft_n": int(match[2])}
            answers, tokens = answers + ([one] if (one := _llama(said, None)) else []), 0
        elif answers and (match := _LLAMA_POSITIONS.search(line)):
            last = answers[-1]
            answers[-1] = replace(last, by_length=_by_length(last.rounds, match[1], last.accepted))
    return Told(LLAMA_CPP, sum(answers[1:], answers[0]), tuple(answers), parts=tuple(answers)) if answers else None


def _vllm_line(match: re.Match[str]) -> Counts:
    """Rounds are not printed: with K tokens in every draft they are the drafted ones over K, else they follow from the rounded length."""
    length, accepted, drafted = float(match[1]), int(match[2]), int(match[3])
    rates = [float(rate) for rate in match[4].split(",")]
    rounds = drafted / len(rates)
    if rounds and rounds.is_integer() and abs(1 + accepted / rounds - length) <= 0.00501:
        return Counts(rounds, accepted, drafted, _by_length(rounds, match[4], accepted))
    rounds = accepted / (length - 1) if length > 1 else drafted / len(rates)
    return Counts(rounds, accepted, drafted, None, rounded=True)


def _by_length(rounds: float, rates: str, accepted: float) -> tuple[float, ...] | None:
    """Return the rounds that accepted 0, 1, 2, ... tokens, from the printed shares of those that accepted each position; None where
    these are rounded too far."""
    reached = [rounds, *(float(round(float(rate) * rounds)) for rate in rates.split(",")), 0.0]
    return tuple(a - b for a, b in pairwise(reached)) if sum(reached[1:]) == accepted else None


def _sglang_line(match: re.Match[str]) -> Counts:
    running, length, rate = float(match[1]), float(match[2]), float(match[3])
    accepted = running * (length - 1)
    return Counts(running, accepted, accepted / rate if rate else None, rounded=True)


_POSITION = re.compile(r'position="(\d+)"')
_COUNTERS = {
    engine: tuple(
        f"{prefix}:spec_decode_num_{name}_total"
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    for engine, prefix in ((VLLM, "vllm"), (LLAMA_CPP, "llamacpp"))
}
_VLLM_REQUESTS = "vllm:request_success_total"
_SGLANG_NAMES = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
_SGLANG_COUNTERS = tuple(f"sglang:{name}_total" for name in ("spec_verify_calls", "generation_tokens", "num_requests"))
"""Of answers that are finished: their rounds, their tokens, their number (its metrics_collector.py)."""


def read_server(server: ModelServer, *, idle: bool = False, before: str = "") -> Told:
    """Return what the counters of a running server tell, since its start. idle: also where it has drafted nothing yet. before: the engine
    that it was when it counted before; SGLang shows no counters between a restart and its first answer. Raises UserError where it counts
    no drafts."""
    page = server.metrics()
    if page.lstrip().startswith("["):  # TensorRT-LLM's iterations since they were last asked for
        return _records(page, server.url)
    found = server.counters(
        page, (*chain.from_iterable(_COUNTERS.values()), *_SGLANG_COUNTERS, *_SGLANG_NAMES, _VLLM_REQUESTS)
    )
    for engine, names in _COUNTERS.items():
        drafts, drafted, accepted, by_position = (found[name] for name in names)
        if not (drafts and drafted and accepted and (idle or sum(drafts.values()))):
            continue
        rounds, kept = sum(drafts.values()), sum(accepted.values())
        reached: dict[int, float] = {}
        for labels, number in by_position.items():
            if match := _POSITION.search(labels):
                reached[int(match[1])] = reached.get(int(match[1]), 0.0) + number
        at = [rounds, *(reached[i] for i in sorted(reached)), 0.0]
        by_length = tuple(a - b for a, b in pairwise(at)) if sum(at[1:]) == kept else None
        more = (
            f"for each answer start it with {_PER_ANSWER}" if engine == VLLM else "every answer's timings tell its own"
        )
        return Told(
            engine,
            Counts(rounds, kept, sum(drafted.values()), by_length),
            (),
            f"Sums since the server started; {more}.",
            sum(ended.values()) if (ended := found[_VLLM_REQUESTS]) else None,
        )
    rounds, tokens, answers = (sum(found[name].values()) for name in _SGLANG_COUNTERS)
    # Each round ends with one token of the target's own, and each answer's first token is that of the prompt's pass.
    if (rounds and answers and tokens >= rounds + answers) or (
        idle and (found[_SGLANG_COUNTERS[0]] or before == SGLANG)
    ):
        told = max(tokens - rounds - answers, 0.0) if rounds else 0.0
        note = "Sums of the answers since the server started."
        return Told(SGLANG, Counts(rounds, told), (), note, answers)
    lengths, rates = (list(found[name].values()) for name in _SGLANG_NAMES)
    if lengths and lengths[0] >= 1:
        rate = rates[0] if rates else 0.0
        note = "Gauges of SGLang's last moments, not counts: keep the answers' meta_info for these."
        now = Counts(1.0, lengths[0] - 1, (lengths[0] - 1) / rate if rate else None, rounded=True)
        return Told(SGLANG, now, (), note)
    raise UserError(
        f"{server.url} counts no drafts at /metrics: name one that drafts and has answered; vLLM shows them unless --disable-log-stats, SGLang "
        "with --enable-metrics, TensorRT-LLM with enable_iter_perf_stats, llama-server with --metrics; its log and its answers' timings tell too."
    )
