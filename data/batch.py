"""The values that data passes to heads: samples, hidden states, batches.

Shapes: B batch rows, L tokens, A aux layers, Ht target hidden size.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokenized:
    """One conversation as the target reads it.

    ids: [L] int64 token ids. mask: [L] bool, True where the token is an assistant token to learn
    (tokens that the template forces belong to the prompt). sample_id names the source line, slice
    is any word that groups samples in reports. conversation: where several samples are turns of one, its id.
    """

    ids: Tensor
    mask: Tensor
    sample_id: str
    slice: str
    conversation: str | None = None


@dataclass(frozen=True)
class Features:
    """What the frozen target computed for one Tokenized.

    aux: [L, A*Ht] residual streams entering the aux layers, concatenated in layer order.
    last: [L, Ht] post-final-norm states. top1: [L] int32 argmax and logsumexp: [L] float32 of the
    target's full-vocabulary logits at each position (both describe the distribution of the *next* token).
    """

    ids: Tensor
    mask: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    logsumexp: Tensor
    sample_id: str
    slice: str


@dataclass(frozen=True)
class TrainBatch:
    """Documents packed into rows: everything a head needs for one training pass.

    ids [B, L] int64; mask [B, L] bool; document [B, L] int64, a number per document within the row
    and -1 on padding; position [B, L] int64, counted from 0 in every document; aux [B, L, A*Ht];
    last [B, L, Ht]; top1 [B, L] int64; logsumexp [B, L] float32. seed [B, L] int64: a number per document and epoch,
    the same at each of its tokens, for what training draws by chance (noise, samples of rows), so that the draw is the
    same however documents are packed and shared out; None means zeros.
    """

    ids: Tensor
    mask: Tensor
    document: Tensor
    position: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    logsumexp: Tensor
    seed: Tensor | None = None

    @property
    def seeds(self) -> Tensor:
        """The seeds [B, L], zeros where there are none."""
        return torch.zeros_like(self.ids) if self.seed is None else self.seed

    def without_states(self) -> "TrainBatch":
        """Return the same batch with `aux` and `last` of width 0: enough to count rows, without most of the bytes."""
        return replace(self, aux=self.aux[..., :0], last=self.last[..., :0])

    def to(self, device: torch.device | str) -> "TrainBatch":
        """Return the same batch on `device`."""
        # Towards the CPU a copy must be waited for: its memory would be read before it is filled.
        later = torch.device(device).type != "cpu"
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: None if x is None else x.to(device, non_blocking=later) for k, x in values.items()}
        return TrainBatch(**moved)
