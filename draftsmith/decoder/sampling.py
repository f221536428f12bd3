"""Sampling: the settings, the distribution that they make of logits, drawing from it, and the random numbers for that.

Every uniform is a hash of (row key, counter, stream, index), so a row's text is the same alone, in a batch, after an
interruption, and on another device.

Shapes: B rows, V vocabulary (of target or draft), W draft vocabulary, C children of a node, n numbers per row.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral, Real

import torch
from torch import Tensor

from draftsmith.errors import UserError

DRAFT, ACCEPT, EMIT, NOISE, SAMPLE, DROP, PREFIX = 0, 1, 2, 3, 4, 5, 6
"""Streams. In decoding: draft tokens, their acceptance, and the correction or bonus token. In training: noise on hidden
states, the sample of rows to learn from, dropout, and how much of a block is shown."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FACTORS = (-4658895280553007687, -7723592293110705685)
_FEW, _AHEAD = 512, 64
"""A table holds so many numbers of one stream at most for one counter of all rows, and so many counters of each row."""

_BLOCK = 64
_LARGE = 1 << 14
"""Fewer logits than this are searched without blocks."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in the order of the arguments (the penalty first).

    Args:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens whose mass reaches this; 1 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one; 0 keeps all.
        repetition_penalty: logits of tokens that the prompt or the output holds already are divided by it where they are
            positive and multiplied where they are negative (Keskar et al., "CTRL", 2019, section 4.1); 1 changes nothing.
            It applies to the target alone: drafts are made without it.

    Raises:
        UserError: for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.name == "top_k"
            if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
                kind = "whole number" if whole else "number"
                raise UserError(f"{field.name} is {value!r}: it must be a {kind}, such as {field.default}.")
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}: it must be 0 (greedy), or a number from 0.000001 on.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (no limit) or larger.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1 (no limit).")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it must be from 0 (no limit) to 1 (the most likely token alone).")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}: it must be a number above 0, where 1 changes nothing."
            )

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return `logits` [..., V] with the repetition penalty on the tokens where `seen` (bool [..., V]) is true."""
    return torch.where(seen, weaken(logits, penalty), logits)


def weaken(logits: Tensor, penalty: float) -> Tensor:
    """Return `logits` with the repetition penalty on all of them."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the float32 distribution [..., V] of `logits` after temperature, top-k, top-p and min-p, in this order.

    Ties at the k-th place are all kept; top-p keeps the smallest set of most likely tokens whose
    mass reaches top_p; min-p keeps those at least min_p times as likely as the most likely one. Needs temperature > 0:
    a greedy choice is an argmax, not a distribution.
    """
    assert not sampling.greedy
    scores = logits.float()
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if the mass before it has not reached top_p yet.
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(beyond, 0))
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    if sampling.top_p < 1 or sampling.min_p > 0:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def top1(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of `logits` [..., V] and its index (of equals the first), [...] each.

    On a CPU an argmax takes many times as long as a maximum, so the maximum of each block is found first.
    """
    size, blocks = logits.shape[-1], logits.shape[-1] // _BLOCK
    if logits.device.type != "cpu" or size % _BLOCK or logits.numel() < _LARGE:
        largest = logits.max(-1)
        return largest.values, largest.indices
    blocked = logits.unflatten(-1, (blocks, _BLOCK))
    best = blocked.amax(-1).max(-1, keepdim=True)
    inside = blocked.gather(-2, best.indices[..., None].expand(*best.indices.shape, _BLOCK))[..., 0, :].argmax(-1)
    return best.values[..., 0], best.indices[..., 0] * _BLOCK + inside


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw one index per row in proportion to `weights_BV` (any positive sum) by inverting the CDF with `uniform_B`."""
    cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    point_B1 = (uniform_B.double() * cdf_BV[:, -1])[:, None]
    return torch.searchsorted(cdf_BV, point_B1, right=True)[:, 0].clamp_(max=weights_BV.shape[-1] - 1)


def without(probs: Tensor, index: Tensor) -> Tensor:
    """Return the distribution `probs` [..., W] without the entry `index` [...]; all zeros when no mass is left."""
    rest = probs.scatter(-1, index[..., None], 0)
    mass = rest.sum(-1, keepdim=True)
    return rest / mass.where(mass != 0, 1)


def draw_children(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices [..., C] from `probs` [..., W] one by one, without replacement, with one of `uniforms` [..., C] each.

    The order is part of the result: the verifier accepts or rejects the children in it, and only the last ones may be
    dropped. Once no mass is left an index means nothing, and the verifier skips it.
    """
    rest, uniform = probs.reshape(-1, probs.shape[-1]), uniforms.reshape(-1, uniforms.shape[-1])
    drawn = [draw(rest, uniform[:, 0])]
    for child in range(1, uniform.shape[1]):
        rest = without(rest, drawn[-1])
        drawn.append(draw(rest, uniform[:, child]))
    return torch.stack(drawn, 1).view_as(uniforms)


def row_key(seed: int, *names: object) -> int:
    """Return a signed 64-bit key for a row named by `names` (a sample id, a repeat number, ...)."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros (torch shifts int64 with the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Mix 64 bits (the finalizer of SplitMix64, Steele et al. 2014); int64 products wrap around."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _FACTORS[0]
    x = (x ^ _shift(x, 27)) * _FACTORS[1]
    return x ^ _shift(x, 31)


def uniforms(keys_B: Tensor, counter_B: Tensor, stream: int, count: int) -> Tensor:
    """Return [B, count] float64 uniforms in [0, 1) for (key, counter, stream, index)."""
    state_B = _mix(_mix(_mix(keys_B) + counter_B) + stream)
    index = torch.arange(count, device=keys_B.device)
    bits_Bn = _mix(state_B[:, None] + index)
    return _shift(bits_Bn, 11).double() * 2.0**-53


class NoiseTable:
    """The `uniforms` of a few rows for their next counters, made on the host and uploaded once for many rounds: each draw would be
    a hash of sixty kernels.

    keys, first: of each row, the key and the first counter.
    """

    def __init__(self, keys: Sequence[int], first: Sequence[int], device: torch.device) -> None:
        self.keys, self.first, self._device = [*keys], [*first], device
        self._streams: dict[int, Tensor] = {}

    def covers(self, keys: Sequence[int], counters: Sequence[int]) -> bool:
        """Return whether it holds these counters of these rows."""
        pairs = zip(counters, self.first, strict=False)
        return self.keys == keys and all(0 <= counter - first < _AHEAD for counter, first in pairs)

    def stream(self, stream: int, count: int) -> Tensor | None:
        """Return [B, counters, at least `count`] uniforms; None where so many are made faster on the device."""
        if len(self.keys) * count > _FEW:
            return None
        if stream not in self._streams or self._streams[stream].shape[2] < count:
            width = 1 << (count - 1).bit_length() if count else 0
            counter_BC = torch.tensor(self.first)[:, None] + torch.arange(_AHEAD)
            keys_BC = torch.tensor(self.keys)[:, None].expand_as(counter_BC)
            made = uniforms(keys_BC.flatten(), counter_BC.flatten(), stream, width)
            self._streams[stream] = made.view(*counter_BC.shape, width).to(self._device, non_blocking=True)
        return self._streams[stream]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The numbers of the rows and their first counters, on the device."""
        first_B = torch.tensor(self.first).to(self._device, non_blocking=True)
        return torch.arange(len(self.first), device=self._device), first_B


@dataclass(frozen=True)
class Noise:
    """A round's random numbers: one key per row, and a counter that no later round repeats.

    table: where they are at hand. counter: that of a single row, on the host; with a table only."""

    keys_B: Tensor
    counter_B: Tensor
    table: NoiseTable | None = None
    counter: int = 0

    def draw(self, stream: int, count: int) -> Tensor:
        """Return [B, count] uniforms of one stream."""
        if self.table is None or (made_BCn := self.table.stream(stream, count)) is None:
            return uniforms(self.keys_B, self.counter_B, stream, count)
        if len(made_BCn) == 1:
            return made_BCn[:, self.counter - self.table.first[0], :count]
        row_B, first_B = self.table.rows
        return made_BCn[row_B, self.counter_B - first_B, :count]


def kept(keys_B: Tensor, counter_B: Tensor, stream: int, first: int, count: int, rate: float) -> Tensor:
    """Return bool [B, count], False with probability `rate` (to 16 bits), for (key, counter, stream, first + index).

    One hash gives four numbers of 16 bits, enough for dropout. Different calls of one stream must not overlap in
    `first` .. `first` + count, rounded up to fours; first: a multiple of four.
    """
    assert first % 4 == 0, "four numbers come from one hash"
    state_B = _mix(_mix(_mix(keys_B) + counter_B) + stream)
    index = torch.arange(first // 4, first // 4 - (-count // 4), device=keys_B.device)
    bits_Bn = _mix(state_B[:, None] + index).view(torch.int16)[:, :count]
    return bits_Bn >= round(rate * 2**16) - 2**15
