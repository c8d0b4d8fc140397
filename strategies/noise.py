"""Noise that depends on (seed, prompt, position, token) and on nothing else.

A counter-based hash instead of a generator with a state: every arm, on any device, in any order, with or without
batch neighbours, sees the same noise at the same place. That is what makes sampled output comparable token by token.

The hash is two rounds of a 32-bit finaliser (xor-shift and multiply, the shape of MurmurHash3's `fmix32` by Austin
Appleby, public domain) keyed per position by SplitMix64 (Steele, Lea, Flood 2014). Integer arithmetic only, so CPU and
GPU agree to the bit; the two logarithms after it may differ in the last place between devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Independent streams at one position.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def position_key(seed: int, prompt: int, position: int, stream: int) -> int:
    """64 bits that stand for one position of one prompt in one stream."""
    key = _splitmix(seed & _MASK64)
    key = _splitmix(key ^ (prompt & _MASK64))
    return _splitmix(key ^ (position * 4 + stream))


def uniform(seed: int, prompt: int, position: int, stream: int = ACCEPT) -> float:
    """One number in [0, 1), for the accept test of the rejection rule."""
    return (position_key(seed, prompt, position, stream) >> 11) / float(1 << 53)


def _mix32(x: Any, mask: int | None = None) -> None:
    """In place, on 32-bit values.

    Args:
        mask: of 64-bit integers that hold them. A product may wrap in 64 bits; its low half is right even so.
    """
    x ^= x >> 16
    x *= 0x85EBCA6B
    if mask:
        x &= mask
    x ^= x >> 13
    x *= 0xC2B2AE35
    if mask:
        x &= mask
    x ^= x >> 16


def gumbel(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of some tokens at the position that `key` stands for.

    Args:
        key: from `position_key`.
        tokens: (n,) int64 token ids.

    Returns:
        (n,) float64 on the same device, between -3.2 and 22.9 (32 random bits).
    """
    if tokens.device.type == "cpu":
        return torch.from_numpy(_by_numpy(key, tokens.numpy()))
    return _by_torch(key, tokens)


def _by_torch(key: int, tokens: torch.Tensor) -> torch.Tensor:
    x = tokens * 0x9E3779B1
    x += key & _MASK32
    x &= _MASK32
    _mix32(x, _MASK32)
    x ^= key >> 32
    _mix32(x, _MASK32)
    # The middle of one of 2**32 intervals, so never 0 and never 1; exact in float64.
    exponential = x.double().add_(0.5).mul_(2.0**-32).log_().neg_()
    return exponential.log_().neg_()


def _by_numpy(key: int, tokens: np.ndarray) -> np.ndarray:
    """The same at less than half the cost: unsigned integers wrap by themselves, and numpy's calls are short."""
    x = tokens.astype(np.uint32)
    x *= 0x9E3779B1
    x += key & _MASK32
    _mix32(x)
    x ^= key >> 32
    _mix32(x)
    noise = x.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-32
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
