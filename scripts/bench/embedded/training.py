"""Train the embedded default's tiny Llama: shallow first, then deep; Muon for the hidden matrices, AdamW for the rest.

A narrow network of 16 layers takes long to find out that it can copy from its prompt; one of 4 layers finds it
soon and at a quarter of the cost. So training starts with a few layers and then puts new ones between them, which
begin as the identity (progressive stacking: Gong et al. 2019, "Efficient Training of BERT by Progressively
Stacking"; zero-initialised new blocks as in LLaMA Pro, Wu et al. 2024).

Shapes: B rows, L tokens, D hidden, V vocabulary, R rows that are learned.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import Tokenized
from draftsmith.data.packing import plan_batches
from draftsmith.files import atomic_path
from draftsmith.train.optimizers import Muon

_CHECKPOINT_SECONDS = 20.0
_WARMUP_STEPS = 20
_DECAY_SHARE = 0.5  # of the steps at full depth


@dataclass(frozen=True)
class TrainingSettings:
    """Sizes and training of a small Llama; the defaults are those of the embedded target."""

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
    seed: int = 0  # of corpus, initial weights and order
    eos_id: int = 2
    pad_id: int = 0


@dataclass(frozen=True)
class Rows:
    """Packed documents. ids, position [B, L] int64, position counted from 0 in each document; learn [B, L] bool, True
    where the token is to be learned."""

    ids: Tensor
    position: Tensor
    learn: Tensor


@dataclass
class _State:
    """What a checkpoint holds."""

    step: int
    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]


def train_target(
    samples: Sequence[Tokenized],
    settings: TrainingSettings,
    checkpoint: Path,
    device: str,
    progress: bool,
    name: str = "embedded target",
) -> LlamaForCausalLM:
    """Train from scratch, or go on from `checkpoint`; return the model in float32 on the CPU. name: for the progress bar.

    The result depends on samples and settings only, not on interruptions.
    """
    threads = torch.get_num_threads()
    # The matrices are too small to share, and on a busy machine threads that wait for each other take fifty times as long.
    torch.set_num_threads(1)
    try:
        return _train(samples, settings, checkpoint, device, name if progress else None)
    finally:
        torch.set_num_threads(threads)


def _train(
    samples: Sequence[Tokenized], settings: TrainingSettings, checkpoint: Path, device: str, name: str | None
) -> LlamaForCausalLM:
    state = _resume(checkpoint, settings, device)
    first, total = state.step, settings.shallow_steps + settings.steps
    bar = tqdm(total=total, initial=first, desc=name, unit="step", disable=name is None)
    saved = started = time.monotonic()
    tokens = 0
    for rows in islice(batches(samples, settings), first, total):
        if state.step == settings.shallow_steps:
            state = _start(state.step, grow(state.model, settings), settings, device)
        loss = _step(state, rows, settings, device)
        state.step += 1
        tokens += int((rows.ids != settings.pad_id).sum())
        if state.step % 10 == 0:
            speed = tokens / (time.monotonic() - started)
            bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:.0f} tok/s", refresh=False)
        bar.update()
        if time.monotonic() - saved > _CHECKPOINT_SECONDS:
            _save(checkpoint, state)
            saved = time.monotonic()
    bar.close()
    return state.model.eval().to("cpu")


def build_model(settings: TrainingSettings, layers: int) -> LlamaForCausalLM:
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


def grow(shallow: LlamaForCausalLM, settings: TrainingSettings) -> LlamaForCausalLM:
    """Return a target of full depth that computes what `shallow` computes: its layers, evenly spread, between new ones."""
    model = build_model(settings, settings.layers)
    model.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, layer in enumerate(shallow.model.layers):
        place = index * settings.layers // len(shallow.model.layers)
        model.model.layers[place].load_state_dict(layer.state_dict())
    return model


def packed_loss(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """Return the mean cross entropy of the tokens to learn.

    transformers reads the document borders from the positions that restart, so documents of a row do not
    see each other.
    """
    hidden_BLD = model.model(input_ids=rows.ids, position_ids=rows.position, use_cache=False).last_hidden_state
    learn = rows.learn[:, 1:]
    logits_RV = model.lm_head(hidden_BLD[:, :-1][learn]).float()
    return F.cross_entropy(logits_RV, rows.ids[:, 1:][learn])


def batches(samples: Sequence[Tokenized], settings: TrainingSettings) -> Iterator[Rows]:
    """Yield batches of whole documents for ever, each document once per epoch."""
    lengths = [len(sample.ids) for sample in samples]
    for epoch in count():
        for plan in plan_batches(
            lengths, row_tokens=settings.row_tokens, rows=settings.rows, seed=settings.seed, epoch=epoch
        ):
            yield _collate([[samples[i] for i in row] for row in plan], settings)


def _collate(packed: list[list[Tokenized]], settings: TrainingSettings) -> Rows:
    shape = (len(packed), settings.row_tokens)
    ids = torch.full(shape, settings.pad_id)
    position = torch.zeros(shape, dtype=torch.int64)
    learn = torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(packed):
        start = 0
        for sample in row:
            end = start + len(sample.ids)
            ids[b, start:end] = sample.ids
            position[b, start:end] = torch.arange(end - start)
            learn[b, start:end] = sample.mask
            start = end
    return Rows(ids, position, learn)


def _start(step: int, model: LlamaForCausalLM, settings: TrainingSettings, device: str) -> _State:
    model = model.to(device).train()
    model.set_attn_implementation("eager")  # on a CPU, backward through sdpa takes several times as long
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in name]
    assert len(matrices) + len(others) == sum(1 for _ in model.parameters())
    muon = Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95)
    adamw = torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return _State(step, model, [muon, adamw])


def _step(state: _State, rows: Rows, settings: TrainingSettings, device: str) -> Tensor:
    rows = Rows(rows.ids.to(device), rows.position.to(device), rows.learn.to(device))
    # Not on a CPU: many multiply ten times as slowly in bf16.
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=torch.device(device).type != "cpu"):
        loss = packed_loss(state.model, rows)
    loss.backward()
    factor = _schedule(state.step, settings)
    for optimizer, peak in zip(state.optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _schedule(step: int, settings: TrainingSettings) -> float:
    """Return the factor on the peak rates: a warmup at either depth, constant, linear to 0 over the last part."""
    deep = step - settings.shallow_steps
    since = deep if deep >= 0 else step
    return min(1.0, (since + 1) / _WARMUP_STEPS, (settings.steps - deep) / (_DECAY_SHARE * settings.steps))


def _save(path: Path, state: _State) -> None:
    values = {
        "step": state.step,
        "model": state.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
    }
    with atomic_path(path) as temporary:
        torch.save(values, temporary)


def _resume(path: Path, settings: TrainingSettings, device: str) -> _State:
    """Restore the checkpoint, or start anew where there is none."""
    values: dict[str, Any] = {"step": 0}
    if path.exists():
        values = torch.load(path, map_location=device, weights_only=True)
    deep = values["step"] > settings.shallow_steps
    model = build_model(settings, settings.layers if deep else settings.shallow_layers)
    state = _start(values["step"], model, settings, device)
    if "model" in values:
        model.load_state_dict(values["model"])
        for optimizer, saved in zip(state.optimizers, values["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    return state
