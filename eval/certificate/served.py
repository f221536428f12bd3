"""Samples of a running server, through completions with a seed for each request; vLLM and llama.cpp's llama-server.

Shapes: P prompts, T tokens of an answer.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.errors import UserError
from draftsmith.eval.certificate.certificate import Draw
from draftsmith.eval.results.result import Divergence, Lossless
from draftsmith.foreign.server import ModelServer

_AT_ONCE = 16
_TOP = 5
_ALIKE = 8
"""Seeds whose answers must not all be the same."""
_COUNTERS = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")


@dataclass(frozen=True)
class Answer:
    """ids_T: tokens. top_T: of each, the log probabilities of the likeliest tokens. drafted, accepted: as the answer itself tells."""

    ids_T: tuple[int, ...]
    top_T: tuple[Mapping[int, float], ...]
    drafted: int = 0
    accepted: int = 0


class SampledServer(ModelServer):
    """A server at `url`; one of `names` is the target that it must serve.

    Raises UserError where it serves another model, tells no log probabilities, or does not obey a request's seed.
    """

    def __init__(self, url: str, names: Sequence[str], probe: Request, sampling: Sampling) -> None:
        super().__init__(url, "--url")
        self.model = self.find_model(names, "name it with --model")
        same = {self.answer(probe, 6, sampling, 1).ids_T for _ in range(3)}
        others = {self.answer(probe, 6, sampling, seed).ids_T for seed in range(2, _ALIKE + 1)}
        if len(same) == 3 or len(same | others) == 1:
            what = "other answers to the same seed" if len(same) == 3 else f"one answer to {_ALIKE} seeds"
            raise UserError(
                f"{self.url} gives {what} at temperature {sampling.temperature:g}, so its samples are not known to be independent: name an "
                "engine that obeys the `seed` of a request, or a higher temperature."
            )

    def answer(self, request: Request, tokens: int, sampling: Sampling, seed: int) -> Answer:
        """Ask for the first `tokens` tokens of an answer."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "repeat_penalty": sampling.repetition_penalty,  # llama-server's name
            "repeat_last_n": -1,
            "seed": seed,
            "logprobs": _TOP,
            "return_tokens_as_token_ids": True,
        }
        said = self.post("/v1/completions", body)
        try:
            return _read(said)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(
                f"{self.url} answers without the log probabilities and ids of its tokens, which tell what it drew: name vLLM or "
                "llama-server itself."
            ) from error

    def draw(self, prompts: Sequence[Request], tokens: int, repeats: int, seed: int, name: str) -> Draw:
        """Return how it samples the first tokens of answers."""

        def draw(sampling: Sampling, _control: object, number: int) -> Mapping[str, Any]:
            before = self._counters()
            asked = [(p, repeat) for p in prompts for repeat in range(repeats)]
            seeds = [row_key(seed, name, number, repeat, p.sample_id) % 2**31 for p, repeat in asked]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                prompt = (p for p, _ in asked)
                answers = list(pool.map(lambda p, s: self.answer(p, tokens, sampling, s), prompt, seeds))
            after = self._counters()
            accepted = after[0] - before[0] + sum(answer.accepted for answer in answers)
            drafted = after[1] - before[1] + sum(answer.drafted for answer in answers)
            ids = [list(answer.ids_T) for answer in answers]
            split = [ids[i : i + repeats] for i in range(0, len(ids), repeats)]
            return {"tokens": split, "accepted": int(accepted), "rejected": int(drafted - accepted)}

        return draw

    def _counters(self) -> list[float]:
        """Return accepted and drafted tokens since it was started; 0 where only the answers tell them."""
        return self.sums(self.metrics(), _COUNTERS)


def _read(said: Mapping[str, Any]) -> Answer:
    """Read an answer of vLLM or of llama-server. Raises KeyError and the like for another one."""
    told, timings = said["choices"][0]["logprobs"], said.get("timings") or {}
    drafted = [int(timings.get(key, 0)) for key in ("draft_n", "draft_n_accepted")]
    if "content" in told:
        rows = told["content"]
        top = tuple({int(one["id"]): float(one["logprob"]) for one in row["top_logprobs"]} for row in rows)
        return Answer(tuple(int(row["id"]) for row in rows), top, *drafted)
    top = tuple({_id(name): float(value) for name, value in row.items()} for row in told["top_logprobs"])
    return Answer(tuple(_id(name) for name in told["tokens"]), top, *drafted)


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def compare_greedy(
    spec: SampledServer, base: SampledServer, prompts: Sequence[Request], greedy: Sampling, dtype: str
) -> Lossless:
    """Compare the greedy answers of two servers; where they part, the gap is that of the second one's log probabilities."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pairs = [
            list(pool.map(lambda p, s=server: s.answer(p, p.max_new_tokens, greedy, 0), prompts))
            for server in (spec, base)
        ]
    apart = [d for p, got, own in zip(prompts, *pairs, strict=True) if (d := _part(p, got, own)) is not None]
    return Lossless(dtype, len(prompts), len(prompts) - len(apart), tuple(apart), None, None)


def _part(request: Request, got: Answer, own: Answer) -> Divergence | None:
    """Return where two answers part, None where they do not; one that ends earlier parts from the other there, with no gap known."""
    if got.ids_T == own.ids_T:
        return None
    pairs = zip(own.ids_T, got.ids_T, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own.ids_T), len(got.ids_T)))
    a, b = ((*ids, -1)[position] for ids in (own.ids_T, got.ids_T))
    top = own.top_T[position] if position < len(own.top_T) else {}
    gap = top[a] - top[b] if a in top and b in top else None
    return Divergence(request.sample_id, request.slice, position, a, b, gap)
