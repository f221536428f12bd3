"""How the target at hand differs from the one that a head was made for, and what that means for the head."""

from dataclasses import dataclass
from typing import Any

from draftsmith.heads.target.identity import TargetIdentity

SIZES = {"vocab_size": "tokens", "hidden_size": "hidden units", "num_layers": "layers"}
KINDS = ("sizes", "config", "embeddings", "lm_head", "weights", "tokenizer", "template", "eos")
NUMBERS = ("config", "embeddings", "lm_head", "weights")
"""The kinds of differences that change what the target computes."""


@dataclass(frozen=True)
class Difference:
    """One way in which a target is not the one recorded.

    kind: one of KINDS. severity: "refuse" where a head cannot run on it, else "warn". found: what differs and what it
    means, in words that follow a name. remedy: what to do.
    """

    kind: str
    severity: str
    found: str
    remedy: str


_MEASURE = "measure the head on this target (draftsmith evaluate), and train it on if too little is accepted"
_THE_OTHER = "give the target it was made for"
_PROMPTS = "measure on prompts of your own again, or give the target its old files back"
_MEANINGS: dict[str, tuple[str, str]] = {
    "config": (
        "another configuration, so other hidden states: texts stay exact, fewer drafts may be accepted",
        _MEASURE,
    ),
    "embeddings": ("other input embeddings, which most heads read: fewer drafts may be accepted", _MEASURE),
    "lm_head": (
        "another output projection (lm_head): a head that shares it (EAGLE-1, DFlash, DSpark; Medusa and Hydra with "
        "original_lm_head) drafts through another one than it learned with",
        _MEASURE,
    ),
    "weights": ("other weights: texts stay exact, fewer drafts may be accepted", _MEASURE),
    "tokenizer": ("another tokenizer, so the same text is other tokens, and what was measured may not hold", _PROMPTS),
    "template": ("another chat template, so acceptance was measured on prompts of another form", _PROMPTS),
}
_FINE_TUNED = (
    "other weights but the same embeddings and lm_head, as after a fine-tune: texts stay exact, fewer drafts may be "
    "accepted"
)


_EARLIER = "other weights or another configuration: texts stay exact, fewer drafts may be accepted"
"""What a fingerprint alone says, which is all that earlier versions recorded."""


def compare(recorded: TargetIdentity, now: TargetIdentity) -> list[Difference]:
    """Return how `now` differs from the `recorded` target, in the order of KINDS; only what both know is compared."""
    pairs = _pairs(recorded, now)
    differ = [kind for kind in KINDS if any(_known((a, b)) and a != b for a, b in pairs[kind])]
    found = [_sizes(recorded, now)] if "sizes" in differ else []
    same_ends = all(_known(pairs[kind][0]) and kind not in differ for kind in ("embeddings", "lm_head"))
    if same_ends or _by_fingerprint(recorded, now):
        meanings = _MEANINGS | {"weights": (_FINE_TUNED if same_ends else _EARLIER, _MEASURE)}
    else:
        meanings = _MEANINGS
    for kind, (meaning, remedy) in meanings.items():
        if kind in differ and kind in NUMBERS and "sizes" in differ:
            found.append(Difference(kind, "warn", "others, as its sizes are others", _THE_OTHER))
        elif kind in differ:
            found.append(Difference(kind, "warn", meaning, remedy))
    if "eos" in differ:
        ids = f"{list(now.eos_ids or ())} instead of {list(recorded.eos_ids or ())}"
        meaning = f"other end-of-answer tokens, {ids}, so answers end elsewhere than when the head was measured"
        found.append(Difference("eos", "warn", meaning, "see that generation_config.json is the one you serve with"))
    return found


def not_compared(recorded: TargetIdentity, now: TargetIdentity) -> list[str]:
    """Return the KINDS that one of the two does not know."""
    return [kind for kind in KINDS if not any(_known(pair) for pair in _pairs(recorded, now)[kind])]


def _pairs(recorded: TargetIdentity, now: TargetIdentity) -> dict[str, list[tuple[Any, Any]]]:
    """The values to compare by kind."""
    names = {kind: [kind] for kind in KINDS} | {"sizes": list(SIZES), "template": ["chat_template"], "eos": ["eos_ids"]}
    if _by_fingerprint(recorded, now):
        names["weights"] = ["fingerprint"]  # of the configuration too
    return {kind: [(getattr(recorded, n), getattr(now, n)) for n in some] for kind, some in names.items()}


def _by_fingerprint(recorded: TargetIdentity, now: TargetIdentity) -> bool:
    return recorded.weights is None or now.weights is None


def _known(pair: tuple[Any, Any]) -> bool:
    """Whether two values can be compared: hashes of tokenizers only where they are of the same file."""
    a, b = pair
    if a is None or b is None:
        return False
    return not (isinstance(a, str) and ":" in a) or a.split(":")[0] == str(b).split(":")[0]


def _sizes(recorded: TargetIdentity, now: TargetIdentity) -> Difference:
    changed = {
        word: (getattr(recorded, name), getattr(now, name))
        for name, word in SIZES.items()
        if _known((getattr(recorded, name), getattr(now, name))) and getattr(recorded, name) != getattr(now, name)
    }
    after = ", ".join(f"{b} {word}" for word, (_, b) in changed.items())
    before = ", ".join(str(a) for a, _ in changed.values())
    return Difference("sizes", "refuse", f"{after} where the head needs {before}", _THE_OTHER)
