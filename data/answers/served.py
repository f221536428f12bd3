"""Answers by running servers of the target, which are faster than transformers, and a test of whether they are the target's own.

vLLM through /v1/completions and llama.cpp's llama-server through /completion, both of which take and return token ids. Checked with
vLLM 0.32.0 and the llama.cpp of the sdist llama-cpp-python 0.3.36.
"""

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import Generation, Request
from draftsmith.decoder.sampling import Sampling, penalize, probs
from draftsmith.errors import UserError, one_line
from draftsmith.foreign.server import LLAMA_CPP, LONGEST, VLLM, ModelServer, ServerError
from draftsmith.target.target import Target

_WAITS = (1.0, 5.0, 25.0)
"""Seconds before a request that failed is sent again."""
_TOKENS_TESTED = 4096
_DIFFERS = 4.0
"""Standard errors from which on answers are said not to be the target's."""


class AnswerServer(ModelServer):
    """A server at `url` that answers for the target, which it serves by one of `names`.

    Raises UserError where it does not answer, is neither vLLM nor llama-server, or serves another model.
    """

    def __init__(self, url: str, names: Sequence[str]) -> None:
        super().__init__(url, "answers.servers")
        model = self.find_model(names, "name it in answers.served_name")
        kind, version = self.find_engine()
        self.engine = f"{kind} {version}"
        if kind == VLLM:
            self._path, self._body, self._read = "/v1/completions", lambda *asked: _vllm_body(model, *asked), _read_vllm
        elif kind == LLAMA_CPP:
            self._path, self._body, self._read = "/completion", _llama_body, _read_llama
        else:
            raise UserError(
                f"{self.url} is neither vLLM nor llama.cpp's llama-server, which take and return token ids: let one of them answer, "
                "or leave answers.servers out."
            )

    def answer(self, request: Request, sampling: Sampling, stopped: Event, vocab_size: int) -> Generation:
        """Answer `request`, in up to four attempts until `stopped` is set, one where it is refused. Random numbers are the server's own.

        Raises UserError where the server answers with anything but tokens of the target's vocabulary.
        """
        body, begun = self._body(request, sampling), time.monotonic()
        for wait in (*_WAITS, None):
            try:
                reply = self.post(self._path, body)
                break
            except ServerError as error:
                late = time.monotonic() - begun > LONGEST
                if wait is None or late or not error.again or stopped.wait(wait):
                    raise
        try:
            ids, reason = self._read(reply)
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.url} returns no token ids ({self.engine}): answers need a newer one.") from error
        if strange := [token for token in ids if not 0 <= token < vocab_size]:
            raise UserError(
                f"{self.url} answers {request.sample_id} with token {one_line(str(strange[0]), 40)}, but the target has {vocab_size} tokens: "
                "serve the recipe's target."
            )
        return Generation(request, ids[: request.max_new_tokens], reason)


def _vllm_body(model: str, request: Request, sampling: Sampling) -> dict[str, Any]:
    """No seed is sent: vLLM's CPU worker ends at a seed of a request's own, and batches change the answers anyway."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        **asdict(sampling),
        "return_token_ids": True,
    }


def _read_vllm(found: dict[str, Any]) -> tuple[list[int], str]:
    choice = found["choices"][0]
    return _ids(choice["token_ids"]), "eos" if choice["finish_reason"] == "stop" else "length"


def _llama_body(request: Request, sampling: Sampling) -> dict[str, Any]:
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        **{key: value for key, value in asdict(sampling).items() if key != "repetition_penalty"},
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": len(request.prompt_ids) + request.max_new_tokens,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "return_tokens": True,
    }


def _read_llama(found: dict[str, Any]) -> tuple[list[int], str]:
    return _ids(found["tokens"]), "eos" if found["stop_type"] == "eos" else "length"


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        raise TypeError
    return value


def answer_all(
    servers: Sequence[AnswerServer], requests: Sequence[Request], sampling: Sampling, batch: int, vocab_size: int
) -> Generator[tuple[AnswerServer, Generation]]:
    """Yield servers and their answers as they come; every server works on up to `batch` of them at a time, the first prompts shared out.

    vocab_size: of the target. Raises UserError where a server fails, or answers with other tokens than the target has, behind what came
    before that.
    """
    taken, stopped, answered = count(), Event(), SimpleQueue[tuple[AnswerServer, Generation] | Exception]()

    def work(server: AnswerServer) -> None:
        while (number := next(taken)) < len(requests) and not stopped.is_set():
            try:
                answered.put((server, server.answer(requests[number], sampling, stopped, vocab_size)))
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the answer shall know
                answered.put(error)

    # Daemons, so that Ctrl-C does not wait for answers that are on their way.
    for _ in range(min(batch, len(requests))):
        for server in servers:
            Thread(target=work, args=(server,), daemon=True).start()
    try:
        for _ in requests:
            if isinstance(answer := answered.get(), Exception):
                raise answer
            yield answer
    finally:
        stopped.set()


@dataclass(frozen=True)
class Likeness:
    """How like samples of the target some answers are. tokens: that were looked at. gap: nats by which a token is less likely under
    the target than its own samples are, on average; error: standard error of that. impossible: share of tokens that the target's
    filters leave out. At temperature 0 gap and error are 0, and impossible is the share of tokens that are not its first choice."""

    tokens: int
    gap: float
    error: float
    impossible: float

    @property
    def differs(self) -> bool:
        """Whether more than rounding and chance lies between the answers and the target's own."""
        return abs(self.gap) > _DIFFERS * self.error or self.impossible > 0.02

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, on average {abs(self.gap):.3f} nats {'less' if self.gap > 0 else 'more'} likely than samples of the "
            f"target are (standard error {self.error:.3f}), {self.impossible:.1%} that it would not have chosen"
        )


_ROWS = 64
"""Tokens whose distributions are there at once."""


def likeness(target: Target, samples: Sequence[Tokenized], sampling: Sampling) -> Likeness:
    """Test answers from all over `samples`, of about _TOKENS_TESTED tokens together, against the target's distributions.

    Samples x of p have E[log p(x) + H(p)] = 0 with a variance that p gives too, so that no other answers are needed to compare with.
    """
    tokens = impossible = 0
    surplus = variance = 0.0
    apart = max(1, sum(int(sample.mask.sum()) for sample in samples) // _TOKENS_TESTED)
    for sample in samples[::apart]:
        ids = sample.ids.to(target.device)
        last = target.forward(ids[None]).last[0]
        found = [
            _likeness(target, last, ids, rows_R, sampling) for rows_R in sample.mask.nonzero().flatten().split(_ROWS)
        ]
        tokens += int(sample.mask.sum())
        impossible += sum(wrong for wrong, _, _ in found)
        surplus += sum(more for _, more, _ in found)
        variance += sum(one for _, _, one in found)
    return Likeness(tokens, surplus / max(tokens, 1), math.sqrt(variance) / max(tokens, 1), impossible / max(tokens, 1))


def _likeness(
    target: Target, last: Tensor, ids: Tensor, rows_R: Tensor, sampling: Sampling
) -> tuple[int, float, float]:
    """Return of tokens at some rows of a text how many the target would not choose, and the sums of E[log p] - log p and of its variance."""
    rows_R = rows_R.to(target.device)
    logits_RV = target.head.logits(last[rows_R - 1]).float()
    if sampling.repetition_penalty != 1:
        # The tokens that stand before each row: bool [R, V].
        seen = torch.zeros(len(rows_R), logits_RV.shape[-1], dtype=torch.bool, device=ids.device)
        for row, at in zip(seen, rows_R.tolist(), strict=True):
            row[ids[:at]] = True
        logits_RV = penalize(logits_RV, seen, sampling.repetition_penalty)
    chosen_R = ids[rows_R]
    if sampling.greedy:
        return int((logits_RV.argmax(-1) != chosen_R).sum()), 0.0, 0.0
    p_RV = probs(logits_RV, sampling).double()
    own_R = p_RV.gather(-1, chosen_R[:, None])[:, 0]
    log_RV = p_RV.clamp_min(torch.finfo(torch.float64).tiny).log()
    mean_R = (p_RV * log_RV).sum(-1)
    variance = float(((p_RV * log_RV**2).sum(-1) - mean_R**2).sum())
    return int((own_R == 0).sum()), float((mean_R - own_R.log())[own_R > 0].sum()), variance
