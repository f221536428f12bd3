"""The embedded default: a generated corpus and a tiny Llama trained on it, so that the whole pipeline runs offline.

`ensure_embedded()` makes both once and keeps them outside the checkout, in $DRAFTSMITH_CACHE or
~/.cache/draftsmith; later calls reuse them.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded.corpus import generate_conversations, generate_prompts
from draftsmith.data.embedded.training import TrainingSettings, train_target
from draftsmith.errors import UserError
from draftsmith.files import fingerprint, write_json, write_text

EMBEDDED_VERSION = 2  # raise it when training changes in a way that the settings do not show
PROMPT_SEED_OFFSET = 1_000_003
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class EmbeddedSettings:
    """Size of the corpus, the tokenizer and the tiny target; part of the name of the cached folder."""

    conversations: int = 24_000
    """Generated conversations, all used to train the tokenizer and the target."""
    prompts_per_slice: int = 24
    """Held-out evaluation prompts per slice."""
    vocab_size: int = 1024
    """Entries of the byte-level BPE, special tokens included."""
    layers: int = 16
    """Decoder layers of the target."""
    hidden: int = 128
    """Hidden size of the target."""
    ffn: int = 384
    """Width of the feed-forward part."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key/value heads."""
    context: int = 512
    """Positions that the target accepts."""
    row_tokens: int = 128
    """Tokens per packed training row."""
    rows: int = 8
    """Rows per training step."""
    shallow_layers: int = 4
    """Layers that training starts with; the others are put between them later."""
    shallow_steps: int = 1200
    """Training steps with the first layers only."""
    steps: int = 450
    """Training steps at full depth."""
    muon_lr: float = 0.02
    """Peak learning rate of the hidden matrices."""
    adamw_lr: float = 4e-3
    """Peak learning rate of embeddings and norms."""
    weight_decay: float = 0.5
    """Weight decay of the hidden matrices. Without it the residual stream grows a thousandfold towards the last
    layers, and a draft head that reads it learns next to nothing."""
    seed: int = 0
    """Seed of corpus, initial weights and order."""


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
    training = _training_settings(settings, tokenizer)
    model = train_target(samples, training, partial / "checkpoint.pt", device, progress)

    finished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(finished, ignore_errors=True)
    try:
        model.save_pretrained(finished / "target")
        tokenizer.save_pretrained(finished / "target")
        _write_jsonl(finished / "conversations.jsonl", conversations)
        _write_jsonl(finished / "prompts.jsonl", prompts)
        write_json(finished / "settings.json", {"version": EMBEDDED_VERSION, **asdict(settings)})
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


def _training_settings(settings: EmbeddedSettings, tokenizer: PreTrainedTokenizerFast) -> TrainingSettings:
    shared = {name: value for name, value in asdict(settings).items() if name in TrainingSettings.__dataclass_fields__}
    shared["vocab_size"] = len(tokenizer)  # a small corpus may not fill the vocabulary
    return TrainingSettings(**shared, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)


def _key(settings: EmbeddedSettings) -> str:
    """Name what the folder holds: settings, version, and a sample of the corpus, so that its generators count too."""
    sample = [c.messages for c in generate_conversations(200, settings.seed)]
    return fingerprint([EMBEDDED_VERSION, asdict(settings), sample, CHAT_TEMPLATE])


def _write_jsonl(path: Path, conversations: Sequence[Conversation]) -> None:
    lines = [{"id": c.id, "slice": c.slice, "messages": list(c.messages)} for c in conversations]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)
