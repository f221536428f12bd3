"""What every draft head has in common: its outputs, and which rows of a batch it is judged on.

Shapes: B batch rows, L tokens, R supervised rows (flat indices b*L+t), V target vocab, W draft vocab.

What the stages ask of a drafter's options, whatever its method: fields of these names mean the same in each.

layer_ids: aux layers that the head reads, None for the target's default; without the field it reads the last hidden
state alone. draft_vocab_size: size of its draft vocabulary, None (or no such field) for the target's whole vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.target.target import Target

if TYPE_CHECKING:
    from draftsmith.eval.decode.sampling import Sampling
    from draftsmith.heads.target.target import Target, TargetHead

Piece = Tensor | slice
"""Numbers of rows, or a slice of them."""


@dataclass(frozen=True)
class StepOutput:
    """The draft logits of one step (EAGLE-3) or head (Medusa).

    Row t = rows[r] predicts token x_{t+2+offset}; its teacher is the target's distribution at position t+1+offset.
    rows: [R] int64 flat indices b*L+t, ascending. source: the logits [R, W], or what computes those of some rows, where all
    of them at once would be too many to hold (see `logits_of`). feature: [R, H] what the head took for the target's
    last state at position t+1+offset, where it has such an output and the logits are made from it (EAGLE-1).
    confidence: [R] the log-odds that the head gives its draft to be accepted, those before it being so (DSpark). stops:
    [R] bool, True where the head would draft no more, this token included; it may depend on the tokens before, never on
    the one that the row predicts.
    """

    offset: int
    rows: Tensor
    source: Tensor | Callable[[Piece], Tensor]
    feature: Tensor | None = None
    confidence: Tensor | None = None
    stops: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """All logits, [R, W]."""
        return self.source if isinstance(self.source, Tensor) else self.source(slice(None))

    def logits_of(self, piece: Piece) -> Tensor:
        """The logits of a piece of the rows."""
        return self.source[piece] if isinstance(self.source, Tensor) else self.source(piece)

    def select(self, piece: Piece) -> "StepOutput":
        """The same step on a piece of its rows."""
        others = (x if x is None else x[piece] for x in (self.feature, self.confidence, self.stops))
        return StepOutput(self.offset, self.rows[piece], self.logits_of(piece), *others)


@dataclass(frozen=True)
class HeadOutput:
    """Everything a head computed for one TrainBatch, one StepOutput per step or head.

    tuned: the distribution of the target that the head tunes (Medusa-2), at offset -1: row t predicts x_{t+1}, over all V.
    """

    steps: tuple[StepOutput, ...]
    tuned: StepOutput | None = None


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits [..., W] are the same but for the order in which products were added up, which on some processors
    depends on where in memory a matrix begins."""
    apart, size = (ours - theirs).abs().sum(-1), 1.0 + ours.abs().sum(-1)
    # What is compared is either wrong by a multiple of its size or right.
    return bool((apart <= (1e-4 if ours.dtype == torch.float32 else 5e-2) * size).all())


def shift_left(x_BL: Tensor, steps: int, fill: int | bool) -> Tensor:
    """Return y with y[:, t] = x[:, t + steps], and `fill` past the end (nothing wraps around)."""
    kept_BL = x_BL[:, steps:]
    return nn.functional.pad(kept_BL, (0, x_BL.shape[1] - kept_BL.shape[1]), value=fill)


def iterate_supervised_rows(batch: TrainBatch) -> Iterator[Tensor]:
    """Yield `supervised_rows(batch, 0)`, `supervised_rows(batch, 1)`, ... without end, one shift each."""
    real_BL = batch.document >= 0

    def learnable(steps: int) -> Tensor:
        same_BL = shift_left(batch.document, steps, -1) == batch.document
        return shift_left(batch.mask.bool(), steps, False) & same_BL

    rows_BL, reach = real_BL & learnable(1), 1
    while True:
        reach += 1
        rows_BL = rows_BL & learnable(reach)
        yield rows_BL


def answer_rows(batch: TrainBatch) -> Tensor:
    """Return [B, L] bool: the rows t whose next token x_{t+1} is to be learned, the first of an answer included."""
    same_BL = shift_left(batch.document, 1, -1) == batch.document
    return (batch.document >= 0) & shift_left(batch.mask.bool(), 1, False) & same_BL


def supervised_rows(batch: TrainBatch, offset: int) -> Tensor:
    """Return [B, L] bool: the rows that count at step (or head) `offset`.

    Row t counts iff x_{t+1}, ..., x_{t+2+offset} are all tokens to learn of row t's own document: the
    first token of an answer comes from the prefill and is never drafted, and no draft crosses a gap, a
    document's end or padding (docs/algorithms.md, rule 1: the mask follows the predicted token).
    """
    assert offset >= 0
    for step, rows_BL in enumerate(iterate_supervised_rows(batch)):
        if step == offset:
            return rows_BL
    raise AssertionError("unreachable: the iterator has no end")


def count_rows(batch: TrainBatch) -> Tensor:
    """Return N, an int64 scalar: the rows supervised at offset 0, which divide every step's loss (docs/algorithms.md,
    rule 3)."""
    return supervised_rows(batch, 0).sum()


class DraftHead(nn.Module, ABC):
    """A trainable drafter for one frozen target.

    method: its name in the registry. layer_ids: the aux layers whose streams it reads (id k is the residual
    stream entering decoder layer k). draft_vocab: [W] int64 sorted target ids that its logits stand for
    (a buffer), or None when the head predicts the whole target vocabulary. train_steps: steps (or heads) that its
    training loss sums over. regresses: its outputs carry a `feature`. confident: they carry a `confidence`. tunes:
    training tunes the target too, and the outputs carry the distribution of the `tuned` one.
    max_speculative_tokens: the longest draft, None where there is no limit. reads_target: it reads states of the target,
    not the text alone. served_tokens: how many tokens an engine must be told to draft, None where it may be any number up
    to the longest. outer: parts of the names of matrices that are no weights inside the head, which Muon leaves to AdamW.
    measured: attributes that `build` measures on the target and no tensor holds, which a resumed training takes back.
    steady: every draft is as long as asked for; otherwise a draft may end early. context_length: the longest text with its
    draft that the head reads, in tokens; None where it is that of the target.
    """

    method: ClassVar[str]
    layer_ids: tuple[int, ...]
    draft_vocab: Tensor | None
    train_steps: int
    reads_target: ClassVar[bool] = True
    outer: ClassVar[tuple[str, ...]] = ("lm_head", "embed_tokens")
    measured: ClassVar[tuple[str, ...]] = ()
    regresses: ClassVar[bool] = False
    confident: bool = False
    tunes: ClassVar[bool] = False
    served_tokens: int | None = None
    steady: bool = True
    max_speculative_tokens: int | None = None
    context_length: int | None = None

    @abstractmethod
    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return `num_steps` steps of logits on the supervised rows of `batch`."""

    def calibrate(
        self, batches: Iterable[TrainBatch], target_head: "TargetHead", sampling: "Sampling"
    ) -> dict[str, Any]:
        """Fit what remains to be fitted once training is over, on answers that it has not seen, made with `sampling`; return
        what reports shall know of it, nothing where nothing is fitted. Called of heads that are `confident`."""
        return {}

    def until(self, threshold: float) -> "DraftHead":
        """Return the head, of the same weights, with drafts that end before the first token which is less likely than
        `threshold` to be reached and accepted, by its confidences. Raises UserError where it has none."""
        raise UserError(
            f"evaluate.drafts: confidence_threshold is {threshold}, but {self.method} heads, or this one, say no confidence: "
            "leave it out."
        )

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return, as JSON, what the method's `load` needs besides `layer_ids` and the tensors; under "options" the fields of
        the recipe's options, which training that starts from such a head holds against the recipe's."""

    def supervised(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Yield the rows [B, L] bool that step 0, 1, ... gives logits of: those of docs/algorithms.md, rule 1.

        A head that learns from a sample of them draws it from `batch.seeds`, in training mode alone and the same at every
        call. Hidden states play no part: training asks with `batch.without_states()`.
        """
        return iterate_supervised_rows(batch)

    def deployed(self, target: "Target") -> "DraftHead":
        """Return the head as it drafts once trained, given the target it was trained with: itself, or where it `tunes`
        that one for the tuned target alone, whose states it then reads."""
        return self

    def verifier(self, target: "Target") -> "Target":
        """Return the target that verifies the drafts of a deployed head: `target`, or the one that was tuned with it."""
        return target

    def within_reach(self, num_speculative_tokens: int) -> int:
        """Return the length of a draft of so many tokens, or of as many as the head drafts."""
        reach = self.max_speculative_tokens
        return num_speculative_tokens if reach is None else min(num_speculative_tokens, reach)

    def lr_factor(self, name: str) -> float:
        """Return the learning rate of the parameter `name` as a multiple of the recipe's."""
        return 1.0

    def served(self) -> "DraftHead":
        """Return the head as engines compute it: itself, or one that gives the same logits from other tensors."""
        return self

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary (any shape) to ids of the target vocabulary."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]


@contextmanager
def drafting(*heads: DraftHead) -> Iterator[None]:
    """While it lasts, the heads compute what they draft with, without what training alone does (noise, dropout)."""
    were = [head.training for head in heads]
    for head in heads:
        head.eval()
    try:
        yield
    finally:
        for head, training in zip(heads, were, strict=True):
            head.train(training)


def layer_ids_of(options: Any, target: Target) -> tuple[int, ...]:
    """Return the aux layers that a head with these options reads."""
    if not hasattr(options, "layer_ids"):
        return ()
    return target.default_layer_ids() if options.layer_ids is None else tuple(options.layer_ids)


def draft_vocab_size_of(options: Any) -> int | None:
    """Return the size of the draft vocabulary that these options ask for, None for the whole one."""
    return getattr(options, "draft_vocab_size", None)
