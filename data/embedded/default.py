"""The embedded default: a generated corpus and a tiny Llama that was trained on it, so that the whole pipeline runs offline.

The target is part of the package (`python -m scripts.bench.embedded` trained it); conversations and prompts are generated
once and kept outside the checkout, in $DRAFTSMITH_CACHE or ~/.cache/draftsmith.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.embedded.corpus import generate_conversations, generate_prompts
from draftsmith.progress import say
from draftsmith.storage import atomic_directory, claim, default_cache, fingerprint, sweep

SHIPPED = Path(__file__).parent / "target"
CONVERSATIONS, PROMPTS_PER_SLICE = 24_000, 24
SEED, PROMPT_SEED = 0, 1_000_003


@dataclass(frozen=True)
class EmbeddedDefault:
    """Paths of the default: a transformers folder, training conversations, held-out prompts."""

    target: Path
    conversations: Path
    prompts: Path


def ensure_embedded() -> EmbeddedDefault:
    """Return the embedded default; its texts are generated first if the cache lacks them.

    Their folder appears under its final name only when it is complete; processes that start together wait for the first of
    them. Raises UserError when the cache is not writable or the disk is full.
    """
    cache = default_cache()
    folder = cache / f"embedded-{_key()}"
    if not folder.exists():
        with closing(claim(cache / ".lock", wait=True, elsewhere="DRAFTSMITH_CACHE")):
            sweep(cache, levels=0)
            if not folder.exists():
                say(f"Generating the embedded corpus in {folder} (once)")
                _write_texts(folder)
    return EmbeddedDefault(SHIPPED, folder / "conversations.jsonl", folder / "prompts.jsonl")


def _write_texts(folder: Path) -> None:
    texts = {
        "conversations": generate_conversations(CONVERSATIONS, SEED),
        "prompts": generate_prompts(PROMPTS_PER_SLICE, PROMPT_SEED),
    }
    with atomic_directory(folder, "DRAFTSMITH_CACHE") as unfinished:
        for name, rows in texts.items():
            lines = [{"id": c.id, "slice": c.slice, "messages": list(c.messages)} for c in rows]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (unfinished / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _key() -> str:
    """Name what the folder holds: its sizes, and a sample of the corpus, so that the generators count too."""
    sample = [c.messages for c in generate_conversations(200, SEED)]
    return fingerprint([CONVERSATIONS, PROMPTS_PER_SLICE, sample])
