"""Make the target that data/embedded/ ships, about four minutes on two cores: python -m scripts.bench.embedded

It is a tokenizer and a tiny Llama, trained on the embedded conversations, as a transformers folder.

The Llama is trained shallow first, then deep, with Muon for the hidden matrices and AdamW for the rest. A narrow network
of 16 layers takes long to find out that it can copy from its prompt; one of 4 layers finds it soon and at a quarter of
the cost. So training starts with a few layers and then puts new ones between them, which begin as the identity
(progressive stacking: Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking"; zero-initialised new
blocks as in LLaMA Pro, Wu et al. 2024).

Shapes: B rows, L tokens, D hidden, V vocabulary, R rows that are learned.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.batch import Tokenized, TrainBatch, lay_texts, plan_batches
from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded import SHIPPED, ensure_embedded
from draftsmith.train.schedule import Muon

# Ids 0 (padding), 1 and 2 (end of an answer), as EmbeddedSettings has them.
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WARMUP_STEPS = 20
_DECAY_SHARE = 0.5  # of the steps at full depth


@dataclass(frozen=True)
class EmbeddedSettings:
    """Sizes of corpus and target, and its training; the defaults are those of the shipped one."""

    conversations: int = 24_000  # the first so many of the embedded ones, used to train the tokenizer and the target
    vocab_size: int = 1024  # entries of the tokenizer, special tokens included
    layers: int = 16
    hidden: int = 128
    ffn: int = 384  # width of the feed-forward layers
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    row_tokens: int = 128  # tokens per packed training row
    rows: int = 8  # per training step
    shallow_layers: int = 4  # layers that training starts with
    shallow_steps: int = 1200  # training steps with these layers only
    steps: int = 450  # training steps at full depth
    muon_lr: float = 0.02  # peak learning rate of the hidden matrices
    adamw_lr: float = 4e-3  # peak learning rate of embeddings and norms
    # Of the hidden matrices. Without it the residual stream grows a thousandfold towards the last layers, and a draft
    # head that reads it learns next to nothing.
    weight_decay: float = 0.5
    seed: int = 0  # of initial weights and order
    eos_id: int = 2
    pad_id: int = 0


def make_target(folder: Path, settings: EmbeddedSettings, *, dtype: torch.dtype, progress: bool = True) -> None:
    """Train and write the target to `folder`, in place of what is there."""
    conversations = load_conversations([str(ensure_embedded().conversations)], limit=settings.conversations)
    tokenizer = train_tokenizer((m["content"] for c in conversations for m in c.messages), settings.vocab_size)
    samples = tokenize_all(tokenizer, conversations, progress=progress).samples
    training = replace(settings, vocab_size=len(tokenizer))  # a small corpus may not fill the vocabulary
    model = train_target(samples, training, progress).to(dtype)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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


def train_target(samples: Sequence[Tokenized], settings: EmbeddedSettings, progress: bool) -> LlamaForCausalLM:
    """Train from scratch on the CPU; return the model in float32, which depends on samples and settings alone."""
    threads = torch.get_num_threads()
    # The matrices are too small to share, and on a busy machine threads that wait for each other take fifty times as long.
    torch.set_num_threads(1)
    try:
        total = settings.shallow_steps + settings.steps
        model = build_model(settings, settings.shallow_layers)
        optimizers = _optimizers(model, settings)
        bar = tqdm(
            islice(batches(samples, settings), total), "embedded target", total, unit="step", disable=not progress
        )
        for step, rows in enumerate(bar):
            if step == settings.shallow_steps:
                model = grow(model, settings)
                optimizers = _optimizers(model, settings)
            loss = packed_loss(model, rows)
            loss.backward()
            # The factor on the peak rates: a warmup at either depth, constant, linear to 0 over the last part.
            deep = step - settings.shallow_steps
            warm, left = (deep if deep >= 0 else step) + 1, settings.steps - deep
            factor = min(1.0, warm / _WARMUP_STEPS, left / (_DECAY_SHARE * settings.steps))
            for optimizer, peak in zip(optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if step % 10 == 9:
                bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        return model.eval()
    finally:
        torch.set_num_threads(threads)


def build_model(settings: EmbeddedSettings, layers: int) -> LlamaForCausalLM:
    """Make an untrained target of `layers` layers in float32; every layer starts as the identity."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden,
        intermediate_size=settings.ffn,
        num_hidden_layers=layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=settings.eos_id,
        pad_token_id=settings.pad_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.generation_config = GenerationConfig(eos_token_id=settings.eos_id, pad_token_id=settings.pad_id)
    return model


def grow(shallow: LlamaForCausalLM, settings: EmbeddedSettings) -> LlamaForCausalLM:
    """Return a target of full depth that computes what `shallow` computes: its layers, evenly spread, between new ones."""
    model = build_model(settings, settings.layers)
    model.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, layer in enumerate(shallow.model.layers):
        place = index * settings.layers // len(shallow.model.layers)
        model.model.layers[place].load_state_dict(layer.state_dict())
    return model


def packed_loss(model: LlamaForCausalLM, rows: TrainBatch) -> Tensor:
    """Return the mean cross entropy of the tokens to learn.

    transformers reads the document borders from the positions that restart, so documents of a row do not
    see each other.
    """
    hidden_BLD = model.model(input_ids=rows.ids, position_ids=rows.position, use_cache=False).last_hidden_state
    learn = rows.mask[:, 1:]
    logits_RV = model.lm_head(hidden_BLD[:, :-1][learn]).float()
    return F.cross_entropy(logits_RV, rows.ids[:, 1:][learn])


def batches(samples: Sequence[Tokenized], settings: EmbeddedSettings) -> Iterator[TrainBatch]:
    """Yield batches of whole documents for ever, each document once per epoch."""
    lengths = [len(sample.ids) for sample in samples]
    for epoch in count():
        for plan in plan_batches(
            lengths, row_tokens=settings.row_tokens, rows=settings.rows, seed=settings.seed, epoch=epoch
        ):
            yield lay_texts([[(samples[i].ids, samples[i].mask) for i in row] for row in plan], settings.row_tokens)


def _optimizers(model: LlamaForCausalLM, settings: EmbeddedSettings) -> list[torch.optim.Optimizer]:
    """Make a model ready to be trained; return its optimizers, Muon first."""
    model.train()
    model.set_attn_implementation("eager")  # on a CPU, backward through sdpa takes several times as long
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in name]
    assert len(matrices) + len(others) == sum(1 for _ in model.parameters())
    muon = Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95)
    return [muon, torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)]


def main() -> int:
    """Make the shipped target again."""
    make_target(SHIPPED, EmbeddedSettings(), dtype=torch.bfloat16)
    print(SHIPPED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
