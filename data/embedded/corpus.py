"""The generated corpus behind the embedded default: five slices of short English, Python and JSON.

Everything follows from a seed, nothing is downloaded. A hash of the question decides once and for all whether
an exchange is for training or held out, so prompts never overlap conversations, whatever the counts and seeds.
"""

import hashlib
import re
from collections.abc import Iterator
from random import Random

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.embedded.slices import GENERATORS, Exchange

# Shares of all tokens: rag and json teach copying, which takes a tiny target the longest.
TOKEN_SHARES = {"chat": 0.13, "code": 0.12, "math": 0.15, "rag": 0.38, "json": 0.22}
_HELD_OUT_ONE_IN = 20
_TEMPLATE_TOKENS = 10  # what ChatML adds around a question and its answer
_WORD = re.compile(r"\w+|[^\w\s]+|\n")


def generate_conversations(count: int, seed: int) -> list[Conversation]:
    """Return `count` distinct single-turn conversations, the slices interleaved in TOKEN_SHARES.

    Any prefix of the list keeps the shares too, because the slice that lags behind comes next.
    """
    sources = {name: _exchanges(name, seed, held_out=False) for name in GENERATORS}
    tokens = dict.fromkeys(GENERATORS, 0.0)
    conversations: list[Conversation] = []
    for index in range(count):
        name = min(tokens, key=lambda slice_: tokens[slice_] / TOKEN_SHARES[slice_])
        exchange = next(sources[name])
        tokens[name] += _size(exchange)
        messages = (
            {"role": "user", "content": exchange.question},
            {"role": "assistant", "content": exchange.answer},
        )
        conversations.append(Conversation(id=f"{name}-{index}", slice=name, messages=messages))
    return conversations


def generate_prompts(per_slice: int, seed: int) -> list[Conversation]:
    """Return `per_slice` held-out questions of every slice, without answers."""
    prompts: list[Conversation] = []
    for name in GENERATORS:
        source = _exchanges(name, seed, held_out=True)
        for index in range(per_slice):
            messages = ({"role": "user", "content": next(source).question},)
            prompts.append(Conversation(id=f"{name}-held-out-{index}", slice=name, messages=messages))
    return prompts


def _exchanges(name: str, seed: int, *, held_out: bool) -> Iterator[Exchange]:
    """Yield exchanges of one slice with a new question each, from one side of the split."""
    rng = Random(f"{seed}/{name}/{held_out}")
    seen: set[str] = set()
    while True:
        exchange = GENERATORS[name](rng)
        if exchange.question not in seen and _is_held_out(exchange.question) == held_out:
            seen.add(exchange.question)
            yield exchange


def _is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def _size(exchange: Exchange) -> int:
    """Count words and marks: close to the tokens of the embedded tokenizer, without needing one."""
    return _TEMPLATE_TOKENS + len(_WORD.findall(exchange.question)) + len(_WORD.findall(exchange.answer))
