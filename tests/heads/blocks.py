"""What the tests of the block drafters have in common: small targets, heads of which every tensor matters, and the training
pass written out for one block at a time, in float64 and without any kernel."""

from dataclasses import replace
from functools import cache
from math import exp
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from draftsmith.data.batch import TrainBatch, collate
from draftsmith.data.features.extract import compute_features
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.heads.block.base import BlockHead
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.models import tiny_model

LAYERS = (1, 4, 6)
MASK = 3
_LABELS = LossSpec(kind="hard_ce", decay=exp(-1 / 4), normalize="weights")
LOSSES = {
    "dflash": _LABELS,
    "dflash2": _LABELS,
    "jetspec": LossSpec(kind="kl", decay=1.0, normalize="weights"),
    "domino": _LABELS,
    "xpress": replace(_LABELS, kind="tv", weight=0.9, also={"argmax_ce": 0.1}),
    "dspark": LossSpec(kind="tv", weight=1.8, also={"hard_ce": 0.1}, decay=exp(-1 / 4), normalize="weights"),
}
MORE = {
    "dflash2": {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 8},
    "domino": {"gru_hidden_dim": 8, "emb_dim": 6},
    "xpress": {"xpress_rank": 6, "xpress_mlp_hidden": 10},
}


def make_target(dtype: torch.dtype = torch.float32, **overrides: object) -> Target:
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **overrides)
    return Target(model.to(dtype), path="tiny", fingerprint="0")


def make_head(method: str, target: Target, vocab: Tensor | None = None, **options: Any) -> Any:
    """A head whose every tensor matters; drawn on the side."""
    known = {"layer_ids": [*LAYERS], "block_size": 5, "num_layers": 2, "mask_token_id": MASK} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = methods()[method].build(methods()[method].options_class(**known), target, vocab)
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return head.eval()


def packed(target: Target, dtype: torch.dtype = torch.float32, seeds: bool = True) -> TrainBatch:
    """Documents in rows, with a seed each."""
    batch = pack(target, documents_of(target), LAYERS)
    numbers = batch.document + 10 * torch.arange(len(batch.ids))[:, None]
    seed = (numbers + 1) * 7919 if seeds else None
    return replace(batch, aux=batch.aux.to(dtype), last=batch.last.to(dtype), seed=seed)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def slow_block(head: BlockHead, aux_tF: Tensor, known: list[int], position: int) -> Tensor:
    """States [S, H] behind the final norm of one block that begins with known tokens: aux_tF are the streams of those before."""
    config, eps, S = head.config, head.config.rms_norm_eps, head.options.block_size
    weights = {name: value.double() for name, value in head.state_dict().items()}
    N, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    fused = norm(aux_tF.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = weights["embed_tokens.weight"][torch.tensor([*known, *[MASK] * (S - len(known))])]
    places = torch.cat([torch.arange(len(aux_tF)), position + torch.arange(S)])
    angle = places[:, None] * (config.rope_parameters["rope_theta"] ** (-torch.arange(0, D, 2).double() / D))
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    for i in range(head.options.num_layers):
        own = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        y = norm(x, own["input_layernorm.weight"], eps)
        seen = torch.cat([fused, y])
        q = norm((y @ own["self_attn.q_proj.weight"].T).view(S, N, D), own["self_attn.q_norm.weight"], eps)
        k = norm((seen @ own["self_attn.k_proj.weight"].T).view(-1, G, D), own["self_attn.k_norm.weight"], eps)
        v = (seen @ own["self_attn.v_proj.weight"].T).view(-1, G, D).repeat_interleave(N // G, 1)
        q = q * cos[-S:] + rotate_half(q) * sin[-S:]
        k = (k * cos + rotate_half(k) * sin).repeat_interleave(N // G, 1)
        score = torch.einsum("qnd,knd->nqk", q, k) / D**0.5
        if head.causal:
            score = score.masked_fill(torch.ones(score.shape[1:]).triu(score.shape[2] - S + 1).bool(), -torch.inf)
        weight = score.softmax(-1)
        x = x + torch.einsum("nqk,knd->qnd", weight, v).flatten(1) @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"], eps)
        up, gate = y @ own["mlp.up_proj.weight"].T, y @ own["mlp.gate_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], eps)


def slow_states(head: BlockHead, batch: TrainBatch, row: int, known: int = 1) -> Tensor:
    """The same for flat row number `row` of a batch, with so many of the text's tokens."""
    b, t = divmod(row, batch.ids.shape[1])
    begin = t - int(batch.position[b, t])
    assert int(batch.document[b, begin]) == int(batch.document[b, t])
    return slow_block(head, batch.aux[b, begin : t + 1], batch.ids[b, t + 1 : t + 1 + known].tolist(), t + 1 - begin)


def requests(count: int, new_tokens: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 150, (4 + i % 13,), generator=generator).tolist() for i in range(count)]
    return [Request.seeded(f"p{i}", "ab"[i % 2], prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@cache
@torch.enable_grad()
def trained(
    method: str, temperature: float = 0.0, vocab: bool = False, **options: Any
) -> tuple[Target, Any, TrainBatch]:
    """A head fitted to some of the target's answers, so that drafts are accepted at every depth, and the answers."""
    target = make_target(num_hidden_layers=2, initializer_range=0.06 if temperature else 0.15)
    answers = decode_batch(target, TargetAlone(), requests(8 if temperature == 0 else 16), Sampling(temperature))
    samples = [to_sample(g) for g in answers.generations]
    features = compute_features(target, samples, (0, 1), target.dtype)
    seeds = [[row_key(0, sample.sample_id)] for sample in samples]
    batch = collate([[f] for f in features], max(len(f.ids) for f in features), seeds=seeds)
    more = MORE.get(method, {}) | options
    head = make_head(method, target, torch.arange(0, 160, 2) if vocab else None, layer_ids=[0, 1], block_size=4, **more)
    optimizer = torch.optim.Adam([p for p in head.train().parameters() if p.requires_grad], lr=1e-2)
    for _ in range(40 if temperature == 0 else 16):
        scored = head_loss(head(batch, head.trains.steps), batch, target.head, head.draft_vocab, LOSSES[method])
        optimizer.zero_grad()
        (scored.loss_sum / loss_divisor(batch, LOSSES[method], head)).backward()
        optimizer.step()
    return target, head.eval(), batch
