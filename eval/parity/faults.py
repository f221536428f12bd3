"""Known-bad engines: ways in which a serving engine draws other drafts from a right head, each made by spoiling our own.

FAULTS is the one table: what a fault is called, where it first shows, what users are told, which heads can have it, and how our engine is
spoiled so that it has it. What each would draft along the prompts of an export is kept in its bundle.

Shapes: B rows, n new tokens, F width of the aux streams, S slots of a block, D head size, W draft vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, NewTokens
from draftsmith.eval.parity.replay import Engine, Text
from draftsmith.heads.block.base import BlockHead
from draftsmith.heads.drafters import LayerCache
from draftsmith.heads.eagle.base import EagleDrafter, EagleHead
from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.target.target import Target

FIRST, LATER, COUNTS = "the first drafted token", "later drafted tokens", "counts alone"


@dataclass(frozen=True)
class Fault:
    """stage: where it usually shows first. cause: the end of a sentence that begins with "usually". spoil: makes a right engine for a target
    wrong, and returns False where its head cannot have the fault."""

    name: str
    stage: str
    cause: str
    spoil: Callable[[Engine, Target], bool]


def _layers(by: int) -> Callable[[Engine, Target], bool]:
    def spoil(engine: Engine, target: Target) -> bool:
        engine.layer_ids = moved = tuple(k + by for k in engine.layer_ids)
        return bool(moved) and 0 <= min(moved) <= max(moved) <= target.num_layers

    return spoil


def _layer_order(engine: Engine, target: Target) -> bool:
    engine.layer_ids = engine.layer_ids[::-1]
    return len(engine.layer_ids) > 1


def _reads_last(head: Any) -> bool:
    return head.reads.target_states and not head.reads.layer_ids


def _before_norm(engine: Engine, target: Target) -> bool:
    engine.last = lambda text: text.streams[-1]
    return _reads_last(engine.head)


def _norm_twice(engine: Engine, target: Target) -> bool:
    # The norm of a state behind a norm: what made `last` of the stream, applied again, which its weights tell.
    def again(text: Text) -> Tensor:
        stream, last = text.streams[-1].float(), text.last.float()
        weight = (last * stream.square().mean(-1, keepdim=True).sqrt() / stream).nanmedian(0).values
        return (last / last.square().mean(-1, keepdim=True).sqrt() * weight).to(text.last)

    engine.last = again
    return _reads_last(engine.head)


def _pairing(engine: Engine, target: Target) -> bool:
    held: list[Tensor] = []

    def shifted(new: NewTokens) -> NewTokens:
        """Each state with the token of its own place instead of the next one."""
        first = held.pop() if held else new.tokens_Bn[:, :1]
        held.append(new.at_last(new.tokens_Bn[..., None]))
        return replace(new, tokens_Bn=torch.cat([first, new.tokens_Bn[:, :-1]], 1))

    engine.read, engine.started = shifted, lambda drafter: held.clear()
    return isinstance(engine.head, EagleHead)


def _residual(engine: Engine, target: Target) -> bool:
    if not isinstance(engine.head, FusedHead):
        return False
    layer: Any = engine.head.layers[0]
    layer.norm_before_residual = not layer.norm_before_residual
    return True


def _embedding_of_target(engine: Engine, target: Target) -> bool:
    if (held := getattr(engine.head, "embed_tokens", None)) is None:
        return False
    theirs = target.embedding.to(held.weight)
    engine.head.embed_tokens = torch.nn.Embedding.from_pretrained(theirs)
    return held.weight.shape == theirs.shape and not torch.equal(held.weight, theirs)


def _embedding_lost(engine: Engine, target: Target) -> bool:
    if (held := getattr(engine.head, "embed_tokens", None)) is None:
        return False
    engine.head.embed_tokens = torch.nn.Embedding.from_pretrained(torch.zeros_like(held.weight))
    return True


def _other_map(change: Callable[[Tensor], Tensor]) -> Callable[[Engine, Target], bool]:
    def spoil(engine: Engine, target: Target) -> bool:
        head, vocab = engine.head, engine.head.draft_vocab
        if vocab is None or len(vocab) == target.vocab_size:
            return False
        if isinstance(head, BlockHead):  # whose logits are the target's of the right tokens
            head.logits = lambda states: head.target_head.logits(states, vocab)  # type: ignore[method-assign]
        head.draft_vocab = change(vocab)
        return True

    return spoil


def _mask_token(engine: Engine, target: Target) -> bool:
    if (token := getattr(engine.head.options, "mask_token_id", None)) is None:
        return False
    engine.head.options = replace(engine.head.options, mask_token_id=token - 1 if token else 1)
    return True


def _sees(engine: Engine, target: Target) -> bool:
    engine.head.causal = not getattr(engine.head, "causal", True)
    return isinstance(engine.head, BlockHead)


def _window(engine: Engine, target: Target) -> bool:
    if engine.head.window is None:
        return False
    engine.head.window += getattr(engine.head.options, "block_size", engine.K)
    return True


def _no_window(engine: Engine, target: Target) -> bool:
    had, engine.head.window = engine.head.window, None
    return had is not None


def _block_length(engine: Engine, target: Target) -> bool:
    head = engine.head
    if not isinstance(head, BlockHead) or not head.whole:
        return False
    needed = head.first_slot + engine.K
    size = needed if needed < head.options.block_size else head.options.block_size + 1
    head.slots = lambda tokens: size  # type: ignore[method-assign]
    return True


def _first_slot(engine: Engine, target: Target) -> bool:
    head = engine.head
    if not isinstance(head, BlockHead):
        return False
    size = max(head.slots(engine.K), 1 - head.first_slot + engine.K)
    head.first_slot, head.slots = 1 - head.first_slot, lambda tokens: size  # type: ignore[method-assign]
    return True


def _other_prompt(engine: Engine, target: Target) -> bool:
    engine.other, head = True, engine.head
    layered = isinstance(head, EagleHead | BlockHead) or getattr(head, "prefix_embedding_layer", None) is not None
    return layered or not head.reads.target_states  # those keep something of the text between rounds


def _turned(head: Any, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions that are one further on."""
    (cos, sin), like = rotation, next(head.parameters())
    c, s = head.rotary_emb(like, torch.tensor([[0, 1]], device=like.device))
    scale = c[:, :1].square() + s[:, :1].square()
    c, s = (c[:, 1:] * c[:, :1]) / scale, (s[:, 1:] * c[:, :1]) / scale
    return cos * c - sin * s, sin * c + cos * s


def _rope(engine: Engine, target: Target) -> bool:
    head, mask = engine.head, getattr(engine.head.options, "mask_token_id", None)
    if isinstance(head, BlockHead):
        fill = head.fill
        head.fill = lambda tokens, rotation, **more: fill(tokens, _turned(head, rotation), **more)  # type: ignore
        return True
    if isinstance(head, FusedHead) and mask is not None:  # P-EAGLE: the entries of masks
        layer = head.layer

        def turned(tokens: Tensor, hidden: Tensor, rotation: Any, *more: Any) -> Tensor:
            masked = (tokens == mask)[..., None]
            moved = tuple(torch.where(masked, b, a) for a, b in zip(rotation, _turned(head, rotation), strict=True))
            return layer(tokens, hidden, moved, *more)  # type: ignore[arg-type]

        head.layer = turned  # type: ignore[method-assign, assignment]
        return engine.K > 1

    def patch(drafter: Any) -> None:
        real = drafter.cache.rotations_apart
        drafter.cache.rotations_apart = lambda count, longest: real(count + 1, longest)[1:]

    engine.started = patch
    return isinstance(head, EagleHead) and engine.K > 1


def _feedback(engine: Engine, target: Target) -> bool:
    head = engine.head
    if not isinstance(head, EagleHead) or not hasattr(head, "norm") or hasattr(head, "mask_hidden") or engine.K < 2:
        return False
    sample = torch.randn(1, head.config.hidden_size, device=head.fc.weight.device)
    normed = not torch.equal(head.feedback(sample), sample)
    head.feedback = (lambda out: out) if normed else head.norm  # type: ignore
    return True


def _one_by_one(engine: Engine, target: Target) -> bool:
    engine.make = EagleDrafter
    return hasattr(engine.head, "mask_hidden") and engine.K > 1


def _tokens(by: int) -> Callable[[Engine, Target], bool]:
    def spoil(engine: Engine, target: Target) -> bool:
        engine.K += by
        return engine.K >= 1 and engine.head.clamp_draft_length(engine.K) == engine.K

    return spoil


def _lengths_of_its_own(cache: Any) -> None:
    """Let a cache go by its own lengths, where these are no longer the text's."""
    stage, rotation = cache.stage, getattr(cache, "_rotation", None)
    cache.stage = lambda count, longest=0, rows_b=None, skip=0: stage(count, int(cache.lengths_B.max()), rows_b, skip)
    if rotation is not None:
        cache._rotation = lambda base_B, first, count: rotation(base_B, int(base_B.max()), count)


def _stale_keys(engine: Engine, target: Target) -> bool:
    head, K = engine.head, engine.K
    if not head.reads.target_states:
        return _stale_model(engine)
    entries = head.slots(K) if isinstance(head, BlockHead) else K - 1

    def patch(drafter: Any) -> None:
        cache, rollback = drafter.cache, drafter.cache.rollback
        _lengths_of_its_own(cache)
        cache.rollback = lambda lengths, rows_b=None: None if rows_b is None else rollback(lengths, rows_b)

    engine.room, engine.started = entries + 2, patch
    engine.drafted = lambda drafter, draft: drafter.cache.append(entries)
    return isinstance(head, EagleHead | BlockHead) and entries > 0


def _stale_model(engine: Engine) -> bool:
    """The same of a draft model, whose drafts are in its cache when a round begins."""

    def patch(drafter: Any) -> None:
        passed = drafter._pass
        _lengths_of_its_own(drafter.cache)
        drafter._pass = lambda tokens, longest, rows_b=None: passed(tokens, int(drafter.cache.lengths_B.max()), rows_b)

        def read(state: DecodeState, most: int) -> Tensor:
            states_BnD: Tensor = drafter._pass(state.new_tokens.tokens_Bn, 0)
            drafter.cache.append(state.new_tokens.count_B)
            return state.new_tokens.at_last(states_BnD)

        drafter._read = read

    engine.room, engine.started = engine.K + 2, patch
    return engine.K > 1


def _bonus_lost(engine: Engine, target: Target) -> bool:
    def root(state: DecodeState, before: Draft | None) -> DecodeState:
        new = state.new_tokens
        if before is None or new.tokens_Bn.shape[1] < 2:
            return state
        lost_B = (new.count_B == before.nodes_B).long()
        read = replace(new, count_B=new.count_B - lost_B)
        lengths = tuple(n - k for n, k in zip(state.host_lengths, lost_B.tolist(), strict=True))
        return replace(
            state,
            new_tokens=read.select(torch.arange(len(lost_B), device=lost_B.device)),
            root_B=read.at_last(new.tokens_Bn[..., None])[:, 0],
            length_B=state.length_B - lost_B,
            host_lengths=lengths,
        )

    def patch(drafter: Any) -> None:
        if isinstance(getattr(drafter, "cache", None), LayerCache):
            _lengths_of_its_own(drafter.cache)

    engine.root, engine.started = root, patch
    return engine.head.reads.target_states


def _half(engine: Engine, target: Target) -> bool:
    head = engine.head
    if next(head.parameters()).dtype != torch.float32 or target.dtype != torch.float32:
        return False
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            rounded = parameter.detach().to(torch.bfloat16).to(parameter.dtype)
            module._parameters[name] = torch.nn.Parameter(rounded, requires_grad=False)
    return True


_FIRST = (
    ("layer + 1", "the layers it reads are one too high: ids of layers' outputs taken for inputs", _layers(1)),
    ("layer - 1", "the layers it reads are one too low: ids of layers' inputs taken for outputs", _layers(-1)),
    ("layer order", "the layers it reads come in another order", _layer_order),
    ("state before the final norm", "it reads the target's state before the final norm", _before_norm),
    ("final norm twice", "the target's final norm is applied twice to the state it reads", _norm_twice),
    ("token and state apart", "each state is read with its own token instead of the next one", _pairing),
    ("residual", "norm_before_residual is taken the other way (it has other defaults elsewhere)", _residual),
    ("the target's embedding", "the target's embedding is taken where the head has its own", _embedding_of_target),
    ("no embedding", "the head's embedding was not loaded", _embedding_lost),
    ("shifted vocabulary map", "the vocabulary map (d2t) is shifted", _other_map(lambda ids: ids.roll(-1))),
    (
        "no vocabulary map",
        "the vocabulary map (d2t) is left out, so that ids of the draft are taken for ids of the target",
        _other_map(lambda ids: torch.arange(len(ids), device=ids.device)),
    ),
    ("mask token", "another token stands for what is not drafted yet (mask_token_id)", _mask_token),
    ("causal", "the block is causal where it should see itself whole, or the other way round", _sees),
    ("window a block too wide", "its attention window is wider than the trained one", _window),
    ("no window", "its attention window is left out", _no_window),
    ("block length", "it fills in a block of another length than the trained one", _block_length),
    ("fill-in", "fill-in is taken for anchor-sampled, or the other way round: drafts begin one slot off", _first_slot),
    ("another prompt's cache", "the draft's cache is that of the prompt before", _other_prompt),
)
_LATER = (
    ("RoPE offset", "drafted tokens stand one position too far (RoPE)", _rope),
    (
        "state fed back",
        "the state fed back is the one before the norm where it should be behind it, or the other way round",
        _feedback,
    ),
    (
        "one by one",
        "drafts are made one by one where the head drafts in parallel (parallel_drafting is missing)",
        _one_by_one,
    ),
    ("K with the bonus", "its number of tokens counts the bonus token, so that it drafts one less", _tokens(-1)),
    ("K and one more", "it drafts one token more than the export says", _tokens(1)),
    ("keys of rejected drafts", "keys of rejected drafts stay in the draft's cache", _stale_keys),
    ("bonus token not read", "the token behind a draft that was accepted whole is not read by the head", _bonus_lost),
    ("half precision", "the head's weights are rounded to bfloat16", _half),
)
FAULTS = [Fault(row[0], stage, *row[1:]) for stage, rows in ((FIRST, _FIRST), (LATER, _LATER)) for row in rows]
"""Those whose drafts can be foretold. Others (QUANTIZED, ...) are told by what is left: see diagnose.py."""


def spoiled(fault: Fault, head: Any, tokens: int, target: Target) -> Engine | None:
    """Return an engine with a fault, None where the head cannot have it."""
    engine = Engine.of(head, tokens)
    return engine if fault.spoil(engine, target) else None
