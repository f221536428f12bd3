"""The embedded default: conversations and a tiny Llama that was trained on them, so that the whole pipeline runs offline.

Both are part of the package (`python -m scripts.bench.embedded` trained the target). The texts are short English, Python and
JSON in five slices, made once by a program from a seed; no prompt is among the conversations. They are unpacked once and kept
outside the checkout, in $DRAFTSMITH_CACHE or ~/.cache/draftsmith.
"""

import lzma
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from draftsmith.progress import say
from draftsmith.storage import atomic_directory, claim, default_cache, sweep

_HERE = Path(__file__).parent
SHIPPED = _HERE / "target"
_FOLDER = "embedded-c9385b0d600346ec"
"""Named after what it holds: other texts need another name, or caches keep the old ones."""


@dataclass(frozen=True)
class EmbeddedDefault:
    """Paths of the default: a transformers folder, training conversations, held-out prompts."""

    target: Path
    conversations: Path
    prompts: Path


def ensure_embedded() -> EmbeddedDefault:
    """Return the embedded default; its texts are unpacked first if the cache lacks them.

    Their folder appears under its final name only when it is complete; processes that start together wait for the first of
    them. Raises UserError when the cache is not writable or the disk is full.
    """
    cache = default_cache()
    folder = cache / _FOLDER
    if not folder.exists():
        with closing(claim(cache / ".lock", wait=True, elsewhere="DRAFTSMITH_CACHE")):
            sweep(cache, levels=0)
            if not folder.exists():
                say(f"Unpacking the embedded texts in {folder} (once)")
                _write_texts(folder)
    return EmbeddedDefault(SHIPPED, folder / "conversations.jsonl", folder / "prompts.jsonl")


def _write_texts(folder: Path) -> None:
    with atomic_directory(folder, "DRAFTSMITH_CACHE") as unfinished:
        for name in ("conversations.jsonl", "prompts.jsonl"):
            (unfinished / name).write_bytes(lzma.decompress((_HERE / f"{name}.xz").read_bytes()))
