"""The embedded default: a generated corpus and a tiny Llama trained on it, so that the whole pipeline runs offline.

`ensure_embedded()` makes both once and keeps them outside the checkout, in $DRAFTSMITH_CACHE or
~/.cache/draftsmith; later calls reuse them.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded.corpus import generate_conversations, generate_prompts
from draftsmith.data.embedded.training import TrainingSettings, train_target
from draftsmith.errors import UserError
from draftsmith.files import fingerprint, write_json, write_text

EMBEDDED_VERSION = 2  # raise it when training changes in a way that the settings do not show
PROMPT_SEED_OFFSET = 1_000_003
# Ids 0 (padding), 1 and 2 (end of an answer), as TrainingSettings has them.
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class EmbeddedSettings(TrainingSettings):
    """Size of the corpus, the tokenizer and the tiny target; part of the name of the cached folder."""

    conversations: int = 24_000  # generated, all used to train the tokenizer and the target
    prompts_per_slice: int = 24  # held out, for evaluation

    @property
    def inputs(self) -> dict[str, Any]:
        """The settings that the files depend on: the tokenizer's own ids are always the same."""
        return {key: value for key, value in asdict(self).items() if key not in ("eos_id", "pad_id")}


@dataclass(frozen=True)
class EmbeddedDefault:
    """Paths of the finished default: a transformers folder, training conversations, evaluation prompts."""

    target: Path
    conversations: Path
    prompts: Path


def default_cache() -> Path:
    """Return $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def ensure_embedded(
    cache: Path | None = None,
    *,
    device: str = "cpu",
    progress: bool = True,
    settings: EmbeddedSettings | None = None,
) -> EmbeddedDefault:
    """Return the embedded default, made first if `cache` (default: default_cache()) does not hold it yet.

    Training takes a few minutes on two cores; an interrupted one continues from its last checkpoint.
    The folder appears under its final name only when it is complete. Raises UserError when the cache
    is not writable or the disk is full.
    """
    settings = settings or EmbeddedSettings()
    folder = (cache or default_cache()) / f"embedded-{_key(settings)}"
    if folder.exists():
        _say(f"Reusing the embedded target and corpus in {folder}", progress)
    else:
        _say(f"Making the embedded corpus and target in {folder} (once; a few minutes)", progress)
        try:
            _make(folder, settings, device, progress)
        except OSError as error:
            raise UserError(
                f"Cannot write the embedded default to {folder}: {error.strerror}; free some space or set "
                "DRAFTSMITH_CACHE to another folder, then run the same command again."
            ) from error
        _say(f"The embedded target and corpus are ready in {folder}", progress)
    return EmbeddedDefault(folder / "target", folder / "conversations.jsonl", folder / "prompts.jsonl")


def _make(folder: Path, settings: EmbeddedSettings, device: str, progress: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    conversations = generate_conversations(settings.conversations, settings.seed)
    prompts = generate_prompts(settings.prompts_per_slice, settings.seed + PROMPT_SEED_OFFSET)
    tokenizer = train_tokenizer((m["content"] for c in conversations for m in c.messages), settings.vocab_size)
    samples = tokenize_all(tokenizer, conversations, progress=progress).samples
    training = replace(settings, vocab_size=len(tokenizer))  # a small corpus may not fill the vocabulary
    model = train_target(samples, training, partial / "checkpoint.pt", device, progress)

    finished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(finished, ignore_errors=True)
    try:
        model.save_pretrained(finished / "target")
        tokenizer.save_pretrained(finished / "target")
        for name, rows in (("conversations", conversations), ("prompts", prompts)):
            lines = [{"id": c.id, "slice": c.slice, "messages": list(c.messages)} for c in rows]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(finished / f"{name}.jsonl", text)
        write_json(finished / "settings.json", {"version": EMBEDDED_VERSION, **settings.inputs})
        if not folder.exists():  # another process may have been faster; its result is the same
            finished.rename(folder)
    finally:
        shutil.rmtree(finished, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`; ChatML template, end of answer `<|im_end|>` (id 2)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*texts, "system", "user", "assistant"], trainer)
    end_of_text, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=end_of_text,
        eos_token=end,
        additional_special_tokens=[start],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _key(settings: EmbeddedSettings) -> str:
    """Name what the folder holds: settings, version, and a sample of the corpus, so that its generators count too."""
    sample = [c.messages for c in generate_conversations(200, settings.seed)]
    return fingerprint([EMBEDDED_VERSION, settings.inputs, sample, CHAT_TEMPLATE])


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)
