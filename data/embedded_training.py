"""Train the embedded default's tiny Llama: Muon for the hidden matrices, AdamW for the rest.

Shapes: B rows, L tokens, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith.files import atomic_path

_CHECKPOINT_SECONDS = 30.0
_WARMUP_STEPS = 20
_DECAY_SHARE = 0.5
_OPEN_ROWS = 32  # rows that wait for a document that fits


@dataclass(frozen=True)
class Document:
    """Token ids of one rendered conversation; the first `prompt_tokens` are not the answer."""

    ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True)
class TrainingSettings:
    """What the loop needs; see EmbeddedSettings for the meaning of the shared fields."""

    vocab_size: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    context: int
    row_tokens: int
    rows: int
    steps: int
    muon_lr: float
    adamw_lr: float
    prompt_weight: float
    seed: int
    eos_id: int
    pad_id: int


@dataclass(frozen=True)
class Rows:
    """Packed documents. ids, position [B, L] int64, position counted from 0 in each document; weight [B, L]
    float32, the weight of the token as a label (0 on padding and on the first token of a document)."""

    ids: Tensor
    position: Tensor
    weight: Tensor


def train_target(
    documents: Sequence[Document], settings: TrainingSettings, checkpoint: Path, device: str, progress: bool
) -> LlamaForCausalLM:
    """Train from scratch for `settings.steps` steps, or go on from `checkpoint`; return the model on the CPU."""
    model = build_model(settings).to(device)
    optimizers = _optimizers(model, settings)
    first = _load(checkpoint, model, optimizers, device)
    batches = pack(documents, settings, Random(settings.seed))
    for _ in range(first):
        next(batches)
    bar = tqdm(total=settings.steps, initial=first, desc="embedded target", unit="step", disable=not progress)
    saved, started, tokens = time.monotonic(), time.monotonic(), 0
    model.train()
    model.set_attn_implementation("eager")  # on the CPU, backward through sdpa takes four times as long
    for step in range(first, settings.steps):
        rows = next(batches)
        loss = _step(model, optimizers, rows, _schedule(step, settings.steps), device)
        tokens += int((rows.weight > 0).sum())
        if step % 10 == 9:
            bar.set_postfix_str(
                f"loss {loss.item():.3f}, {tokens / (time.monotonic() - started):.0f} tok/s", refresh=False
            )
        bar.update()
        if time.monotonic() - saved > _CHECKPOINT_SECONDS:
            _save(checkpoint, step + 1, model, optimizers)
            saved = time.monotonic()
    bar.close()
    return model.eval().to("cpu")


def build_model(settings: TrainingSettings) -> LlamaForCausalLM:
    """Make the untrained target in float32; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden,
        intermediate_size=settings.ffn,
        num_hidden_layers=settings.layers,
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
    for layer in model.model.layers:  # every block starts as the identity, so that tokens reach the last layer
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.generation_config = GenerationConfig(eos_token_id=settings.eos_id, pad_token_id=settings.pad_id)
    return model


def packed_loss(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """Return the weighted mean cross entropy of the next token.

    transformers reads the document borders from the positions that restart, so documents of a row do not
    see each other.
    """
    hidden_BLD = model.model(input_ids=rows.ids, position_ids=rows.position, use_cache=False).last_hidden_state
    weight = rows.weight[:, 1:]
    learned = weight > 0
    logits_RV = model.lm_head(hidden_BLD[:, :-1][learned]).float()
    losses = F.cross_entropy(logits_RV, rows.ids[:, 1:][learned], reduction="none")
    return (losses * weight[learned]).sum() / weight.sum()


def pack(documents: Sequence[Document], settings: TrainingSettings, rng: Random) -> Iterator[Rows]:
    """Yield batches of rows for ever: each epoch shuffles the documents and puts each, whole, where it fits first."""
    order = list(range(len(documents)))
    full: list[list[Document]] = []
    while True:
        rng.shuffle(order)
        waiting: list[list[Document]] = []
        for index in order:
            document = documents[index]
            assert len(document.ids) <= settings.row_tokens
            row = next((r for r in waiting if _length(r) + len(document.ids) <= settings.row_tokens), None)
            if row is None:
                row = []
                waiting.append(row)
            row.append(document)
            if len(waiting) > _OPEN_ROWS:
                full.append(waiting.pop(max(range(len(waiting)), key=lambda i: _length(waiting[i]))))
            if len(full) == settings.rows:
                yield _collate(full, settings)
                full = []
        full += waiting
        while len(full) >= settings.rows:
            yield _collate(full[: settings.rows], settings)
            full = full[settings.rows :]


def _length(row: list[Document]) -> int:
    return sum(len(document.ids) for document in row)


def _collate(packed: list[list[Document]], settings: TrainingSettings) -> Rows:
    shape = (len(packed), settings.row_tokens)
    ids = torch.full(shape, settings.pad_id)
    position = torch.zeros(shape, dtype=torch.int64)
    weight = torch.zeros(shape)
    for b, row in enumerate(packed):
        start = 0
        for document in row:
            end = start + len(document.ids)
            ids[b, start:end] = torch.tensor(document.ids)
            position[b, start:end] = torch.arange(end - start)
            weight[b, start + 1 : end] = settings.prompt_weight
            weight[b, start + document.prompt_tokens : end] = 1.0
            start = end
    return Rows(ids, position, weight)


def _optimizers(model: LlamaForCausalLM, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in name]
    assert len(matrices) + len(others) == sum(1 for _ in model.parameters())
    muon = torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=0.0, momentum=0.95)
    adamw = torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def _schedule(step: int, steps: int) -> float:
    """Return the factor on the peak rate: a short warmup, constant, then linear to 0 over the last part."""
    return min(1.0, (step + 1) / min(_WARMUP_STEPS, steps), (steps - step) / (_DECAY_SHARE * steps))


def _step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], rows: Rows, factor: float, device: str
) -> Tensor:
    rows = Rows(rows.ids.to(device), rows.position.to(device), rows.weight.to(device))
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss = packed_loss(model, rows)
    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _save(path: Path, step: int, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    with atomic_path(path) as temporary:
        torch.save(state, temporary)


def _load(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], device: str) -> int:
    """Restore a checkpoint if there is one; return the number of finished steps."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])
