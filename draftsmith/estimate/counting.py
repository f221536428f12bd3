"""What training a head takes, counted on the head itself: it is built and run on torch's meta device, where tensors have shapes
and no memory.

Tokens, masks and positions have values, since heads choose rows by them; states and weights have none, and a question about
their values is answered with one. FLOPs are those of the products and of the attention, forward and backward. Bytes are those of
the tensors that live when most do, from the forward pass to the gradients of the logits, under bf16 autocast.

Shapes: B texts, L tokens of a text, N query heads, G key/value heads, D head size.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError, first_line
from draftsmith.heads.adapter import DraftAdapter, adapt
from draftsmith.heads.base import DraftHead, HeadOutput, draft_vocab_size_of
from draftsmith.heads.losses.head_loss import PIECE, head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import find_method
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.shape import TargetShape
from draftsmith.target.target import Target, TargetOutput
from draftsmith.train.schedule import Muon, build_optimizers

aten = torch.ops.aten


@dataclass(frozen=True)
class TextCost:
    """What a training pass takes for one text.

    Attributes:
        products, attention: FLOPs.
        forward: bytes in the head's forward pass, without the weights' copies in bf16.
        kept: bytes of activations and gradients that are there while the loss is computed.
        fixed, per_logit: bytes of a piece of the loss, and more for each logit in it.
        logits: how many the text has.
    """

    products: float
    attention: float
    forward: float
    kept: float
    fixed: float
    per_logit: float
    logits: float

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.products + self.attention

    def memory(self, texts: float, kind: str) -> float:
        """Return the most bytes at once for so many texts, on a device of this kind."""
        piece = min(PIECE["cpu" if kind == "cpu" else "cuda"], texts * self.logits)
        return max(texts * self.forward, texts * self.kept + self.fixed + self.per_logit * piece)


class HeadCost:
    """The costs of a head that these options make for a target of these dimensions. rank: of an adapter that is trained in place of its
    weights.

    guessed: says in a line what is guessed, where the head cannot be built or run without values; "" where all is counted.
    Raises UserError for options that do not fit the target.
    """

    def __init__(self, method: str, options: Any, target: TargetShape, path: str = "", rank: int | None = None) -> None:
        self._target = _ShapeTarget(target.model, path=path, fingerprint="")
        self._texts, self.guessed = dict[str, TextCost](), ""
        self._window = min((w for w in target.windows if w is not None), default=None)
        self.draft_vocab = min(draft_vocab_size_of(options) or target.vocab, target.vocab)
        vocab = torch.arange(self.draft_vocab) if self.draft_vocab < target.vocab else None
        if getattr(options, "mask_token_id", 0) is None:
            options = replace(options, mask_token_id=0)  # the tokenizer is not at hand, and any token costs the same
        self.aux_layers, self.matrices, self.tuned_parameters = 0, 0, 0
        self.parameters = self.weights = (target.parameters - target.lookup) // target.layers
        self.rank, self.adapted = rank, 0
        with self._else_guess("a head of the size of one layer of the target, as it cannot be built"), _Meter():
            self.head: DraftHead = find_method(method).build(options, self._target, vocab).train()
            self._measure()

    @contextmanager
    def _else_guess(self, what: str) -> Iterator[None]:
        """Keep what is guessed, and say so, where code fails because no weight and no state has a value."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a head of another package does with what it is told
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.guessed = self.guessed or f"training: {what} without the values of weights ({reason})"

    def _measure(self) -> None:
        """Read the sizes of the head. weights: what it has of its own; parameters: what is trained, those or an adapter's factors;
        adapted: weights that have such. matrices: trained parameters that Muon would take; AdamW takes the others in any case.
        tuned_parameters: weights of its own that a tuned target has, of each matrix that an adapter changes."""
        self.weights = sum(p.numel() for p in self.head.parameters() if p.requires_grad)
        if self.rank is not None:
            adapt(self.head, DraftAdapter(self.rank, float(self.rank), Path(), ""))
            self.adapted = sum(p.numel() for name, p in self.head.named_parameters() if name.endswith(".original"))
        self.aux_layers = len(self.head.reads.layer_ids)
        trained = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        self.parameters = sum(p.numel() for p in trained.values())
        made = build_optimizers(self.head, TrainSpec(optimizer="muon"))
        groups = [group for one in made if isinstance(one, Muon) for group in one.param_groups]
        self.matrices = sum(p.numel() for group in groups for p in group["params"])
        tuned = {} if self.adapted else trained
        factors = [(a, tuned[name.replace("lora_A", "lora_B")]) for name, a in tuned.items() if "lora_A" in name]
        self.tuned_parameters = sum(a.shape[1] * b.shape[0] for a, b in factors)

    def of_text(self, prompt: int, answer: int, loss: LossSpec, progress: float | None = None) -> TextCost:
        """Return what a training pass takes for a text of so many tokens of prompt and answer, at a progress of the training (0 to 1). None:
        over all of it, with the memory of its start, where logits before their correction have a loss too."""
        key = repr((prompt, answer, loss, progress))
        if key not in self._texts:
            # As EAGLE-3 takes of one step, and any loss of a logit.
            kept, flops = 100.0 * answer * self._target.hidden_size, 6.0 * self.parameters * (prompt + answer)
            guess = TextCost(flops, 0.0, kept, kept, 0.0, 20.0, answer * self.draft_vocab)
            self._texts[key] = guess
            with self._else_guess("each token passes each weight once, as the head cannot run"):
                self._texts[key] = begun = self._count(prompt, answer, loss, progress or 0.0)
                outputs = self.head.trains.outputs
                until = loss.base_until(int("rounds" in outputs)) if "base" in outputs else 1.0
                if progress is None and until < 1:
                    products = until * begun.products + (1 - until) * self._count(prompt, answer, loss, 1.0).products
                    self._texts[key] = replace(begun, products=products)
        return self._texts[key]

    def _count(self, prompt: int, answer: int, loss: LossSpec, progress: float) -> TextCost:
        """Run forward pass and loss of one text, and take the gradients of the logits."""
        head, target = self.head, self._target
        batch = _text(target, self.aux_layers, prompt, answer)
        target.head.logits(batch.last, head.draft_vocab)  # which keeps its rows of the draft vocabulary
        with _Meter(getattr(head, "window", None) or self._window) as meter:
            # On the CPU's tensors, for what asks whether it is on.
            with _Autocast() as autocast, torch.autocast("cpu", torch.bfloat16), cached():
                output = head(batch, head.trains.steps)
            forward, products = meter.most, meter.products
            with _Mixed():
                output, most = _within(output, autocast), []
                logits = sum(len(step.rows) for step in output.scored) * self.draft_vocab
                one = len(output.scored) * self.draft_vocab  # the logits of a position
                # So that gradients of two pieces meet.
                whole, half = (max(1, min(PIECE["cuda"], logits // 2) // part // one) * one for part in (1, 2))
                for size in (whole, half):
                    meter.products, meter.most = products, meter.alive
                    scored = head_loss(
                        output, batch, target.head, head.draft_vocab, loss, progress=progress, piece_size=size
                    )
                    ready, alive = gradients_ready(scored.loss_sum), meter.alive
                    most.append(meter.most - alive)
                    del scored
        copies = sum(copy.untyped_storage().nbytes() for _, copy in autocast.copies.values()) + autocast.copied
        # An adapter's sums with its base, and their copies, are made once for all texts, as are its own products.
        copies += (4 + 2) * self.adapted
        products = meter.products - 3 * 2 * (self.rank or 0) * self.adapted
        # Of a few rows there is one piece alone.
        per_logit = most[0] / whole if whole == half else max(0.0, (most[0] - most[1]) / (whole - half))
        kept, fixed = alive - copies - ready, most[0] - per_logit * whole
        return TextCost(products, meter.attention, forward - copies, kept, fixed, per_logit, logits)


def gradients_ready(total: Tensor) -> int:
    """Return the bytes of the gradients of parameters that a loss holds ready."""
    queue, size = [total.grad_fn], 0
    while queue:
        node = queue.pop()
        following = [] if node is None else [node for node, _ in node.next_functions]
        if "Ready" in type(node).__name__:
            variables = [getattr(one, "variable", None) for one in following]
            size += sum(x.numel() * x.itemsize for x in variables if x is not None)
        else:
            queue += following
    return size


def _within(output: HeadOutput, mode: TorchFunctionMode) -> HeadOutput:
    """Return the output with projections that run in a mode."""

    def inside(project: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            with mode:
                return project(*inputs)

        return run

    known = {step.project: inside(step.project) for step in output.scored}  # one for one, as steps are joined by it
    steps = [replace(step, project=known[step.project]) for step in output.scored]
    return HeadOutput(tuple(steps[: len(output.steps)]), *steps[len(output.steps) :])


class _ShapeTarget(Target):
    """A target of shapes alone, whose states nothing is computed for."""

    def forward(self, input_ids: Tensor, *, layer_ids: tuple[int, ...] = (), **others: Any) -> TargetOutput:
        states = [self.embedding.new_empty(*input_ids.shape, n * self.hidden_size) for n in (len(layer_ids), 1)]
        return TargetOutput(*states)


def _text(target: Target, layers: int, prompt: int, answer: int) -> TrainBatch:
    """Return a batch of one text, whose states have shapes alone."""
    place = torch.arange(prompt + answer)[None]
    states = target.forward(place, layer_ids=tuple(range(layers)))
    token, none = place % target.vocab_size, torch.zeros_like(place)
    return TrainBatch(token, place >= prompt, none, place, states.aux, states.last, none, none.float())


class _Meter(TorchDispatchMode):
    """Count the FLOPs of all operations, with those of their backward pass, and the bytes of the tensors without values that
    live at once; answer questions about values with one. window: how many tokens a row sees, None for all."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window, self.products, self.attention = window, 0.0, 0.0
        self.most = self.alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        if made := [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_meta]:
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for storage in made:
                if storage._cdata not in given:
                    self._change(storage.nbytes())
                    weakref.finalize(storage, self._change, -storage.nbytes())
            if torch._C._current_graph_task_id() == -1:  # not in a backward pass, which is counted with the forward one
                self._count(func, args, kwargs or {}, out)
        return out

    def _change(self, size: int) -> None:
        self.alive += size
        self.most = max(self.most, self.alive)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the FLOPs of a product, and as many for each factor that needs a gradient; of causal attention two products of 2*N*D for
        each pair of tokens forward and five backward."""
        if func in _FACTORS:
            left, right = args[_FACTORS[func]], args[_FACTORS[func] + 1]
            self.products += 2 * out.numel() * left.shape[-1] * (1 + _learns(left) + _learns(right))
        elif func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            texts, heads, length, size = args[0].shape
            window = length if kwargs.get("attn_mask") is None else min(self.window or length, length)
            self.attention += 7 * 2 * texts * heads * size * (window * length - window**2 / 2)


def _learns(x: Tensor) -> bool:
    """Whether a factor needs a gradient, or is a view of one that does."""
    return x.requires_grad or (x._base is not None and x._base.requires_grad)


_FACTORS = dict.fromkeys((aten.mm.default, aten.mm.out, aten.bmm.default, aten._grouped_mm.default), 0)
_FACTORS |= dict.fromkeys((aten.addmm.default, aten.addmm.out), 1)
"""Products, and where the first of their two factors stands among the arguments."""


class _Mixed(TorchFunctionMode):
    """Let operations take tensors with and without values together; indices stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mixed = len({x.is_meta for x in tree_leaves(args) if isinstance(x, Tensor)}) == 2
        if mixed and func not in (Tensor.__getitem__, Tensor.__setitem__):
            args = tree_map_only(Tensor, lambda x: x.to("meta"), args)
        return func(*args, **(kwargs or {}))


class _Autocast(_Mixed):
    """Autocast to bf16, which torch has not for the meta device, and what a GPU computes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Weights and their copies, by the ids of the weights."""
        self.copied = 0
        """Bytes of other copies, which heads make themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HALF:
            args, kwargs = tree_map_only(Tensor, self._half, (args, kwargs or {}))
        if func is Tensor.copy_ and isinstance(args[1], nn.Parameter):
            self.copied += args[0].nbytes
        if func in _OF_GPUS:
            return _OF_GPUS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _half(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        if not isinstance(x, nn.Parameter) or not torch.is_grad_enabled():
            return x.to(torch.bfloat16)
        if id(x) not in self.copies:
            self.copies[id(x)] = x, x.to(torch.bfloat16)
        return self.copies[id(x)][1]


_HALF = (F.linear, F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm)
"""The operations that heads use of those which autocast takes to bf16."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: Any, **options: Any
) -> Tensor:
    """Attend by a flash kernel, causally or within a mask."""
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, attn_mask is None, attn_mask=attn_mask)[0]


_OF_GPUS: dict[Any, Callable[..., Tensor]] = {
    # With a mask of one byte per number.
    F.dropout: lambda x, p=0.5, training=True, inplace=False: torch.native_dropout(x, p, training)[0],
    F.scaled_dot_product_attention: _attention,
}
