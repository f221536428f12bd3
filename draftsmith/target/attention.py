"""Attention of a target on a CPU: PyTorch's kernel there takes a mask and fewer key heads than query heads at once.

transformers copies keys and values for every query head where a mask is given, as on GPUs no kernel takes both. A draft always has
a mask; on a CPU the copies took longer than the attention itself. One query a row, as where the target writes alone, takes the
kernel four to six times as long in bf16 as a few: those of all heads with the same keys are then given as rows of one head
(docs/results/decoder/products.json).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "draftsmith_grouped"
"""The name that transformers knows it by."""


def _grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention [B, n, N, D] of queries [B, N, n, D] over keys and values [B, G, S, D], G a divisor of N."""
    plain = all(options.get(name) is None for name in ("position_bias", "softcap"))
    alone = query.shape[2] == 1 and query.dtype != torch.float32
    if not plain or query.device.type != "cpu" or (attention_mask is None and not alone):
        plainly: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return plainly
    if alone and (attention_mask is None or attention_mask.shape[1] == 1):
        folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
        attended = F.scaled_dot_product_attention(folded, key, value, attention_mask, dropout, scale=scaling)
        return attended.reshape(len(query), 1, *query.shape[1::2]), None
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
