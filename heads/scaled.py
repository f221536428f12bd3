"""A head that scales the embeddings it reads."""

from typing import Any, Self

from torch import Tensor

from draftsmith.heads.base import DraftHead
from draftsmith.target.target import Target


class ScaledHead(DraftHead):
    """A head that multiplies embeddings by a number of its own, 1 for heads trained elsewhere."""

    embedding_scale = 1.0

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "token_scale": self.embedding_scale}

    @classmethod
    def load(cls, spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Self:
        """As `DraftHead.load`."""
        head = super().load(spec, target, draft_vocab)
        head.embedding_scale = spec.get("token_scale", 1.0)
        return head
