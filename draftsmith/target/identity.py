"""The identity of a target: what distinguishes it from others, and how it differs from the one a head was made for.

Everything is read from the files of its folder; the model is not loaded.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.target.folder import (
    EMBEDDINGS,
    SOURCE,
    find_projection,
    find_tensor,
    fingerprint_directory,
    hash_chat_template,
    hash_json,
    hash_tensor,
    hash_tokenizer,
    hash_weights,
    read_configs,
    read_directory,
    read_eos_ids,
    read_object,
    read_source,
    stable_config,
)

SCHEMA_VERSION = 1
SIZES = {"vocab_size": "tokens", "hidden_size": "hidden units", "num_layers": "layers"}
KINDS = ("sizes", "config", "embeddings", "lm_head", "weights", "tokenizer", "template", "eos")
CHANGES_OUTPUT = ("config", "embeddings", "lm_head", "weights")
"""The kinds of differences that change what the target computes."""
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
        "original_lm_head) drafts through another projection than it was trained with",
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
"""For a difference of fingerprints alone, which are all that earlier versions recorded."""


@dataclass(frozen=True)
class TargetIdentity:
    """What distinguishes targets. None: not known, and never compared.

    path: folder, Hub name or GGUF file, for people. vocab_size: rows of the output projection, padding included. fingerprint: of
    configuration and weights, see `fingerprint_directory`. config, weights, embeddings, lm_head, tokenizer, chat_template:
    hashes; tensors in the dtype as stored. tied: embeddings and lm_head are one matrix. eos_ids: sorted.
    """

    path: str | None = None
    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    fingerprint: str | None = None
    config: str | None = None
    weights: str | None = None
    embeddings: str | None = None
    lm_head: str | None = None
    tied: bool | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    eos_ids: tuple[int, ...] | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the plain object that `from_json` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Any, source: str) -> "TargetIdentity":
        """Return the identity in a JSON object; absent keys are not known, as in checkpoints of earlier versions.

        Raises UserError, which names `source`, for values that mean nothing and for a later schema version.
        """
        if not isinstance(value, dict):
            raise UserError(f"{source} is damaged: its record of the target is no JSON object; restore it.")
        if (version := value.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
            raise UserError(
                f"{source} describes its target in schema version {version}, but this draftsmith reads {SCHEMA_VERSION}: "
                "use the version of draftsmith that wrote it."
            )
        known = {field.name: value.get(field.name) for field in fields(cls)}
        return read_dataclass(cls, known | {"schema_version": version}, source)

    def completed(self, other: "TargetIdentity") -> "TargetIdentity":
        """Return this identity with its unknown fields taken from `other`."""
        return replace(self, **{f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None})


def identify_directory(folder: Path, path: str | None = None) -> TargetIdentity:
    """Return the identity of the target in `folder` from its files alone; a folder of 16 GB takes about a second.

    path: the recorded name, `folder` by default. What the folder has no files for is None. Raises UserError for
    damaged files. A folder that was made of a GGUF file has that file's.
    """
    folder = Path(folder)
    if (source := read_source(folder)) is not None:
        return replace(TargetIdentity.from_json(source, str(folder / SOURCE)), path=path or str(folder))
    raw = read_object(folder / "config.json")
    configs = read_configs(folder)
    text = configs[0] if configs else None
    spans = read_directory(folder)
    embeddings, projection = find_tensor(spans, EMBEDDINGS), find_projection(spans, folder)
    hashes = {span.name: hash_tensor(span) for span in (embeddings, projection) if span is not None}
    lm_head = hashes[projection.name] if projection else None
    return TargetIdentity(
        path=path or str(folder),
        architectures=tuple(raw["architectures"]) if raw.get("architectures") else None,
        model_type=raw.get("model_type"),
        vocab_size=projection.shape[0] if projection else getattr(text, "vocab_size", None),
        hidden_size=getattr(text, "hidden_size", None),
        num_layers=getattr(text, "num_hidden_layers", None),
        num_heads=getattr(text, "num_attention_heads", None),
        fingerprint=fingerprint_directory(folder) if raw and spans else None,
        config=hash_json(stable_config(folder)) if raw else None,
        weights=hash_weights(spans) if spans else None,
        embeddings=hashes[embeddings.name] if embeddings else None,
        lm_head=lm_head,
        tied=lm_head == hashes[embeddings.name] if embeddings and projection else None,
        tokenizer=hash_tokenizer(folder),
        chat_template=hash_chat_template(folder),
        eos_ids=read_eos_ids(folder),
    )


@dataclass(frozen=True)
class Difference:
    """One way in which a target differs from the recorded one.

    kind: one of KINDS. severity: "refuse" where a head cannot run on it, else "warn". found: what the target has and what
    that means, in words that follow "has". remedy: what to do.
    """

    kind: str
    severity: str
    found: str
    remedy: str


def compare(recorded: TargetIdentity, now: TargetIdentity) -> list[Difference]:
    """Return how `now` differs from the `recorded` target, in the order of KINDS; only what both know is compared."""
    pairs = _pairs(recorded, now)
    differ = [kind for kind in KINDS if any(_known((a, b)) and a != b for a, b in pairs[kind])]
    differences = [_sizes(recorded, now)] if "sizes" in differ else []
    same_ends = all(_known(pairs[kind][0]) and kind not in differ for kind in ("embeddings", "lm_head"))
    if same_ends or _by_fingerprint(recorded, now):
        meanings = _MEANINGS | {"weights": (_FINE_TUNED if same_ends else _EARLIER, _MEASURE)}
    else:
        meanings = _MEANINGS
    for kind, (meaning, remedy) in meanings.items():
        if kind in differ and kind in CHANGES_OUTPUT and "sizes" in differ:
            differences.append(Difference(kind, "warn", "others, as its sizes are others", _THE_OTHER))
        elif kind in differ:
            differences.append(Difference(kind, "warn", meaning, remedy))
    if "eos" in differ:
        ids = f"{list(now.eos_ids or ())} instead of {list(recorded.eos_ids or ())}"
        meaning = f"other end-of-answer tokens, {ids}, so answers end elsewhere than when the head was measured"
        remedy = "see that generation_config.json is the one you serve with"
        differences.append(Difference("eos", "warn", meaning, remedy))
    return differences


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
    """Whether two values can be compared. A hash that begins with the kind of its file is compared with the same kind only."""
    a, b = pair
    if a is None or b is None:
        return False
    return str(a).rpartition(":")[0] == str(b).rpartition(":")[0]


def _sizes(recorded: TargetIdentity, now: TargetIdentity) -> Difference:
    pairs = {word: (getattr(recorded, name), getattr(now, name)) for name, word in SIZES.items()}
    changed = {word: pair for word, pair in pairs.items() if _known(pair) and pair[0] != pair[1]}
    after = ", ".join(f"{b} {word}" for word, (_, b) in changed.items())
    before = ", ".join(str(a) for a, _ in changed.values())
    return Difference("sizes", "refuse", f"{after} where the head needs {before}", _THE_OTHER)
