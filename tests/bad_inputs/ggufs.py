"""Bad targets in GGUF files: headers that lie, files that are cut, and files that hold something else."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gguf import GGMLQuantizationType as Kind

from draftsmith.target.gguf_file import model_folder
from tests.bad_inputs.cases import Case, Table, copied, cut, damaged, write
from tests.ggufs import write_gguf

FILE = "target.gguf"
Change = Callable[[dict[str, Any], dict[str, Any]], object]


make = copied(lambda folder: write_gguf(folder / FILE))


def read(folder: Path) -> None:
    """Open the one file in the folder, with a cache of its own outside of it."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, DRAFTSMITH_CACHE=cache):
        try:
            model_folder(str(next(iter(folder.iterdir()))))
        except Exception:
            assert {path.name for path in Path(cache).iterdir()} <= {".lock"}
            raise


def keys(name: str, words: tuple[str, ...] = (), **changes: Any) -> Case:
    """Return the case of a file with other metadata, "__" for a full stop; `...` leaves a key out."""

    def change(metadata: dict[str, Any], _: object) -> None:
        for key, value in changes.items():
            key = key.replace("__", ".")
            metadata[key] = value
            if value is ...:
                del metadata[key]

    return _case(f"keys-{name}", change, words)


def tensors(name: str, change: Callable[[dict[str, Any]], object], words: tuple[str, ...] = ()) -> Case:
    """Return the case of a file with other tensors."""
    return _case(f"tensors-{name}", lambda _, tensors: change(tensors), words)


def _case(name: str, change: Change, words: tuple[str, ...]) -> Case:
    def spoil(folder: Path) -> None:
        write_gguf(folder / FILE, change=change)

    return Case(name, spoil, words)


def patch(name: str, old: bytes, new: bytes, words: tuple[str, ...] = ()) -> Case:
    """Return the case of a file in which bytes are replaced, once."""

    def spoil(folder: Path) -> None:
        data = (folder / FILE).read_bytes()
        assert old in data
        (folder / FILE).write_bytes(data.replace(old, new, 1))

    return Case(f"bytes-{name}", spoil, (FILE, *words))


def _number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def _text(text: str) -> bytes:
    return _number(len(text)) + text.encode()


def rename(name: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: call the file something else."""
    return lambda folder: (folder / FILE).rename(folder / name)


def _unknown(metadata: dict[str, Any], _: object) -> None:
    found = {key.replace("llama.", "gpt-99."): value for key, value in metadata.items()}
    metadata.clear()
    metadata.update(found, **{"general.architecture": "gpt-99"})


_EXTRA = (np.ones((2, 32), np.float32), Kind.F32)
_ROPE = (np.linspace(1, 9, 8, dtype=np.float32), Kind.F32)
_INFO = _text("output_norm.weight") + _number(1, 4) + _number(64) + _number(0, 4)
_EMBEDDING = _text("token_embd.weight") + _number(2, 4) + _number(64)
CASES = (
    *damaged(FILE, without="missing list null word deep long-integer half-surrogate empty"),
    Case("empty", write(FILE, b""), (FILE, "no GGUF file")),
    Case("magic-alone", write(FILE, b"GGUF"), ("cut short",)),
    Case("magic", write(FILE, b"PK\3\4" + bytes(500)), ("no GGUF file",)),
    *(Case(f"cut-{share}", cut(FILE, share), ("cut short",)) for share in (0.001, 0.05, 0.3, 0.999)),
    Case("part-by-name", rename("t-00001-of-00003.gguf"), ("split", "--merge")),
    patch("version-1", b"GGUF" + _number(3, 4), b"GGUF" + _number(1, 4), ("version 1",)),
    patch("big-endian", b"GGUF" + _number(3, 4), b"GGUF" + _number(3 << 24, 4), ("big-endian",)),
    patch("text-beyond", _text("llama.block_count"), _number(2**40) + b"llama.block_count", ("beyond",)),
    patch("text-huge", _text("llama.block_count"), _number(2**64 - 1) + b"llama.block_count", ("beyond",)),
    patch("key-not-utf8", b"llama.block_count", b"llama.block_c\xff\xfe\x80t", ("UTF-8",)),
    patch("key-twice", b"ggml.bos_token_id", b"ggml.eos_token_id", ("twice",)),
    patch("type-unknown", b"llama.block_count" + _number(4, 4), b"llama.block_count" + _number(99, 4), ("type 99",)),
    patch("tensor-huge", _EMBEDDING, _EMBEDDING[:-8] + _number(2**62)),
    patch("tensor-empty", _EMBEDDING, _EMBEDDING[:-8] + _number(0)),
    patch("tensor-odd", _EMBEDDING, _EMBEDDING[:-8] + _number(65), ("Q8_0",)),
    patch("dimensions", _EMBEDDING, _EMBEDDING[:-12] + _number(9, 4) + _EMBEDDING[-8:], ("9 dimensions",)),
    patch("tensor-type", _INFO, _INFO[:-4] + _number(77, 4), ("type 77",)),
    patch("tensor-wider", _INFO, _INFO[:-4] + _number(28, 4)),
    patch("two-names", b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight", ("same name",)),
    keys("alignment", ("alignment",), general__alignment=3),
    keys("adapter", ("LoRA adapter",), general__type="adapter"),
    keys("old-adapter", ("LoRA adapter",), adapter__type="lora"),
    keys("projector", ("projector",), general__type="mmproj"),
    keys("clip", ("projector",), general__architecture="clip"),
    keys("part", ("split",), split__count=4),
    *(keys(f"head-{name}", ("draft head",), general__architecture=name) for name in ("eagle3", "dflash")),
    _case("architecture-unknown", _unknown, ("gpt-99", "not supported")),
    keys("layers-text", ("block_count",), llama__block_count="many"),
    keys("encoder", (), general__architecture="t5encoder"),
    keys("no-tokens", ("no tokenizer",), tokenizer__ggml__tokens=...),
    keys("tokenizer-unknown", ("tokenizer",), tokenizer__ggml__model="spiral"),
    keys("no-tokenizer-model", ("tokenizer",), tokenizer__ggml__model=...),
    keys("merges-odd", (), tokenizer__ggml__merges=["a b c", "d"]),
    keys("end-beyond", (), tokenizer__ggml__eos_token_id=10**6),
    *(keys(f"layers-{n}", ("block_count",), llama__block_count=n) for n in (0, 10**6)),
    keys("more-layers", (), llama__block_count=5),
    keys("fewer-layers", ("of which transformers",), llama__block_count=2),
    keys("hidden", (), llama__embedding_length=32),
    keys("hidden-huge", (), llama__embedding_length=2**31),
    keys("hidden-text", (), llama__embedding_length="wide"),
    keys("no-hidden", (), llama__embedding_length=...),
    *(
        keys(f"heads-{n}", ("attention.head_count",), llama__attention__head_count=n)
        for n in (0, "four", [], -1.5, ...)
    ),
    keys("groups", ("num_key_value_heads",), llama__attention__head_count_kv=3),
    keys("feed-forward", (), llama__feed_forward_length=33),
    keys("vocab", (), llama__vocab_size=5),
    keys("vocab-huge", (), llama__vocab_size=2**31 - 1),
    keys("eps", ("rms_norm_eps",), llama__attention__layer_norm_rms_epsilon=float("nan")),
    keys("theta", ("rope_theta",), llama__rope__freq_base=0.0),
    keys("yarn", ("rotary",), llama__rope__scaling__type="yarn"),
    tensors("none", dict.clear, ("no language model",)),
    tensors("no-embeddings", lambda found: found.pop("token_embd.weight"), ("embeddings",)),
    tensors("missing", lambda found: found.pop("blk.1.ffn_up.weight"), ("up_proj",)),
    tensors("more", lambda found: found.update({"blk.0.nextn.weight": _EXTRA}), ("of which transformers",)),
    tensors("rope-odd", lambda found: found.update({"rope_freqs.weight": _ROPE}), ("rotary",)),
    tensors("rope-long", lambda found: found.update({"rope_factors_long.weight": _ROPE}), ("rotary",)),
)
TABLE = Table("ggufs", make, read, CASES)
