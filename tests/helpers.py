"""A small byte-level BPE tokenizer around any chat template, template texts like those of known models, and signals that are heard."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.load import Conversation
from tests.models import tiny_model

PAD, EOS = "<|endoftext|>", "<|im_end|>"
_SPECIAL = (PAD, "<|im_start|>", EOS, "<s>", "</s>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>")
_WORDS = (  # how Llama 3 and Qwen cut text before merging
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words of the tests, so that some tokens are longer than a byte; line breaks merge, as in real vocabularies.
_CORPUS = [
    "What is two plus two? Two plus two is four. And three more? That makes seven, said the assistant.\n\n",
    "You are a helpful assistant. The user asks\n\nthe model answers\n\nI think so\n\nsystem user assistant tool\n",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks the header and the line break after the turn too, as some published templates do.
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3: thinking is dropped from earlier turns, and the last turn always carries a think block.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "<s>{% for m in messages %}{{ '[' + m.role + ']\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
GEMMA = (
    "<s>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Like gpt-oss: a turn ends in <|end|>, but in the eos token where it is the last.
GPT_OSS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<channel>final{% endif %}<message>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|im_end|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# Like Mistral: no header before an answer, and no special token but </s>.
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = CHATML, *, eos: str = EOS) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 360 tokens with `template`; id 0 pads, id 2 is <|im_end|>."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token=eos, pad_token=PAD, bos_token=PAD
    )
    tokenizer.chat_template = template
    return tokenizer


def save_target(folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save a tiny Llama and the tokenizer, whose vocabulary it has; return the model. overrides: keys of its config."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", **{"vocab_size": len(tokenizer), **overrides})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def write_rows(path: Path, *rows: Any) -> str:
    """Write rows as JSON Lines, a text as it stands, and return the file's name."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def talk(
    *contents: str, roles: tuple[str, ...] = ("user", "assistant"), system: str | None = None, id: str = "talk"
) -> Conversation:
    """A conversation of `contents`, its roles taking turns."""
    messages = [{"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(id, "chat", tuple(messages))


def runs(tokenizer: PreTrainedTokenizerFast, sample: Tokenized) -> list[tuple[bool, str]]:
    """(supervised, text) of each run of equal mask: every turn boundary, readable."""
    pairs = zip(sample.ids.tolist(), sample.mask.tolist(), strict=True)
    grouped = [(bit, [token for token, _ in run]) for bit, run in groupby(pairs, key=lambda pair: pair[1])]
    return [(bit, tokenizer.decode(ids, skip_special_tokens=False)) for bit, ids in grouped]


def learnt(tokenizer: PreTrainedTokenizerFast, sample: Tokenized) -> list[str]:
    """The texts to learn."""
    return [text for bit, text in runs(tokenizer, sample) if bit]


@contextmanager
def hearing_signals() -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP heard, also where the tests were started in the background or under nohup; a decorator, too."""
    usual = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, before in usual.items():
            signal.signal(number, before)
