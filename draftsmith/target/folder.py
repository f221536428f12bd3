"""Read a target's folder without loading its weights: hashes of weights, configuration, tokenizer and chat template, sizes, and the
tokens that end an answer.

Functions return None where the folder lacks the files, except those of the weights. Shapes: V target vocab, Ht target
hidden size.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

import draftsmith.foreign.text as foreign
from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import read_bytes, read_text
from draftsmith.foreign.weights import TensorSpan, read_header, read_index
from draftsmith.storage import sha256_file
from draftsmith.target.config import check_config_values

FETCH = "restore it or fetch it again"
_TARGET = "fetch the target again"

FULL_HASH_BYTES = 200_000_000
SAMPLES_PER_TENSOR = 64
SAMPLE_BYTES = 256

# Keys of config.json that change no number the model computes.
VOLATILE_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "output_attentions", "output_hidden_states", "return_dict"}
    | {"torch_dtype", "transformers_version", "use_cache"}
)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names that architectures have for the input embeddings [V, Ht] and the output projection [V, Ht]."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""The files of a model besides configuration and weights: tokenizer, chat template, and how its answers end."""


SOURCE = "gguf.source"
"""A file in a folder of the cache that names the GGUF file which the folder was made from. Not .json: exports copy those."""


def local_folder(path: str) -> Path | None:
    """Return a local folder of that path, or of that Hub name in this machine's cache; None where there is none."""
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no Hub name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def hash_json(value: Any) -> str:
    """Return 16 hex digits that name a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_json(file: Path) -> Any:
    """Return the value in a JSON file, None where there is no such file. Raises UserError for a damaged one."""
    return foreign.read_json(file, FETCH, infinite=True) if os.path.lexists(file) else None


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one where there is no such file. Raises UserError for a damaged one."""
    return foreign.read_object(file, FETCH, infinite=True) if os.path.lexists(file) else {}


def find_tensor(spans: Sequence[TensorSpan], names: Sequence[str]) -> TensorSpan | None:
    """Return the matrix with the first of `names` that any module has; of several modules the outermost."""
    for name in names:
        matrices = [s for s in spans if len(s.shape) == 2 and (s.name == name or s.name.endswith(f".{name}"))]
        if matrices:
            return min(matrices, key=lambda span: (span.name.count("."), span.name))
    return None


def find_projection(spans: Sequence[TensorSpan], folder: Path) -> TensorSpan | None:
    """Return the output projection; the embeddings where the configuration ties both or no projection is stored."""
    embeddings, projection = find_tensor(spans, EMBEDDINGS), find_tensor(spans, PROJECTIONS)
    config = read_object(folder / "config.json")
    tie = config.get("tie_word_embeddings", read_text_config(config).get("tie_word_embeddings"))
    if tie is True or (projection is None and tie is None):  # the default of several architectures
        return embeddings or projection
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
        with foreign_code(f"The configuration in {folder} cannot be read", FETCH):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            return [config.get_text_config(decoder=True), config]
    except UserError:
        return [SimpleNamespace(**read_text_config(raw)), SimpleNamespace(**raw)]


def read_eos_ids(folder: Path) -> tuple[int, ...] | None:
    """Return the ids that end an answer, sorted: those of the generation config, else of the config."""
    generation = read_object(folder / "generation_config.json")
    check_config_values(generation, folder / "generation_config.json", FETCH)
    return eos_ids_of(SimpleNamespace(**generation), *read_configs(folder))


def eos_ids_of(*configs: Any) -> tuple[int, ...] | None:
    """Return the `eos_token_id` of the first configuration that has one, as a sorted tuple; None where none has."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted(set(ids))) if isinstance(ids, (list, tuple)) else (int(ids),)
    return None


def hash_tokenizer(folder: Path) -> str | None:
    """Return "<kind>:<16 hex digits>" of all that decides which ids a text becomes, None where the folder has no tokenizer. Only
    hashes of one kind can be compared.

    Left out are what a call may set (padding, truncation), the tokens put around a text, and decoding. Files that two versions of
    the tokenizers package write for the same tokenizer have the same hash.
    """
    with foreign_code(f"The tokenizer's files in {folder} are damaged", FETCH):
        config = read_object(folder / "tokenizer_config.json")
        names = {key: _token(folder, config, key) for key in ("bos_token", "eos_token")}
        if fast := read_object(folder / "tokenizer.json"):
            added = sorted(fast.get("added_tokens") or [], key=lambda token: token.get("id", 0))
            # Without switches that are off.
            plain = {key: value for key, value in (fast.get("model") or {}).items() if value not in (None, False, "")}
            if "merges" in plain:
                pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in plain["merges"])
                plain["merges"] = ["\0".join(pair) for pair in pairs]  # one text each: hashed in half the time
            parts = [plain, added, fast.get("normalizer"), fast.get("pre_tokenizer")]
            return f"tokenizer.json:{hash_json([names, parts])}"
        added = [read_json(folder / "added_tokens.json"), config.get("added_tokens_decoder")]
        if (model := folder / "tokenizer.model").is_file():
            content = hashlib.sha256(read_bytes(model, FETCH)).hexdigest()
            return f"tokenizer.model:{hash_json([names, added, content])}"
        vocab, merges = read_json(folder / "vocab.json"), folder / "merges.txt"
        if vocab is None or not merges.is_file():
            return None
        lines = [x for x in read_text(merges, FETCH).splitlines() if x and not x.startswith("#version")]
        return f"vocab.json:{hash_json([names, added, vocab, lines])}"


def _token(folder: Path, config: dict[str, Any], key: str) -> Any:
    """Return the text of a named token, which is stored as it is or as an object."""
    value = config.get(key, read_object(folder / "special_tokens_map.json").get(key))
    return value.get("content") if isinstance(value, dict) else value


def hash_chat_template(folder: Path) -> str | None:
    """Return 16 hex digits of the chat templates by name, wherever the folder keeps them: files of their own go before
    tokenizer_config.json, as in transformers."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").is_file():
        files["default"] = default
    if files:
        return hash_json({name: read_text(file, FETCH) for name, file in files.items()})
    templates = read_object(folder / "tokenizer_config.json").get("chat_template")
    if templates is None:
        templates = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(templates, list):
        with foreign_code(f"The chat templates in {folder} are damaged", FETCH):
            templates = {entry["name"]: entry["template"] for entry in templates}
    if isinstance(templates, str):
        templates = {"default": templates}
    return hash_json(templates) if templates else None


def fingerprint_directory(directory: Path) -> str:
    """Return 16 hex digits that name the model in `directory` (config.json + *.safetensors); of one that was made of a GGUF file,
    that file's.

    Weights under 200 MB are hashed in full; of larger ones every tensor contributes its name, dtype, shape and 64 evenly spaced
    pieces of 256 bytes (both ends included), so that any real training step shows while an 8B model costs well under a second.
    Raises UserError for a damaged or missing weight file.
    """
    if (source := read_source(directory)) is not None:
        return source["fingerprint"]
    spans = read_directory(directory)
    return hash_weights(spans, json.dumps(stable_config(directory), sort_keys=True).encode())


def read_source(directory: Path) -> dict[str, Any] | None:
    """Return the identity of the GGUF file that a folder was made from, as JSON; None for any other folder, and where the folder
    was changed or damaged since."""
    try:
        record = read_object(directory / SOURCE)
        return record["identity"] if record and record["contents"] == describe_contents(directory) else None
    except (UserError, KeyError):
        return None


def describe_contents(directory: Path) -> dict[str, str]:
    """Return a hash for each file in a folder by its name; all weights have one, under "weights"."""
    weights = {file.name for file in weight_files(directory)}
    others = {file.name: sha256_file(file) for file in directory.iterdir() if file.name not in (SOURCE, *weights)}
    return {"weights": hash_weights(read_directory(directory)), **others}


def hash_weights(spans: Sequence[TensorSpan], before: bytes = b"") -> str:
    """Return 16 hex digits that name the bytes `before` and the tensors after them. Each tensor adds its name, dtype and shape, and
    its bytes in full or in pieces, as in `fingerprint_directory`."""
    digest, everything = hashlib.sha256(before), sum(span.size for span in spans) <= FULL_HASH_BYTES
    with ExitStack() as stack:
        handles: dict[Path, BinaryIO] = {}
        for span in spans:
            if span.file not in handles:
                handles[span.file] = stack.enter_context(span.file.open("rb"))
            digest.update(f"{span.name} {span.dtype} {span.shape}\n".encode())
            for start, size in _pieces(span.size, everything):
                handles[span.file].seek(span.start + start)
                digest.update(handles[span.file].read(size))
    return digest.hexdigest()[:16]


def hash_tensor(span: TensorSpan) -> str:
    """Return 16 hex digits that name one tensor as stored, whatever its name; hashed in full if it is small itself."""
    return hash_weights([replace(span, name="")])


def read_directory(directory: Path) -> list[TensorSpan]:
    """Return the tensors of the weights in `directory` by name. Raises UserError for a damaged or missing weight file, and where two
    files hold one tensor with other values."""
    found = (span for file in weight_files(directory) for span in read_header(file, _TARGET))
    spans = sorted(found, key=lambda span: span.name)
    for one, other in itertools.pairwise(spans):
        if one.name == other.name and hash_tensor(one) != hash_tensor(other):
            raise UserError(
                f"{one.file} and {other.file.name} beside it both hold the tensor {one.name}, with other values: {_TARGET}."
            )
    return spans


def weight_files(directory: Path, *, partly: bool = False) -> list[Path]:
    """Return the safetensors files that from_pretrained would read; empty where there are none. partly: those of an index may be
    missing."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    return [directory / name for name in sorted(set(read_index(index, _TARGET, partly=partly).values()))]


def _pieces(size: int, everything: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the pieces to hash of a tensor of `size` bytes."""
    if everything or size <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        step = 1 << 24
        yield from ((start, min(step, size - start)) for start in range(0, size, step))
        return
    for i in range(SAMPLES_PER_TENSOR):
        yield (size - SAMPLE_BYTES) * i // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES


def stable_config(directory: Path) -> Any:
    """Return config.json without VOLATILE_KEYS, at every depth."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if key not in VOLATILE_KEYS}
        return value

    return clean(foreign.read_json(directory / "config.json", _TARGET, infinite=True))
