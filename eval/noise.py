"""Random numbers that depend on what they are for, not on when or where they are drawn.

Every uniform is a hash of (row key, counter, stream, index), so a row's text is the same alone, in a
batch, after an interruption, and on another device. B rows, n numbers per row.
"""

import hashlib

import torch
from torch import Tensor

DRAFT, ACCEPT, EMIT, NOISE, SAMPLE = 0, 1, 2, 3, 4
"""Streams: drawing draft tokens, accepting them, and emitting the correction or bonus token; in training the noise on
hidden states, and the sample of rows to learn from."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FACTORS = (-4658895280553007687, -7723592293110705685)
_FEW = 512
_WORD = (1 << 64) - 1


def row_key(seed: int, *names: object) -> int:
    """Return a signed 64-bit key for a row named by `names` (a sample id, a repeat number, ...)."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign (torch shifts int64 arithmetically)."""
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


def _many(keys_B: Tensor, counter_B: Tensor, stream: int, count: int) -> Tensor:
    """As `uniforms`, in tensor operations."""
    state_B = _mix(_mix(_mix(keys_B) + counter_B) + stream)
    index = torch.arange(count, device=keys_B.device)
    bits_Bn = _mix(state_B[:, None] + index)
    return _shift(bits_Bn, 11).double() * 2.0**-53


def _few(key: int, counter: int, stream: int, count: int) -> list[float]:
    """As `uniforms` for one row, in Python's integers."""
    state = _mix_word(_mix_word(_mix_word(key) + counter) + stream)
    return [(_mix_word(state + index) >> 11) * 2.0**-53 for index in range(count)]


def _mix_word(x: int) -> int:
    """As `_mix`, on an unsigned word."""
    x = (x + _GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * _FACTORS[0]) & _WORD
    x = ((x ^ (x >> 27)) * _FACTORS[1]) & _WORD
    return x ^ (x >> 31)
