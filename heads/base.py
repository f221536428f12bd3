"""Define what a draft head is (`DraftHead`), what it outputs, and which rows of a batch it is trained on.

Shapes: B batch rows, L tokens, R supervised rows (flat indices b*L+t), H hidden, V target vocab, W draft vocab.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.data.memory import move
from draftsmith.heads.layers.from_target import LAYER_KEYS, OwnLayerConfig
from draftsmith.heads.plan import Plan, flat_rows
from draftsmith.heads.selector import Selector
from draftsmith.target.target import Target, TargetHead

Made = TypeVar("Made")
Piece = Tensor | slice
"""Indices of rows, or a slice of them."""
Passes = Callable[[Callable[[int, TrainBatch, "HeadOutput", Tensor], Any]], list[Any]]
"""Passes over batches, shared out to the processes: calls a function with the number of a batch, the batch, a head's output and [B, L, K] the
chance that each drafted token is accepted; returns what it returned, which is to lie on the CPU, for all batches in order."""


def _same(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True)
class StepOutput:
    """The draft logits of one step (EAGLE-3) or head (Medusa), computed when they are asked for: those of all rows and steps may
    take more memory than there is.

    Row t = rows[r] predicts token x_{t+2+offset}; its teacher is the target's distribution at position t+1+offset.

    Attributes:
        offset: the number of the step, from 0.
        rows: [R] int64 flat indices b*L+t, ascending. inputs: [R, ...], what `project` makes the logits of, one tensor or several.
        project: inputs of any rows, or of none -> logits [rows, W], called once the head has returned and as often as they are asked for. It uses
            them and parameters, and no other tensor with a gradient. besides: the same for logits that are trained besides, those before a correction,
            then of `rounds` with the head's own guesses. rounds None: those behind a prefix, whose end is at the step in the last of `inputs`.
        feature: [R, H] the predicted last state of the target at position t+1+offset (EAGLE-1).
        confidence: [R] the log-odds that the drafted token is accepted, given that those before it are (DSpark).
        temperature: what `confidence` is divided by, a scalar, fitted after training; None where there is no confidence.
        selector: what chooses among the likeliest tokens; drafts then have its scores for logits. None: nothing does.
        precision: the autocast that `project` runs in, that of the place where the step was made.
    """

    offset: int
    rows: Tensor
    inputs: Tensor | tuple[Tensor, ...]
    project: Callable[..., Tensor] = _same
    feature: Tensor | None = None
    confidence: Tensor | None = None
    temperature: Tensor | None = None
    selector: Selector | None = None
    besides: Callable[..., Sequence[Tensor]] | None = None
    rounds: int | None = 0
    precision: tuple[torch.dtype, bool] = (torch.float32, False)

    def __post_init__(self) -> None:
        assert all(isinstance(x, Tensor) for x in self.sources), "`project` makes logits of inputs"
        kind = self.rows.device.type
        if torch.is_autocast_enabled(kind):
            object.__setattr__(self, "precision", (torch.get_autocast_dtype(kind), True))

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """`inputs` as a tuple."""
        return (self.inputs,) if isinstance(self.inputs, Tensor) else self.inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that may have a gradient: `inputs`, `feature` and `confidence`."""
        return (*self.sources, *(x for x in (self.feature, self.confidence) if x is not None))

    @property
    def logits(self) -> Tensor:
        """The logits [R, W] that tokens are drafted by."""
        return self.logits_of()

    def logits_of(self, piece: Piece | None = None) -> Tensor:
        """Return those of some of the rows, or of all."""
        inputs = self.sources if piece is None else tuple(x[piece] for x in self.sources)
        logits = self.projected(*inputs)
        return logits if self.selector is None else self.selector.chosen(logits, *inputs)

    def projected(self, *inputs: Tensor) -> Tensor:
        """Return the logits of such inputs, before any selector."""
        return self.in_precision(self.project, *inputs)

    def in_precision(self, make: Callable[..., Made], *inputs: Tensor) -> Made:
        """Return what `project` or `besides` makes of such inputs, in the step's precision."""
        dtype, enabled = self.precision
        with torch.autocast(self.rows.device.type, dtype if enabled else None, enabled=enabled):
            return make(*inputs)


@dataclass(frozen=True)
class HeadOutput:
    """Everything a head computed for one TrainBatch.

    Attributes:
        steps: one StepOutput per step or head.
        tuned: the logits [R, V] of the target that training tunes (Medusa-2), at offset -1: row t predicts x_{t+1}.
    """

    steps: tuple[StepOutput, ...]
    tuned: StepOutput | None = None

    @property
    def scored(self) -> tuple[StepOutput, ...]:
        """All that the loss compares with the target: the steps, and behind them `tuned`."""
        return self.steps if self.tuned is None else (*self.steps, self.tuned)


def accepted(log_odds: Tensor, temperature: Tensor) -> Tensor:
    """Return the chance that a token is accepted, given that those before it are, by a head's confidence."""
    return torch.sigmoid(log_odds.float() / temperature)


def shift_left(x_BL: Tensor, steps: int, fill: int | bool) -> Tensor:
    """Return y with y[:, t] = x[:, t + steps], and `fill` past the end (nothing wraps around)."""
    return nn.functional.pad(x_BL[:, steps:], (0, min(steps, x_BL.shape[1])), value=fill)


def iterate_supervised_rows(batch: TrainBatch) -> Iterator[Tensor]:
    """Yield `supervised_rows(batch, 0)`, `supervised_rows(batch, 1)`, ... without end, one shift each."""
    rows_BL = answer_rows(batch)
    for ahead in count(2):
        rows_BL = rows_BL & _learnable(batch, ahead)
        yield rows_BL


def answer_rows(batch: TrainBatch) -> Tensor:
    """Return [B, L] bool: the rows t whose next token x_{t+1} is to be learned, the first of an answer included."""
    return (batch.document >= 0) & _learnable(batch, 1)


def _learnable(batch: TrainBatch, ahead: int) -> Tensor:
    """Return [B, L] bool: whether the token so far ahead is to be learned and of the row's own document."""
    same_BL = shift_left(batch.document, ahead, -1) == batch.document
    return shift_left(batch.mask.bool(), ahead, False) & same_BL


def supervised_rows(batch: TrainBatch, offset: int) -> Tensor:
    """Return [B, L] bool: the rows that count at step (or head) `offset`.

    Row t counts iff x_{t+1}, ..., x_{t+2+offset} are all tokens to learn of row t's own document (docs/algorithms.md, rule 1).
    """
    return next(islice(iterate_supervised_rows(batch), offset, None))


def count_rows(batch: TrainBatch) -> Tensor:
    """Return N, an int64 scalar: the rows supervised at offset 0, which divide every step's loss."""
    return supervised_rows(batch, 0).sum()


@dataclass(frozen=True)
class Reads:
    """What a head reads besides the tokens."""

    layer_ids: tuple[int, ...] = ()
    """The aux layers whose hidden states it reads: id k is the residual stream that enters decoder layer k."""
    target_states: bool = True
    """It reads hidden states of the target: those of `layer_ids`, the last one or both. False: it reads the text alone."""
    context_length: int | None = None
    """The longest text it can read, its draft included, in tokens; None: as long as the target's context."""


@dataclass(frozen=True)
class Drafts:
    """How long a head's drafts are."""

    max_speculative_tokens: int | None = None
    """The longest draft; None: there is no limit."""
    fixed_length: bool = True
    """Every draft is as long as asked for. False: a draft may end early, so that its length does not tell its cost."""
    own_pass: bool = False
    """A draft of another length has other tokens from its first on (DFlash2), so that each length has a training pass of its own, with
    so many steps. False: a shorter draft is the beginning of a longer one."""


@dataclass(frozen=True)
class Trains:
    """What a head returns in training, and what the optimizers and a resumed training must know of it."""

    steps: int = 1
    """Steps (or heads) that the training loss sums over."""
    outputs: frozenset[str] = frozenset()
    """What the output has besides logits: `feature`, `confidence` (which `calibrate` fits after training), `base`, `rounds` and `prefix`
    (`besides` of a step), and `tuned` where training tunes the target too."""
    blocks: bool = False
    """The steps of a row are the slots of a block, which is drafted at once: they share one projection."""
    no_muon: tuple[str, ...] = ()
    """Parts of names of matrices that AdamW trains where the optimizer is Muon, besides embeddings and output
    projections: those that are no full weight matrices within the head, such as low-rank factors and depthwise kernels."""
    no_decay: tuple[str, ...] = ()
    """Parts of names of kernels that begin as gains of 1, which no weight decay pulls to 0."""
    measured_on_target: tuple[str, ...] = ()
    """Attributes that `build` measures on the target and no tensor holds: a resumed training takes the saved values."""


class DraftHead(nn.Module, ABC):
    """A trainable drafter for one frozen target.

    A subclass implements `forward`; every other method has a default. Those of `describe` and `load` work where
    `__init__` takes (options, config, target, layer_ids, draft_vocab) and sets self.options and self.config. eval/conformance/suite.py checks
    the promises below, which a head keeps with its method's drafter.

    Attributes:
        method: its name in the registry.
        reads: what it reads besides the tokens.
        drafts: how long its drafts are.
        trains: what it returns in training.
        options: the recipe's `head:` section, an `options_class`.
        config: of its decoder layers, of which checkpoints hold `layer_keys`; None for a head without any.
        needs_layers: no head of the class is without.
        window: how many tokens a row of its attention sees, its own the last of them; None for all.
        draft_vocab: [W] int64 ascending target ids that the logits stand for; None: the whole target vocabulary.

    Promises:

    - decoding has the probabilities of training: those that `forward` gives for the same text
    - drafts are drawn from the probabilities that they name: sampled text follows the target's distribution only then
    - simulated acceptance equals decoded acceptance: exactly at temperature 0, within the sampling error above it
    - drafts end where a rule says: see `draftsmith/decoder/draft.py`
    - a window narrows attention: for heads with a `least_window`, in training's pass and in decoding alike
    - packed documents train like single ones: with the same loss and gradients
    - logits come for the supervised rows: for those that `supervised` yields, in ascending order
    - the same seed trains the same head: bit by bit on a CPU; a GPU may add up gradients in another order every time
    - a checkpoint restores the head: bit by bit, `load` needing no more than `describe` and the tensors
    - an export restores the head: its logits are the same when it is loaded again
    - rows of a batch are independent: a row drafts the same alone and in a batch
    - greedy text is the target's own
    - trees keep greedy text and acceptance: for every kind of tree that the method names
    - drawn trees are drawn from the probabilities that they name: in their order and without replacement
    """

    method: ClassVar[str]
    options_class: ClassVar[type]
    layer_keys: ClassVar[tuple[str, ...]] = LAYER_KEYS
    needs_layers: ClassVar[bool] = True
    options: Any
    config: Any = None
    reads: Reads = Reads()
    drafts: Drafts = Drafts()
    trains: Trains = Trains()
    draft_vocab: Tensor | None
    window: int | None = None

    def __init__(self, draft_vocab: Tensor | None = None, target_head: TargetHead | None = None) -> None:
        """Keep the draft vocabulary, and the target's output projection for heads that make logits with it."""
        super().__init__()
        self.register_buffer("draft_vocab", draft_vocab)
        # In a list, so that it is not registered: no optimizer may see it, and no checkpoint may hold it again.
        self._target_head = [target_head]

    @property
    def target_head(self) -> TargetHead:
        """The target's output projection: shared, frozen, and no part of this module."""
        (head,) = self._target_head
        assert head is not None, "this head has a projection of its own"
        return head

    @abstractmethod
    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Run the training pass.

        Args:
            batch: packed documents, with the hidden states that the head reads.
            num_steps: how many steps (or heads) to run.

        Returns:
            The logits [R_k, W] of every step k, on the rows that `supervised` names.
        """

    def describe(self) -> dict[str, Any]:
        """Return JSON with all that the method's `load` needs besides layer ids and tensors; under "options" the fields of the
        recipe's `head:` section."""
        described = {"options": asdict(self.options)}
        if self.config is not None:
            described["layer_config"] = {key: getattr(self.config, key) for key in self.layer_keys}
        return described

    @classmethod
    def load(cls, spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Self:
        """Return the head that `describe` and its layer_ids wrote down; its weights are still to be filled in."""
        make: Callable[..., Self] = cls
        options, config = cls.options_class(**spec["options"]), None
        if cls.needs_layers or "layer_config" in spec:
            kind = OwnLayerConfig if getattr(options, "layer", None) == "target" else LlamaConfig
            config = kind(**spec["layer_config"])
        assert draft_vocab is None or hasattr(options, "draft_vocab_size"), "these heads draft from all tokens"
        with torch.device(target.device):
            return make(options, config, target, spec["layer_ids"], draft_vocab)

    def supervised(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Choose the rows that are trained: all that count, by default.

        A head that learns from a sample draws it in training mode alone, from `batch.seeds`: every call yields the same rows.

        Args:
            batch: perhaps without hidden states (`batch.without_states()`), and on the CPU, where training counts rows.

        Yields:
            The rows [B, L] bool of step 0, 1, ...
        """
        return iterate_supervised_rows(batch)

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """Find what `forward`, by `planned`, needs to know of the tokens, masks and documents of a batch, perhaps without hidden states
        and on the CPU. Training calls it in other threads."""
        masks = islice(self.supervised(batch), self.clamp_draft_length(num_steps))
        return Plan((num_steps, self.training), tuple(map(flat_rows, masks)))

    def planned(self, batch: TrainBatch, num_steps: int) -> Plan:
        """Return the plan that travels with the batch, or one made now, for which a GPU is waited for."""
        if batch.plan is None:
            device = batch.ids.device
            return move(self.plan(batch.without_states().to("cpu"), num_steps).laid_out(device), device)
        assert batch.plan.made_for == (num_steps, self.training), "a batch planned for another pass"
        return batch.plan

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary (any shape) to ids of the target vocabulary."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]

    def clamp_draft_length(self, num_speculative_tokens: int) -> int:
        """Return the draft length asked for, in tokens, or the longest of the head where that is less."""
        most = self.drafts.max_speculative_tokens
        return num_speculative_tokens if most is None else min(num_speculative_tokens, most)

    @property
    def least_window(self) -> int | None:
        """The narrowest window that its drafts fit into, in tokens; None where its attention takes none."""
        return None

    @property
    def engine_tokens(self) -> int | None:
        """The one draft length, in tokens, to start an engine with; None where it may be any that the head drafts."""
        return None

    def lr_factor(self, name: str) -> float:
        """Return the learning rate of the parameter `name` as a multiple of the recipe's."""
        return 1.0

    def calibrate(self, passes: Passes) -> dict[str, Any]:
        """Calibrate the confidence after training by passes over held-out answers, for heads whose `trains.outputs` name one; return what
        the reports show of it, {} where nothing is fitted."""
        return {}

    def deployed(self, target: Target) -> "DraftHead":
        """Return the head as it drafts after training: itself, or where it tuned `target` one that reads the tuned target."""
        return self

    def verifier(self, target: Target) -> Target:
        """Return the target that verifies a deployed head's drafts: `target`, or the one tuned with the head."""
        return target

    def served(self) -> "DraftHead":
        """Return the head as engines compute it: itself, or one that gives the same logits from other tensors."""
        return self

    def in_engines(self) -> "DraftHead":
        """Return the head as it drafts in engines: itself, or one without what they do not know."""
        return self


@contextmanager
def drafting(*heads: DraftHead) -> Iterator[None]:
    """Put the heads into evaluation mode, without the noise and dropout of training, and back afterwards."""
    were = [head.training for head in heads]
    for head in heads:
        head.eval()
    try:
        yield
    finally:
        for head, training in zip(heads, were, strict=True):
            head.train(training)


def layer_ids_of(options: Any, target: Target) -> tuple[int, ...]:
    """Return the aux layers that a head with these options reads: those of the field `layer_ids`, the target's default where that
    is None, and none without the field."""
    if not hasattr(options, "layer_ids"):
        return ()
    return target.default_layer_ids() if options.layer_ids is None else tuple(options.layer_ids)


def draft_vocab_size_of(options: Any) -> int | None:
    """Return the size of the draft vocabulary that these options ask for; None for the whole target vocabulary."""
    return getattr(options, "draft_vocab_size", None)
