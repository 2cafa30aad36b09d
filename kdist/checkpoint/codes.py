"""Values from 16-bit codes, as `kdist.storage.state_formats` defines them, without TensorFlow.

A checkpoint says what its codes mean, so that it can be read whatever formats are called later.
"""

from __future__ import annotations

import functools

import numpy as np

CODES = np.dtype("uint16")


def described(signed: bool, exponent_bits: int, mantissa_bits: int, bias: int) -> str:
    """A format as text: bits of sign, exponent and mantissa, and the bias; `1-6-9/39`."""
    return f"{int(signed)}-{exponent_bits}-{mantissa_bits}/{bias}"


def decode(codes: np.ndarray, form: str, dtype: np.dtype) -> np.ndarray:
    """The values of codes.

    Args:
        codes: Of any shape.
        form: See `described`.
        dtype: Of the values.
    """
    return np.asarray(_values(form).astype(dtype)[codes])


@functools.cache
def _values(form: str) -> np.ndarray:
    """The value of each code."""
    bits, _, after = form.partition("/")
    signed, exponent_bits, mantissa_bits = map(int, bits.split("-"))
    bias, codes = int(after), np.arange(1 << 16)
    size = codes & 0x7FFF if signed else codes
    exponent, mantissa = size >> mantissa_bits, size & ((1 << mantissa_bits) - 1)
    highest = (1 << exponent_bits) - 1
    normal = exponent > 0
    # As an integer, times the smallest number of its exponent: exact.
    whole = (mantissa + (normal << mantissa_bits)).astype(np.float64)
    scale = np.minimum(np.maximum(exponent, 1), highest - 1) - bias - mantissa_bits
    values = np.ldexp(whole, scale)
    values[exponent == highest] = np.nan
    values[(exponent == highest) & (mantissa == 0)] = np.inf
    return np.where(codes >> 15 & signed, -values, values)
