"""Reading the files of a target's folder: hashes, sizes and end-of-answer tokens; no weights are loaded.

Every function returns None for what the folder has no files for. Shapes: V target vocab, Ht target hidden size.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from draftsmith.errors import UserError
from draftsmith.heads.target.fingerprint import TensorSpan

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names that architectures have for the input embeddings [V, Ht] and the output projection [V, Ht]."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""The files of a model besides configuration and weights: tokenizer, chat template, and how its answers end."""


def hash_json(value: Any) -> str:
    """Return 16 hex digits that name a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_json(file: Path) -> Any:
    """Return the value in a JSON file, None where there is no such file. Raises UserError for a damaged one."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: it is not JSON ({error}); restore it or fetch it again.") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one where there is none."""
    value = read_json(file)
    return value if isinstance(value, dict) else {}


def find_tensor(spans: Sequence[TensorSpan], names: Sequence[str]) -> TensorSpan | None:
    """Return the matrix with the first of `names` that occurs, in whatever module; of several the outermost."""
    for name in names:
        found = [s for s in spans if len(s.shape) == 2 and (s.name == name or s.name.endswith(f".{name}"))]
        if found:
            return min(found, key=lambda span: (span.name.count("."), span.name))
    return None


def find_projection(spans: Sequence[TensorSpan], folder: Path) -> TensorSpan | None:
    """Return the output projection; the embeddings where the configuration ties both or no projection is stored."""
    embeddings, projection = find_tensor(spans, EMBEDDINGS), find_tensor(spans, PROJECTIONS)
    config = read_object(folder / "config.json")
    tie = config.get("tie_word_embeddings", read_text_config(config).get("tie_word_embeddings"))
    if tie is True or (projection is None and tie is None):  # the default of several architectures
        return embeddings
    return projection


def read_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def read_configs(folder: Path) -> list[Any]:
    """Return the configuration of the language model and, after it, of the whole model, with transformers' defaults.

    A type that transformers does not know is read as it stands, without defaults.
    """
    raw = read_object(folder / "config.json")
    if not raw:
        return []
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError):
        return [_Plain(read_text_config(raw)), _Plain(raw)]
    return [config.get_text_config(decoder=True), config]


class _Plain:
    """A configuration without defaults: the keys of a dictionary as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def read_eos_ids(folder: Path) -> tuple[int, ...] | None:
    """Return the ids that end an answer, sorted: those of the generation config, else of the config."""
    return eos_ids_of(_Plain(read_object(folder / "generation_config.json")), *read_configs(folder))


def eos_ids_of(*configs: Any) -> tuple[int, ...] | None:
    """Return the `eos_token_id` of the first configuration that has one, as a sorted tuple; None where none has."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted(set(ids))) if isinstance(ids, (list, tuple)) else (int(ids),)
    return None


def hash_tokenizer(folder: Path) -> str | None:
    """Return "<kind>:<16 hex digits>" of what turns text into ids; equal kinds can be compared.

    Vocabulary, merges, added tokens, normalization, splitting, and the names of the bos and eos tokens, which chat
    templates write. What a call sets (padding, truncation), what adds tokens around a text and what decodes do not count,
    nor do the ways in which versions of the tokenizers package write the same thing.
    """
    config = read_object(folder / "tokenizer_config.json")
    names = {key: _token(folder, config, key) for key in ("bos_token", "eos_token")}
    if fast := read_object(folder / "tokenizer.json"):
        added = sorted(fast.get("added_tokens") or [], key=lambda token: token.get("id", 0))
        parts = [_plain_model(fast.get("model") or {}), added, fast.get("normalizer"), fast.get("pre_tokenizer")]
        return f"tokenizer.json:{hash_json([names, parts])}"
    added = [read_json(folder / "added_tokens.json"), config.get("added_tokens_decoder")]
    if (model := folder / "tokenizer.model").is_file():
        content = hashlib.sha256(model.read_bytes()).hexdigest()
        return f"tokenizer.model:{hash_json([names, added, content])}"
    vocab, merges = read_json(folder / "vocab.json"), folder / "merges.txt"
    if vocab is None or not merges.is_file():
        return None
    lines = [x for x in merges.read_text(encoding="utf-8").splitlines() if x and not x.startswith("#version")]
    return f"vocab.json:{hash_json([names, added, vocab, lines])}"


def _token(folder: Path, config: dict[str, Any], key: str) -> Any:
    """Return the text of a named token, which is stored as it is or as an object."""
    value = config.get(key, read_object(folder / "special_tokens_map.json").get(key))
    return value.get("content") if isinstance(value, dict) else value


def _plain_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model of a tokenizer.json without switches that are off, and each merge as one text."""
    plain = {key: value for key, value in model.items() if value not in (None, False, "")}
    if "merges" in plain:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in plain["merges"])
        plain["merges"] = ["\0".join(pair) for pair in pairs]  # one text each: hashed in half the time
    return plain


def hash_chat_template(folder: Path) -> str | None:
    """Return 16 hex digits of the chat templates by name, wherever the folder keeps them: files of their own go before
    tokenizer_config.json, as in transformers."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").is_file():
        files["default"] = default
    if files:
        return hash_json({name: file.read_text(encoding="utf-8") for name, file in files.items()})
    found = read_object(folder / "tokenizer_config.json").get("chat_template")
    if found is None:
        found = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, str):
        found = {"default": found}
    return hash_json(found) if found else None
