"""Run llama.cpp's server, and count drafted and accepted tokens as it does.

Checked with llama.cpp of the sdist llama-cpp-python 0.3.36; the rules of counting are in `counted_by_llama_cpp`.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, last_line
from draftsmith.eval.engines.agreement import EngineAnswer, EngineRound
from draftsmith.foreign.server import ModelServer

DRAFT_MODEL = "draft-simple"
"""What --spec-type calls an ordinary model that drafts."""


def greedy_body(prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return what /completion is asked for a prompt at temperature 0, with samplers that change nothing."""
    samplers = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "repeat_last_n": 0}
    wanted = {"prompt": list(prompt_ids), "n_predict": max_new_tokens, "cache_prompt": False, "return_tokens": True}
    return {"temperature": 0.0, **samplers, **wanted}


@dataclass(frozen=True)
class ServerSettings:
    """How llama-server is started.

    spec_type: how it drafts. num_speculative_tokens: K. context: tokens of prompt and answer. Caches are in
    float32, and every round is logged, as comparing needs.
    """

    target: Path
    draft: Path
    spec_type: str
    num_speculative_tokens: int
    context: int

    def flags(self) -> list[str]:
        """Return the command line: one thread, and no draft cut short for its probability."""
        flags = [
            "-m",
            str(self.target),
            "-c",
            str(self.context),
            *["-np", "1", "-t", "1", "--cache-ram", "0", "--offline"],
        ]
        flags += ["-md", str(self.draft), "--spec-type", self.spec_type, "-td", "1", "--spec-draft-p-min", "0"]
        flags += ["--spec-draft-n-max", str(self.num_speculative_tokens), "--spec-draft-n-min", "0"]
        flags += ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
        # The log names the tokens that end an answer, and every drafted token.
        return [*flags, "-lv", "5"]


class LlamaServerProcess:
    """A llama-server process, from `with` to its end. Its output is in `log`.

    end_ids: the tokens at which it ends an answer: the EOS, and what llama.cpp knows by its text to end a turn.
    Raises UserError where the program is missing, does not become ready within `timeout` seconds, or dies.
    """

    def __init__(self, program: Path, settings: ServerSettings, log: Path, timeout: float = 120) -> None:
        self.program, self.settings, self.log, self.timeout = program, settings, log, timeout
        self.end_ids: tuple[int, ...] = ()
        self._read = 0

    def __enter__(self) -> "LlamaServerProcess":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.http = ModelServer(f"http://127.0.0.1:{port}", f"its flags (see {self.log})")
        # Variables named LLAMA_ARG_... are flags too.
        env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        env["LLAMA_TRACE"] = "1"
        command = [str(self.program), *self.settings.flags(), "--host", "127.0.0.1", "--port", str(port)]
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        except OSError as error:
            raise UserError(f"Cannot start {self.program}: {error.strerror}; name a llama-server program.") from error
        try:
            deadline = time.monotonic() + self.timeout
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    said = last_line(self.log.read_text(encoding="utf-8", errors="replace"))
                    raise UserError(f"llama-server ended while it loaded: {said} (see {self.log}).")
                try:
                    # 503 while it loads.
                    self.http.get("/health")
                    break
                except UserError:
                    time.sleep(0.05)
            else:
                raise UserError(f"llama-server was not ready after {self.timeout:g} seconds: see {self.log}.")
            said = self.log.read_text(encoding="utf-8", errors="replace")
            self.end_ids = tuple(sorted({int(number) for number in re.findall(r"EOG token += (\d+) ", said)}))
            assert self.end_ids, "the server names at least the EOS"
        except BaseException:
            self.__exit__()
            raise
        return self

    def complete(self, sample_id: str, prompt_ids: Sequence[int], max_new_tokens: int) -> EngineAnswer:
        """Answer one prompt at temperature 0; the answer ends with EOS, as ours does, or at `max_new_tokens`."""
        # With less room the server would cut the last drafts, or the answer itself.
        assert len(prompt_ids) + max_new_tokens < self.settings.context
        answer = self.http.post("/completion", greedy_body(prompt_ids, max_new_tokens))
        return EngineAnswer(sample_id, tuple(answer["tokens"]), self._rounds(answer["timings"]))

    def version(self) -> str:
        """Return the build that the server names."""
        return str(self.http.ask("/props")["build_info"])

    def _rounds(self, timings: dict[str, Any]) -> tuple[EngineRound, ...]:
        """Read the rounds of the last answer, which may reach the log a little later than the client."""
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        deadline = time.monotonic() + self.timeout
        while True:
            with self.log.open("rb") as log:
                log.seek(self._read)
                text = log.read()
            rounds = read_rounds(text.decode("utf-8", errors="replace"))
            if sum(len(r.drafted) for r in rounds) == drafted:
                assert sum(r.accepted for r in rounds) == accepted, f"{self.log} and the server count differently"
                self._read += len(text)
                return rounds
            if time.monotonic() > deadline:
                raise UserError(
                    f"The log {self.log} does not show the {drafted} drafted tokens that the server counts."
                )
            time.sleep(0.02)

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


def read_rounds(log: str) -> tuple[EngineRound, ...]:
    """Read the rounds from what the server writes at verbosity 5 with LLAMA_TRACE=1: the best candidate of every draft
    position, then "accepted a/n draft tokens". A draft may have been made longer than the n tokens that were verified. Of drafts of a
    selector (DFlash2) it writes no tokens: they are UNSEEN."""
    rounds, drafted = [], []
    for candidate, accepted, count in _LINES.findall(log):
        if candidate:
            drafted.append(int(candidate))
        else:
            rounds.append(EngineRound(tuple(drafted[: int(count)]) or (UNSEEN,) * int(count), int(accepted)))
            drafted = []
    return tuple(rounds)


def as_seen(ours: EngineAnswer, theirs: Sequence[EngineAnswer]) -> EngineAnswer:
    """Return our answer, without its drafted tokens where the server has named none in its answers."""
    if not any(UNSEEN in round_.drafted for answer in theirs for round_ in answer.rounds):
        return ours
    return replace(ours, rounds=tuple(EngineRound((UNSEEN,) * len(r.drafted), r.accepted) for r in ours.rounds))


UNSEEN = -1
"""A drafted token that a log does not name."""
_LINES = re.compile(r"draft candidate +0, pos +\d+: +(\d+) |accepted +(\d+)/ *(\d+) draft tokens$", re.MULTILINE)


def counted_by_llama_cpp(ours: EngineAnswer, max_new_tokens: int, end_ids: Collection[int]) -> EngineAnswer:
    """Return our answer and its rounds as llama.cpp's server gives and counts them.

    end_ids: of `LlamaServerProcess`; it ends an answer at any of them, where we go on to the target's own EOS.
    tools/server/server-context.cpp, get_n_draft_max: a draft leaves room for the target's own token, so it is one shorter
    than what the answer may still become; where nothing is left, a plain step is made and no round counted.
    common/sampling.cpp, common_sampler_sample_and_accept_n: an end token ends the verification as the target's own, so
    it is not counted as accepted, unless it is the draft's last token. The first token comes with the prompt, as ours.
    """
    ends = [length for length, token in enumerate(ours.output_ids, 1) if token in end_ids]
    output = ours.output_ids[: ends[0] if ends else None]
    rounds, known = [], 1
    for round_ in ours.rounds:
        if known >= len(output):
            break
        drafted = round_.drafted[: max_new_tokens - known - 1]
        kept = min(round_.accepted, len(drafted), len(output) - known)
        # The last token of the answer was drafted, and more of the draft came after it.
        ended = known + kept == len(output) and kept < len(drafted)
        if drafted:
            rounds.append(EngineRound(drafted, kept - ended))
        known += round_.accepted + 1
    return EngineAnswer(ours.sample_id, output, tuple(rounds))
