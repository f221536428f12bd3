"""Two servers on loopback: the same distribution is certified, another one is not, and what cannot be sampled is refused."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.certificate.certificate import Design, Judge, Outcome, checks_of, judge_greedy
from draftsmith.eval.certificate.served import SampledServer, compare_greedy
from draftsmith.foreign.records import Journal
from draftsmith.progress import Bar
from tests.eval.engines.fake_server import Engine, serving

T, V = 4, 12
LOGITS = 1.5 * np.random.default_rng(0).normal(size=(V, V))
LOGITS[5] = 0
LOGITS[5, [7, 8]] = 3.0, 2.99
PROMPTS = [Request(f"p{i}", "a", (3, i), 10) for i in range(3)]


def model(kind: str, spoil: Callable[[np.ndarray], np.ndarray] = lambda p: p, **counts: int) -> Any:
    """Answer as an engine does, from a table of the next token's logits, seeded by the request."""

    def reply(asked: dict[str, Any]) -> tuple[int, Any]:
        random, token, ids, rows = np.random.default_rng(asked["seed"]), asked["prompt"][-1] % V, [], []
        for _ in range(asked["max_tokens"]):
            p = np.exp(LOGITS[token] / (asked["temperature"] or 1.0))
            p = spoil(p / p.sum())
            token = int(p.argmax()) if asked["temperature"] == 0 else int(random.choice(V, p=p / p.sum()))
            ids.append(token)
            rows.append({int(i): float(np.log(p[i])) for i in (-p).argsort()[: asked["logprobs"]]})
        if kind == "vLLM":
            top = [{f"token_id:{i}": value for i, value in row.items()} for row in rows]
            return 200, {"choices": [{"logprobs": {"tokens": [f"token_id:{i}" for i in ids], "top_logprobs": top}}]}
        content = [
            {"id": i, "top_logprobs": [{"id": j, "logprob": value} for j, value in row.items()]}
            for i, row in zip(ids, rows, strict=True)
        ]
        return 200, {"choices": [{"logprobs": {"content": content}}], "timings": counts}

    return reply


def engine(kind: str, *args: Any, **counts: int) -> Engine:
    return Engine(kind, reply=model(kind, *args, **counts))


def certify(drafts: Engine, alone: Engine, distance: float = 0.2) -> Outcome:
    with ExitStack() as stack:
        servers = [
            SampledServer(stack.enter_context(serving(one)), ["models/target"], PROMPTS[0], Sampling(0.8))
            for one in (drafts, alone)
        ]
        bar = stack.enter_context(Bar(disable=True))
        design = Design(0.01, 0.9, distance, 3, T, checks_of(T), 40)
        draws = [server.draw(PROMPTS, T, 40, 0, name) for server, name in zip(servers, ("drafts", ""), strict=True)]
        return Judge(design, draws[1], Journal(), bar).test("drafts", draws[0], Sampling(0.8), ())


def test_the_same_distribution_is_certified_and_another_is_not() -> None:
    tested = certify(engine("llama.cpp", draft_n=4, draft_n_accepted=3), engine("vLLM"))
    requests = tested.checks[0].samples
    assert not tested.reasons
    assert (tested.accepted, tested.rejected) == (3 * requests, requests)
    flat = certify(engine("llama.cpp", lambda p: p**0.6, draft_n=4, draft_n_accepted=3), engine("vLLM"))
    assert "tokens 1 to 2: p = " in str(flat.reasons)


def test_a_server_that_drafts_nothing_is_not_certified() -> None:
    assert "no draft was accepted" in str(certify(engine("vLLM"), engine("vLLM"), 0.4).reasons)


def test_two_servers_that_draft_certify_nothing() -> None:
    both = (engine("llama.cpp", draft_n=4, draft_n_accepted=3) for _ in range(2))
    (reason,) = certify(*both, 0.4).reasons
    assert reason.startswith("the side that writes alone drafts too (")


def test_greedy_answers_part_at_near_ties_alone() -> None:
    def near(p: np.ndarray) -> np.ndarray:
        """Lets the second token win by a little where it is close."""
        first, second = (-p).argsort()[:2]
        return p + np.eye(V)[second] * (p[first] - p[second] + 1e-6) if p[second] > 0.95 * p[first] else p

    def far(p: np.ndarray) -> np.ndarray:
        return p + np.eye(V)[(-p).argsort()[1]]

    prompts = [replace(PROMPTS[0], prompt_ids=(1, token), max_new_tokens=2) for token in range(V)]
    found = []
    for spoil in (lambda p: p, near, far):
        with serving(engine("vLLM", spoil)) as drafts, serving(engine("llama.cpp")) as alone:
            pair = [SampledServer(url, ["target"], PROMPTS[0], Sampling(0.8)) for url in (drafts, alone)]
            found.append(judge_greedy("drafts", compare_greedy(*pair, prompts, Sampling(), "float16")))
    same, close, wrong = found
    assert (same.equal, same.reasons, same.widest) == (V, (), 0)
    assert 0 < close.equal < V
    assert (close.reasons, close.widest) == ((), pytest.approx(0.01))
    assert wrong.equal == 0
    assert "11 of 12 greedy answers part where the logits are up to" in wrong.reasons[0]


def test_what_cannot_be_sampled_is_refused() -> None:
    def same(asked: dict[str, Any]) -> tuple[int, Any]:
        return model("vLLM")(asked | {"seed": 3})

    calls = iter(range(99))

    def unseeded(asked: dict[str, Any]) -> tuple[int, Any]:
        return model("vLLM")(asked | {"seed": next(calls)})

    without = 200, {"choices": [{"text": "a", "logprobs": None}]}
    for reply, names, said in (
        (same, ["target"], "gives one answer to 8 seeds at temperature 0.8"),
        (unseeded, ["target"], "gives other answers to the same seed"),
        (lambda asked: without, ["target"], "answers without the log probabilities and ids of its tokens"),
        (same, ["other"], "serves served, not other"),
    ):
        with serving(Engine(reply=reply)) as url, pytest.raises(UserError, match="^http.*" + said):
            SampledServer(url, names, PROMPTS[0], Sampling(0.8))
