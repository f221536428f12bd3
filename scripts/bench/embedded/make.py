"""Make the embedded target: a tokenizer and a tiny Llama, trained on the generated corpus, as a transformers folder."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded.corpus import generate_conversations
from draftsmith.data.embedded.default import SHIPPED
from scripts.bench.embedded.training import TrainingSettings, train_target

# Ids 0 (padding), 1 and 2 (end of an answer), as TrainingSettings has them.
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class EmbeddedSettings(TrainingSettings):
    """Size of the corpus, the tokenizer and the target; the defaults are those of the shipped one."""

    conversations: int = 24_000  # generated, all used to train the tokenizer and the target


def make_target(
    folder: Path, settings: EmbeddedSettings, *, dtype: torch.dtype, device: str = "cpu", progress: bool = True
) -> None:
    """Train and write the target to `folder`, which appears when it is complete; an interrupted training goes on."""
    conversations = generate_conversations(settings.conversations, settings.seed)
    tokenizer = train_tokenizer((m["content"] for c in conversations for m in c.messages), settings.vocab_size)
    samples = tokenize_all(tokenizer, conversations, progress=progress).samples
    training = replace(settings, vocab_size=len(tokenizer))  # a small corpus may not fill the vocabulary
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    model = train_target(samples, training, partial / "checkpoint.pt", device, progress)
    finished = partial / folder.name
    model.to(dtype).save_pretrained(finished)
    tokenizer.save_pretrained(finished)
    if folder.exists():
        shutil.rmtree(folder)
    finished.rename(folder)
    shutil.rmtree(partial)


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


def main() -> int:
    """Make the shipped target again."""
    make_target(SHIPPED, EmbeddedSettings(), dtype=torch.bfloat16)
    print(SHIPPED)
    return 0
