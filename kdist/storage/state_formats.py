"""16-bit formats for optimizer moments: what a code means, and the way there and back.

| format | sign | exponent | mantissa | bias | for |
| --- | --- | --- | --- | --- | --- |
| `bf16` | 1 | 8 | 7 | 127 | either moment: float32's range, least precision |
| `1-6-9` | 1 | 6 | 9 | 39 | first moments |
| `0-6-10` | 0 | 6 | 10 | 47 | second moments: never negative, so the sign pays for precision |

The two 6-bit formats are those in which DALL-E kept Adam's moments (Ramesh et al. 2021,
arXiv:2102.12092, appendix on mixed-precision training). No source gives their bias; the ones here
were chosen so that no per-tensor scale is needed:

- `0-6-10`, bias 47. The smallest normal number is 2^-46 = 1.42e-14, about the square of Keras's
  epsilon, 1e-7. Adam divides by sqrt(v) + epsilon, so below that v counts for less and less, and
  above it every v has all 10 mantissa bits. The smallest number of all, 2^-56, is below the square
  of 1e-8, the other epsilon in use. The largest is 65504: a gradient of 256 in every step, or a
  single one of 8000 at beta_2 0.999.
- `1-6-9`, bias 39. First moments are of the size of gradients, of momentum sums (SGD, Muon), or of
  gradients times a learning rate: 2^-47 = 7.1e-15 to 1.7e7. What is smaller moves no parameter:
  Adam's step is at most lr * m / epsilon, here 7e-8 of a learning rate.

A positive second moment that is stored as 0 would turn a step of about lr * m / sqrt(v) into
lr * m / epsilon. So in `0-6-10` only 0 becomes 0: a positive value below the smallest number is
rounded *up* to it, in both rounding modes. The step gets smaller by that, never larger.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS = ("nearest", "stochastic")

_LONGEST_SHIFT = 62
"""Bits below the last kept one that rounding looks at, so that sums stay below 2^63."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A 16-bit floating-point format: sign bit (if any), then exponent, then mantissa.

    As in IEEE 754, exponent field 0 is for zero and subnormal numbers and the highest one for
    infinity (mantissa 0) and NaN; the value of a normal number is
    (1 + mantissa / 2^mantissa_bits) * 2^(exponent - bias). Larger code, larger value.

    Attributes:
        name: What configurations call it.
        signed: Whether it has a sign bit.
        exponent_bits: 2 to 8.
        mantissa_bits: With the sign and the exponent, 16 bits.
        bias: Subtracted from the exponent field; see the module for how the biases were chosen.
        keep_positive: Whether a positive value that is too small becomes the smallest positive
            number instead of 0.

    Raises:
        ValueError: For bits that are not 16 together, or a range that float32 does not hold.

    Example:
    ```python
    codes = FORMATS["0-6-10"].encode(tf.constant([1.0, 1e-30]))  # tf.uint16
    FORMATS["0-6-10"].decode(codes, tf.float32)                  # [1.0, 1.3877788e-17]
    ```
    """

    name: str
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    keep_positive: bool = False

    def __post_init__(self) -> None:
        bits = (1 if self.signed else 0) + self.exponent_bits + self.mantissa_bits
        if bits != 16 or self.mantissa_bits < 1 or self.exponent_bits < 2:
            raise ValueError(
                "A format has 16 bits: the sign's, at least 2 of the exponent and at least 1 of "
                "the mantissa. "
                f"Received: signed={self.signed}, exponent_bits={self.exponent_bits}, "
                f"mantissa_bits={self.mantissa_bits}"
            )
        top = (1 << self.exponent_bits) - 2 - self.bias
        fits = self.bias == 127 or 1 - self.bias - self.mantissa_bits >= -126
        if top > 127 or not fits:
            raise ValueError(
                "Every finite number of a format is a normal float32, or the format has float32's "
                "own bias, 127. Choose a bias nearer to the middle of the exponents. "
                f"Received: exponent_bits={self.exponent_bits}, bias={self.bias}"
            )

    @property
    def infinity_code(self) -> int:
        """Code of infinity; with the sign bit, of minus infinity."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan_code(self) -> int:
        """The NaN that `encode` writes. Every code above infinity's reads as NaN."""
        return self.infinity_code | 1 << (self.mantissa_bits - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        return self.infinity_code - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        exponent = (1 << self.exponent_bits) - 2 - self.bias
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0**exponent

    @property
    def min_normal(self) -> float:
        """The smallest positive number with all mantissa bits."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def encode(self, tensor: Any, rounding: Rounding = "nearest", seed: Any = None) -> tf.Tensor:
        """Rounds values to codes.

        Finite values beyond the largest number become the largest; infinity stays infinity, NaN
        stays NaN (its sign and payload are not kept). In a format without a sign everything
        negative, minus infinity included, becomes 0.

        Args:
            tensor: float32 or float64 of any shape; float16 and bfloat16 go through float32.
            rounding: `"nearest"`: ties go to the even code. `"stochastic"`: up or down with the
                odds that make the expected value exact, so that changes smaller than half of the
                last bit are not lost over many steps. (`keep_positive` and saturation stay.)
            seed: For `"stochastic"`: an int, or an integer tensor of shape (2,). The same seed
                gives the same codes.

        Returns:
            tf.uint16 codes of the same shape.

        Raises:
            ValueError: For another dtype or rounding, or stochastic rounding without a seed.
        """
        x = tf.convert_to_tensor(tensor)
        if x.dtype in (tf.float16, tf.bfloat16):
            x = tf.cast(x, tf.float32)
        source = _source(x.dtype)
        negative, bits = _split(x, source)
        number, shift = self._align(bits, source)
        codes = _round(number, shift, _check_rounding(rounding, seed), seed)
        codes = tf.minimum(codes, self.max_code)
        if self.keep_positive:
            codes = tf.where((codes == 0) & (bits > 0), _int(1), codes)
        codes = tf.where(bits == source.infinity, _int(self.infinity_code), codes)
        if self.signed:
            codes = tf.where(negative, codes + (1 << 15), codes)
        else:
            codes = tf.where(negative, _int(0), codes)
        codes = tf.where(bits > source.infinity, _int(self.nan_code), codes)
        return tf.cast(codes, tf.uint16)

    def _align(self, bits: tf.Tensor, source: _Source) -> tuple[tf.Tensor, tf.Tensor]:
        """Integers whose bits above `shift` are the truncated code, and that shift."""
        dropped = source.mantissa_bits - self.mantissa_bits
        first_normal = source.bias + 1 - self.bias  # exponent field, in the source, of min_normal
        exponent = tf.bitwise.right_shift(bits, source.mantissa_bits)
        fraction = tf.bitwise.bitwise_and(bits, (1 << source.mantissa_bits) - 1)
        significand = tf.where(exponent > 0, fraction + (1 << source.mantissa_bits), fraction)
        rebased = bits - ((source.bias - self.bias) << source.mantissa_bits)
        number = tf.where(exponent >= first_normal, rebased, significand)
        missing = tf.maximum(first_normal - tf.maximum(exponent, 1), 0)
        shift = dropped + missing
        # Far below the smallest number: the lowest bits are given up for a shift that fits.
        excess = tf.clip_by_value(shift - _LONGEST_SHIFT, 0, _LONGEST_SHIFT)
        return tf.bitwise.right_shift(number, excess), tf.minimum(shift, _LONGEST_SHIFT)

    def decode(self, codes: Any, dtype: Any) -> tf.Tensor:
        """The values of codes; exact, also where TensorFlow flushes subnormals to zero.

        Args:
            codes: tf.uint16 of any shape.
            dtype: tf.float32 or tf.float64, or its name.

        Returns:
            A tensor of `dtype` and the same shape.

        Raises:
            ValueError: For another dtype.
        """
        dtype = tf.as_dtype(dtype)
        source = _source(dtype)
        codes = tf.cast(codes, tf.int64)
        size = tf.bitwise.bitwise_and(codes, 0x7FFF) if self.signed else codes
        shift = source.mantissa_bits - self.mantissa_bits
        shifted = tf.bitwise.left_shift(size, _int(shift))
        bits = shifted + ((source.bias - self.bias) << source.mantissa_bits)
        if self.bias != source.bias:
            # As a normal number of the wider format: an integer times the smallest number.
            small = tf.cast(size, dtype) * tf.constant(self.min_subnormal, dtype)
            small_bits = tf.cast(tf.bitcast(small, source.integer), tf.int64)
            bits = tf.where(size < (1 << self.mantissa_bits), small_bits, bits)
        special = shifted + (source.infinity - (self.infinity_code << shift))
        bits = tf.where(size >= self.infinity_code, special, bits)
        if self.signed:
            bits = tf.where(codes >= (1 << 15), bits + source.sign, bits)
        return tf.bitcast(tf.cast(bits, source.integer), dtype)

    def __str__(self) -> str:
        sign = "sign, " if self.signed else "no sign, "
        tiny = "up to the smallest" if self.keep_positive else "to the nearest"
        return (
            f"{self.name}: {sign}{self.exponent_bits} exponent bits (bias {self.bias}), "
            f"{self.mantissa_bits} mantissa bits; largest {self.max:.6g}, smallest normal "
            f"{self.min_normal:.3g}, smallest {self.min_subnormal:.3g} (below: {tiny}); infinity "
            f"0x{self.infinity_code:04X}, NaN 0x{self.nan_code:04X}"
        )


BF16 = Format(name="bf16", signed=True, exponent_bits=8, mantissa_bits=7, bias=127)
FIRST_MOMENT = Format(name="1-6-9", signed=True, exponent_bits=6, mantissa_bits=9, bias=39)
SECOND_MOMENT = Format(
    name="0-6-10",
    signed=False,
    exponent_bits=6,
    mantissa_bits=10,
    bias=47,
    keep_positive=True,
)
FORMATS: dict[str, Format | None] = {
    "fp32": None,
    "bf16": BF16,
    "1-6-9": FIRST_MOMENT,
    "0-6-10": SECOND_MOMENT,
}
"""Format by name. `"fp32"` is None: nothing is encoded, the values stay as they are."""


@dataclass(frozen=True)
class _Source:
    """The IEEE format of the values that are encoded. Bits are handled as int64 throughout.

    (TensorFlow runs int32 arithmetic of a GPU on the host.)
    """

    integer: tf.DType
    mantissa_bits: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa_bits

    @property
    def sign(self) -> int:
        """What sets the sign bit when added to the bits of a positive number."""
        return self.integer.min


_SOURCES = {"float32": _Source(tf.int32, 23, 127), "float64": _Source(tf.int64, 52, 1023)}


def _source(dtype: tf.DType) -> _Source:
    if dtype.name not in _SOURCES:
        raise ValueError(
            "16-bit codes are made from, and read as, float32 or float64. Cast first. "
            f"Received: dtype={dtype.name!r}"
        )
    return _SOURCES[dtype.name]


def _int(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _split(x: tf.Tensor, source: _Source) -> tuple[tf.Tensor, tf.Tensor]:
    """Whether the sign bit is set, and the other bits. Never by arithmetic on the floats.

    TensorFlow's CPU kernels take subnormal numbers for zero.
    """
    bits = tf.cast(tf.bitcast(x, source.integer), tf.int64)
    return bits < 0, tf.bitwise.bitwise_and(bits, source.integer.max)


def _check_rounding(rounding: str, seed: Any) -> str:
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding is 'nearest' (ties to even) or 'stochastic'. Received: rounding={rounding!r}"
        )
    if rounding == "stochastic" and seed is None:
        raise ValueError(
            "Stochastic rounding takes a seed, another one each time: an int, or an integer tensor "
            "of shape (2,). Received: seed=None"
        )
    return rounding


def _round(number: tf.Tensor, shift: tf.Tensor, rounding: str, seed: Any) -> tf.Tensor:
    """The integer nearest to, or drawn around, number / 2^shift; a carry raises the exponent."""
    one = tf.ones_like(shift)
    if rounding == "stochastic":
        below = tf.bitwise.left_shift(one, shift) - 1
        add = tf.bitwise.bitwise_and(_random_bits(tf.shape(number), seed), below)
    else:
        odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(number, shift), 1)
        add = tf.bitwise.left_shift(one, shift - 1) - 1 + odd
    return tf.bitwise.right_shift(number + add, shift)


def _random_bits(shape: tf.Tensor, seed: Any) -> tf.Tensor:
    pair = tf.convert_to_tensor(seed)
    if pair.shape.rank == 0:
        pair = tf.stack([pair, tf.zeros_like(pair)])
    # A named generator: "auto_select" would give other codes on other kinds of device.
    draw = functools.partial(tf.random.stateless_uniform, dtype=tf.int64, alg="philox")
    return draw(shape, seed=pair, minval=None, maxval=None)
