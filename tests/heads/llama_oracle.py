"""A draft of EAGLE-3's kind written out in float64: every row by itself, what it sees as one dense mask.

Shapes: R rows, H hidden, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.heads.eagle.fused import FusedHead


@dataclass(frozen=True)
class Rows:
    """What enters: embeddings and fused streams [R, H], RoPE positions [R], and what each row sees [R, R] bool."""

    embedded: Tensor
    hidden: Tensor
    position: Tensor
    sees: Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def fuse(head: FusedHead, aux: Tensor) -> Tensor:
    """[R, A*Ht] -> [R, H]."""
    aux, eps = aux.double(), head.config.rms_norm_eps
    if head.input_norm is not None:
        aux = norm(aux, head.input_norm.weight, eps)
    if head.fc_norm is not None:
        parts = zip(aux.chunk(len(head.fc_norm), -1), head.fc_norm, strict=True)
        aux = torch.cat([norm(part, one.weight, eps) for part, one in parts], -1)
    return aux @ head.fc.weight.double().T


@torch.no_grad()
def run(head: FusedHead, rows: Rows) -> Tensor:
    """Return the output of the last layer [R, H], no final norm."""
    eps, config = head.config.rms_norm_eps, head.config
    angle = rows.position.double()[:, None] * head.rotary_emb.inv_freq.double()
    cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    out = rows.hidden
    for number, layer in enumerate(head.layers):
        attention = layer.self_attn
        if number == 0:
            normed = norm(out, layer.hidden_norm.weight, eps)
            x = torch.cat([norm(rows.embedded, layer.input_layernorm.weight, eps), normed], -1)
            residual = normed if head.options.norm_before_residual else out
        else:
            x, residual = norm(out, layer.input_layernorm.weight, eps), out
        project = {
            n: (x @ getattr(attention, f"{n}_proj").weight.double().T).unflatten(-1, (-1, config.head_dim))
            for n in "qkv"
        }
        share = config.num_attention_heads // config.num_key_value_heads
        q, k, v = (
            turn(project["q"]),
            turn(project["k"]).repeat_interleave(share, 1),
            project["v"].repeat_interleave(share, 1),
        )
        scores = torch.einsum("rnd,snd->nrs", q, k) * config.head_dim**-0.5
        weights = scores.masked_fill(~rows.sees, -torch.inf).softmax(-1)
        attended = torch.einsum("nrs,snd->rnd", weights, v).flatten(1)
        residual = residual + attended @ attention.o_proj.weight.double().T
        x, mlp = norm(residual, layer.post_attention_layernorm.weight, eps), layer.mlp
        gate, up = (x @ w.weight.double().T for w in (mlp.gate_proj, mlp.up_proj))
        out = residual + (torch.nn.functional.silu(gate) * up) @ mlp.down_proj.weight.double().T
    return out


@torch.no_grad()
def logits(head: FusedHead, out: Tensor) -> Tensor:
    """[R, H] -> [R, W]."""
    return norm(out, head.norm.weight, head.config.rms_norm_eps) @ head.lm_head.weight.double().T
