"""The generated corpus of the embedded default: five slices of short English, Python and JSON.

chat is open (many word choices), math short chains of real arithmetic, rag answers with spans of a passage, code and json
are formulaic with values copied from the question. Everything follows from a seed, nothing is downloaded. A hash of the
question decides whether an exchange is for training or held out, so prompts never overlap conversations, whatever the
counts and seeds.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from draftsmith.data.conversations.load import Conversation

# Shares of all tokens: rag and json teach copying, which takes a tiny target the longest.
TOKEN_SHARES = {"chat": 0.13, "code": 0.12, "math": 0.15, "rag": 0.38, "json": 0.22}
_HELD_OUT_ONE_IN = 20
_TEMPLATE_TOKENS = 10  # what ChatML adds around a question and its answer
_WORD = re.compile(r"\w+|[^\w\s]+|\n")

# Most words are short and few, so that a byte-level BPE of about a thousand entries holds them in one token: a tiny target
# then learns to copy them from the prompt within a million tokens.
NAMES = ["Ada", "Ben", "Dan", "Eva", "Finn", "Ivy", "Kai", "Lena", "Max", "Sam", "Tom", "Zoe"]
CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Accra", "Sofia", "Bonn", "Riga", "Turin"]
ITEMS = [
    "lamp",
    "map",
    "key",
    "cup",
    "book",
    "coin",
    "rope",
    "drum",
    "kite",
    "vase",
    "bell",
    "clock",
    "ring",
    "hat",
    "box",
    "pen",
]
COLORS = ["red", "blue", "green", "gold", "black", "white", "gray", "pink"]
GOODS = ["lamps", "maps", "keys", "cups", "books", "coins", "drums", "kites", "bells", "clocks", "rings", "hats"]
DEEDS = ["hid", "sold", "found", "lost", "took", "made", "saw", "kept"]
LINKS = ["in", "near", "from", "by", "past", "around"]
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]
FRUITS = ["apples", "pears", "plums", "figs", "lemons", "melons"]
# Code: verbs and nouns make function names; arguments are what a person would call two numbers or a list.
VERBS = ["get", "find", "make", "count", "check", "scale", "mix", "load"]
NOUNS = ["cost", "area", "rate", "score", "size", "speed", "weight", "price", "level", "total"]
ARGUMENTS = ["width", "height", "left", "right", "base", "step", "first", "last", "low", "high"]
LISTS = ["items", "rows", "marks", "prices", "words", "scores"]
# Chat: every slot of a template is one of these, separated by semicolons; options may hold slots themselves.
CHAT: dict[str, list[str]] = {
    slot: options.split("; ")
    for slot, options in {
        "adj": "small; quiet; big; bright; warm; cold; soft; wild; kind; brave; slow; strange; sweet; dark; tiny; "
        "calm; lazy; proud; shy",
        "animal": "fox; bat; cat; dog; bear; horse; crow; frog; hare; wolf; bee; goat",
        "place": "river; forest; garden; tower; lake; hill; mill; cave; road; shop; yard; hall",
        "thing": "lamp; map; key; bell; coin; ring; stone; boat; song; door; seed; star; book; hat",
        "time": "morning; evening; night; winter; summer; spring; autumn; day",
        "found": "found; saw; lost; hid; heard about; dreamed of; carried; drew",
        "moved": "walked; ran; sailed; climbed; wandered; went; crept; raced",
        "felt": "felt; was; became; stayed",
        "mood": "happy; sad; funny; short; strange; quiet; sweet; scary",
        "end": "and slept until the {time}; and sang to the {animal}; and gave the {thing} away; "
        "but never told the {animal}; and {felt} {adj} again; while the {animal} laughed; "
        "and forgot the {thing}; but the {place} {felt} {adj}; and {moved} back to the {place}; "
        "because the {time} {felt} {adj}",
        "food": "rice; beans; eggs; corn; fish; bread; plums; pears",
        "dish": "soup; stew; salad; pie; pasta; roast",
        "spice": "salt; pepper; garlic; honey; butter; mint; chili",
        "heat": "fry; bake; boil; roast; steam; grill",
        "feeling": "tired; sad; bored; lost; cross; shy; stuck; sick; lonely",
        "person": "friend; sister; brother; mother; father; uncle; aunt; boss",
        "hobby": "chess; drawing; running; cooking; reading; sailing; painting; fishing; hiking; singing",
        "act": "take a {adj} walk by the {place}; call your {person}; drink some {adj} tea; "
        "write a {adj} letter to your {person}; try a bit of {hobby}; read a {adj} book; "
        "rest until the {time}; cook a {adj} {dish}; visit the {place} with your {person}; "
        "listen to a {adj} song",
        "sorry": "Sorry to hear that.; That happens.; I understand.; Be kind to yourself.; It will pass.",
        "maybe": "You could; Maybe; I would; Perhaps; First,; Today,; Just; Why not",
        "then": "then; and later; or; and; and maybe; but first",
        "gift": "a {adj} {thing}; a {adj} book about {hobby}; a box of {adj} {food}; a {hobby} class; a {adj} trip",
        "reason": "it makes the {time} feel {adj}; a {person} who likes {hobby} needs it; it is {adj} and {adj}; "
        "nobody forgets a {adj} {thing}; every {person} loves a {adj} {thing}; it goes well with {hobby}",
    }.items()
}

_QUOTE = '"'
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Exchange:
    """One question and the answer to it."""

    question: str
    answer: str


def expand(rng: Random, template: str, bound: dict[str, str]) -> str:
    """Fill `{slot}` from `bound`, else with a random option of CHAT, until no slot is left."""
    while match := _SLOT.search(template):
        word = bound.get(match[1]) or rng.choice(CHAT[match[1]])
        template = template[: match.start()] + word + template[match.end() :]
    return template


# Question, then answers. Slots in capitals are drawn once and shared by the two.
_CHAT_TOPICS: list[tuple[str, list[str]]] = [
    (
        "Tell me a {MOOD} story about a {ADJ} {ANIMAL}.",
        [
            "Once a {ADJ} {ANIMAL} {moved} to the {adj} {place}. One {time} it {found} a {adj} {thing} {end}.",
            "The {ANIMAL} lived near a {adj} {place}. It {found} the {adj} {thing} {end}.",
            "One {adj} {time} the {ADJ} {ANIMAL} {found} a {thing}. It {moved} to the {place} {end}.",
            "There was a {MOOD} {ANIMAL} by the {place}. It {felt} {adj} that {time} {end}.",
        ],
    ),
    (
        "What can I cook with {FOOD} and {OTHER} this {TIME}?",
        [
            "Try a {adj} {dish}. {Heat} the {FOOD} with {spice}, add {OTHER} and {spice}, {then} {heat} some {food}.",
            "{maybe} {heat} the {OTHER} with {spice} and {food}, {then} make a {adj} {dish} for your {person}.",
            "A {adj} {dish} with {FOOD} is good in the {TIME}. Add {spice}, {OTHER} and a bit of {spice}.",
        ],
    ),
    (
        "I feel {FEELING} this {TIME}. What can I do about my {PERSON}?",
        [
            "{sorry} {maybe} {act}, {then} {act}.",
            "{maybe} {act}. A {FEELING} {TIME} can be {adj} with a {adj} {person}.",
            "{sorry} When I feel {FEELING} I {act}, {then} {act}.",
        ],
    ),
    (
        "Suggest a {ADJ} gift for my {PERSON} who likes {HOBBY}.",
        [
            "{maybe} buy {gift}, because {reason}.",
            "Your {PERSON} may like {gift} or {gift}, since {reason}.",
            "If {HOBBY} makes them {adj}, try {gift}. I think {reason}.",
        ],
    ),
    (
        "Write a line about a {ADJ} {TIME} by the {PLACE}.",
        [
            "The {PLACE} {felt} {adj}, the {animal} {moved} by, {end}.",
            "A {adj} {thing}, a {adj} {animal}, and the {adj} {PLACE} {felt} {adj} in the {TIME}.",
            "In the {TIME} a {animal} {found} a {adj} {thing} {end}.",
        ],
    ),
    (
        "How do I start {HOBBY} with my {PERSON} in {TIME}?",
        [
            "Find a {adj} {place} and a {adj} {thing}. {maybe} {act}, {then} {act}.",
            "{maybe} ask a {adj} {person} about {HOBBY}, {then} {act}.",
            "Start {HOBBY} on a {adj} {time}. {maybe} {act} {then} {act}.",
        ],
    ),
]


def chat(rng: Random) -> Exchange:
    """Advice and little stories: many words would do at every step."""
    question, answers = rng.choice(_CHAT_TOPICS)
    shared = {word: rng.choice(CHAT["food" if word == "OTHER" else word.lower()]) for word in _SLOT.findall(question)}
    shared["Heat"] = rng.choice(CHAT["heat"]).capitalize()
    answer = expand(rng, rng.choice(answers), shared)
    return Exchange(expand(rng, question, shared), answer)


def math(rng: Random) -> Exchange:
    """Two steps of arithmetic on small numbers, each written out, then the answer."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(FRUITS)
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
    names, deeds, colors = rng.sample(NAMES, n), rng.sample(DEEDS, n), rng.sample(COLORS, n)
    goods, links, cities = rng.sample(GOODS, n), rng.sample(LINKS, n), rng.sample(CITIES, n)
    facts = [" ".join(words) for words in zip(names, deeds, colors, goods, links, cities, strict=True)]
    i = rng.randrange(n)
    name, color, thing, city = names[i], colors[i], goods[i], cities[i]
    question, points = rng.choice(
        [
            (f"What do we know about {name}?", [f"That is all about {name}", "There is no more"]),
            (f"Which city goes with {name}?", [f"So the city is {city}", f"The city of {name} is {city}"]),
            (f"Which color goes with {name}?", [f"So the color is {color}", f"So the {thing} are {color}"]),
            (f"Which goods go with {name}?", [f"So the goods are {thing}", f"So we see {color} {thing}"]),
        ]
    )
    source = rng.choice(["The text says that", "We read that", "It says that", "In the text"])
    return Exchange(f"Read: {'. '.join(facts)}. {question}", f"{source} {facts[i]}. {rng.choice(points)}.")


_OPERATIONS = [("+", "sum"), ("-", "difference"), ("*", "product"), ("/", "ratio")]


def code(rng: Random) -> Exchange:
    """A small Python function whose names and numbers are given in the question."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    kind = rng.randrange(4)
    number = rng.randint(2, 40)
    if kind == 0:
        first, second = rng.sample(ARGUMENTS, 2)
        sign, word = rng.choice(_OPERATIONS)
        question = f"Write {name}({first}, {second}) that returns the {word} times {number}."
        answer = f"def {name}({first}, {second}):\n    {word} = {first} {sign} {second}\n    return {word} * {number}"
        return Exchange(question, answer)
    values = rng.choice(LISTS)
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
    name, city, item = rng.choice(NAMES), rng.choice(CITIES), rng.choice(ITEMS)
    color, day = rng.choice(COLORS), rng.choice(DAYS)
    age, count, price = rng.randint(18, 40), rng.randint(2, 30), rng.randint(2, 30)
    record = rng.choice(
        [
            {"name": name, "age": age, "city": city, "item": item, "color": color},
            {"item": item, "color": color, "price": price, "city": city, "name": name},
            {"name": name, "item": item, "count": count, "day": day, "paid": rng.random() < 0.5},
            {"day": day, "city": city, "name": name, "price": price, "color": color},
            {"order": {"item": item, "color": color, "count": count}, "city": city, "name": name},
            {"name": name, "city": city, "day": day, "items": rng.sample(ITEMS, rng.randint(2, 3))},
        ]
    )
    answer = json.dumps(record, separators=(",", ":"))
    opening = rng.choice(["Fix this JSON:", "Make this JSON:", "Quote this JSON:"])
    return Exchange(f"{opening} {answer.replace(_QUOTE, '')}", answer)


GENERATORS: dict[str, Callable[[Random], Exchange]] = {
    "chat": chat,
    "code": code,
    "math": math,
    "rag": rag,
    "json": records,
}


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
