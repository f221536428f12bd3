"""The generated corpus of the embedded default: five slices of short English, Python and JSON.

chat is open (many word choices), math short chains of real arithmetic, rag answers with spans of a passage, code and json
are formulaic with values copied from the question. Everything follows from a seed, nothing is downloaded. A hash of the
question decides whether an exchange is for training or held out, so prompts never overlap conversations, whatever the
counts and seeds.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from draftsmith.data.conversations.load import Conversation

# Shares of all tokens: rag and json teach copying, which takes a tiny target the longest.
TOKEN_SHARES = {"chat": 0.13, "code": 0.12, "math": 0.15, "rag": 0.38, "json": 0.22}
_HELD_OUT_ONE_IN = 20
_TEMPLATE_TOKENS = 10  # what ChatML adds around a question and its answer
_WORD = re.compile(r"\w+|[^\w\s]+|\n")

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Exchange:
    """One question and the answer to it."""

    question: str
    answer: str


@functools.cache
def _texts() -> dict[str, Any]:
    """Return what words.json holds.

    words: lists by name; verbs and nouns make function names, arguments are what a person would call two numbers, lists what
    they would call a list. Most are short and few, so that a byte-level BPE of about a thousand entries holds them in one
    token: a tiny target then learns to copy them from the prompt within a million tokens.
    chat_slots: the options of each slot of a chat template, which may hold slots themselves.
    chat_topics: templates of a question and of its answers; slots in capitals are drawn once and shared by the two.
    """
    return json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def _words(name: str) -> list[str]:
    return _texts()["words"][name]


def _option(rng: Random, slot: str) -> str:
    return rng.choice(_texts()["chat_slots"][slot])


def expand(rng: Random, template: str, bound: dict[str, str]) -> str:
    """Fill `{slot}` from `bound`, else with a random option of the slot, until no slot is left."""
    while match := _SLOT.search(template):
        word = bound.get(match[1]) or _option(rng, match[1])
        template = template[: match.start()] + word + template[match.end() :]
    return template


def chat(rng: Random) -> Exchange:
    """Advice and little stories: many words would do at every step."""
    topic = rng.choice(_texts()["chat_topics"])
    question, answers = topic["question"], topic["answers"]
    shared = {word: _option(rng, "food" if word == "OTHER" else word.lower()) for word in _SLOT.findall(question)}
    shared["Heat"] = _option(rng, "heat").capitalize()
    answer = expand(rng, rng.choice(answers), shared)
    return Exchange(expand(rng, question, shared), answer)


def math(rng: Random) -> Exchange:
    """Two steps of arithmetic on small numbers, each written out, then the answer."""
    name, other = rng.sample(_words("names"), 2)
    thing = rng.choice(_words("fruits"))
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:
        got, gave = rng.choice(["buys", "finds", "picks"]), rng.choice(["gives", "sells", "sends"])
        c = rng.randint(1, a + b - 1)
        question = f"Say {name} has {a} {thing}, {got} {b} more and {gave} {other} {c}. How many are left?"
        steps = [f"{name} has {a} + {b} = {a + b} {thing}", f"{a + b} - {c} = {a + b - c} {thing} are left"]
        result = a + b - c
    elif kind == 1:
        question = f"Say {name} has {a} bags of {b} {thing} and {other} brings {c} more. How many in all?"
        steps = [f"{name} has {a} * {b} = {a * b} {thing}", f"with {other} that is {a * b} + {c} = {a * b + c}"]
        result = a * b + c
    elif kind == 2:
        question = f"Say {name} has {a} {thing} and {other} has {b} more than {name}. How many together?"
        steps = [f"{other} has {a} + {b} = {a + b} {thing}", f"together they have {a + b} + {a} = {a + b + a}"]
        result = a + b + a
    else:
        question = f"Say {name} shares {a * b} {thing} among {a} friends, who have {c} each. How many has each?"
        steps = [f"{name} gives {a * b} / {a} = {b} {thing} to each", f"each has {b} + {c} = {b + c} {thing}"]
        result = b + c
    first, then = rng.choice([("First", "Then"), ("Now", "So"), ("Here", "Next,")])
    closing = rng.choice([f"The answer is {result}.", f"We get {result}.", f"Answer: {result}."])
    return Exchange(question, f"{first} {steps[0]}. {then} {steps[1]}. {closing}")


def rag(rng: Random) -> Exchange:
    """A passage of one to three facts and a question; the answer quotes the fact and adds its point.

    No word appears twice in a passage, so each word of a quotation follows from the one before.
    """
    n = rng.choice([1, 2, 2, 3])
    columns = [rng.sample(_words(kind), n) for kind in ("names", "deeds", "colors", "goods", "links", "cities")]
    facts = [*zip(*columns, strict=True)]
    fact = facts[rng.randrange(n)]
    name, _, color, thing, _, city = fact
    question, points = rng.choice(
        [
            (f"What do we know about {name}?", [f"That is all about {name}", "There is no more"]),
            (f"Which city goes with {name}?", [f"So the city is {city}", f"The city of {name} is {city}"]),
            (f"Which color goes with {name}?", [f"So the color is {color}", f"So the {thing} are {color}"]),
            (f"Which goods go with {name}?", [f"So the goods are {thing}", f"So we see {color} {thing}"]),
        ]
    )
    source = rng.choice(["The text says that", "We read that", "It says that", "In the text"])
    passage = ". ".join(" ".join(words) for words in facts)
    return Exchange(f"Read: {passage}. {question}", f"{source} {' '.join(fact)}. {rng.choice(points)}.")


_OPERATIONS = [("+", "sum"), ("-", "difference"), ("*", "product"), ("/", "ratio")]


def code(rng: Random) -> Exchange:
    """A small Python function whose names and numbers are given in the question."""
    name = f"{rng.choice(_words('verbs'))}_{rng.choice(_words('nouns'))}"
    kind = rng.randrange(4)
    number = rng.randint(2, 40)
    if kind == 0:
        first, second = rng.sample(_words("arguments"), 2)
        sign, word = rng.choice(_OPERATIONS)
        question = f"Write {name}({first}, {second}) that returns the {word} times {number}."
        answer = f"def {name}({first}, {second}):\n    {word} = {first} {sign} {second}\n    return {word} * {number}"
        return Exchange(question, answer)
    values = rng.choice(_words("lists"))
    item = values[:-1]
    question = f"Write {name}({values}) that "
    if kind == 1:
        side, sign = rng.choice([("over", ">"), ("under", "<")])
        question += f"counts the {values} {side} {number}."
        body = (
            f"    total = 0\n    for {item} in {values}:\n        if {item} {sign} {number}:\n            total += 1\n"
        )
        answer = f"def {name}({values}):\n{body}    return total"
    elif kind == 2:
        sign, word = rng.choice([("+", "plus"), ("*", "times"), ("-", "minus")])
        question += f"returns each of the {values} {word} {number}."
        answer = f"def {name}({values}):\n    return [{item} {sign} {number} for {item} in {values}]"
    else:
        call, word = rng.choice([("max", "largest"), ("min", "smallest"), ("sum", "sum"), ("len", "number")])
        question += f"returns the {word} of {values}, or {number} if empty."
        answer = f"def {name}({values}):\n    if not {values}:\n        return {number}\n    return {call}({values})"
    return Exchange(question, answer)


def records(rng: Random) -> Exchange:
    """A record written loosely, answered as valid compact JSON."""
    name, city, item = rng.choice(_words("names")), rng.choice(_words("cities")), rng.choice(_words("items"))
    color, day = rng.choice(_words("colors")), rng.choice(_words("days"))
    age, count, price = rng.randint(18, 40), rng.randint(2, 30), rng.randint(2, 30)
    record = rng.choice(
        [
            {"name": name, "age": age, "city": city, "item": item, "color": color},
            {"item": item, "color": color, "price": price, "city": city, "name": name},
            {"name": name, "item": item, "count": count, "day": day, "paid": rng.random() < 0.5},
            {"day": day, "city": city, "name": name, "price": price, "color": color},
            {"order": {"item": item, "color": color, "count": count}, "city": city, "name": name},
            {"name": name, "city": city, "day": day, "items": rng.sample(_words("items"), rng.randint(2, 3))},
        ]
    )
    answer = json.dumps(record, separators=(",", ":"))
    opening = rng.choice(["Fix this JSON:", "Make this JSON:", "Quote this JSON:"])
    return Exchange(opening + " " + answer.replace('"', ""), answer)


GENERATORS = {"chat": chat, "code": code, "math": math, "rag": rag, "json": records}


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
        messages = ({"role": "user", "content": exchange.question}, {"role": "assistant", "content": exchange.answer})
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
