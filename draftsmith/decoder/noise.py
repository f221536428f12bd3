"""Counter-based random numbers: every uniform is a hash of (row key, counter, stream, index).

So a row's text is the same alone, in a batch, after an interruption, and on another device.

Shapes: B rows, n numbers per row.
"""

import hashlib

import torch
from torch import Tensor

DRAFT, ACCEPT, EMIT, NOISE, SAMPLE, DROP = 0, 1, 2, 3, 4, 5
"""Streams. In decoding: draft tokens, their acceptance, and the correction or bonus token. In training: noise on hidden
states, the sample of rows to learn from, and dropout."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FACTORS = (-4658895280553007687, -7723592293110705685)
_FEW = 512
_WORD = (1 << 64) - 1


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
    if keys_B.device.type == "cpu" and len(keys_B) * count <= _FEW:
        # Some thirty small tensor operations take longer than a few numbers in Python.
        pairs = zip(keys_B.tolist(), counter_B.tolist(), strict=True)
        numbers = [_few(key, counter, stream, count) for key, counter in pairs]
        return torch.tensor(numbers, dtype=torch.float64).view(len(keys_B), count)
    return _many(keys_B, counter_B, stream, count)


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


def _many(keys_B: Tensor, counter_B: Tensor, stream: int, count: int) -> Tensor:
    """Compute `uniforms` in tensor operations."""
    state_B = _mix(_mix(_mix(keys_B) + counter_B) + stream)
    index = torch.arange(count, device=keys_B.device)
    bits_Bn = _mix(state_B[:, None] + index)
    return _shift(bits_Bn, 11).double() * 2.0**-53


def _few(key: int, counter: int, stream: int, count: int) -> list[float]:
    """Compute `uniforms` of one row in Python integers."""
    state = _mix_word(_mix_word(_mix_word(key) + counter) + stream)
    return [(_mix_word(state + index) >> 11) * 2.0**-53 for index in range(count)]


def _mix_word(x: int) -> int:
    """Compute `_mix` of an unsigned 64-bit word."""
    x = (x + _GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * _FACTORS[0]) & _WORD
    x = ((x ^ (x >> 27)) * _FACTORS[1]) & _WORD
    return x ^ (x >> 31)
