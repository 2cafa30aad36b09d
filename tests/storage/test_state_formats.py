"""16-bit formats against exact arithmetic: every code, every tie, and floats at random."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

from kdist.storage.state_formats import BF16, FIRST_MOMENT, FORMATS, SECOND_MOMENT, Format

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

ALL = [BF16, FIRST_MOMENT, SECOND_MOMENT]
NEAREST = [BF16, FIRST_MOMENT, dataclasses.replace(SECOND_MOMENT, keep_positive=False)]
CODES = np.arange(1 << 16, dtype=np.uint16)

formats = pytest.mark.parametrize("form", ALL, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def value_of(form: Format, code: int) -> float:
    """The value that the definition of the format gives a code; exact in float64."""
    negative = form.signed and code >= 1 << 15
    code &= 0x7FFF if form.signed else 0xFFFF
    field, mantissa = divmod(code, 1 << form.mantissa_bits)
    unit = Fraction(1, 1 << form.mantissa_bits)
    if field == (1 << form.exponent_bits) - 1:
        size = math.nan if mantissa else math.inf
    elif field:
        size = float((1 + mantissa * unit) * Fraction(2) ** (field - form.bias))
    else:
        size = float(mantissa * unit * Fraction(2) ** (1 - form.bias))
    return -size if negative else size


@functools.cache
def values_of(form: Format) -> np.ndarray:
    return np.array([value_of(form, int(code)) for code in CODES])


def reference(form: Format, x: float) -> int:
    """The code of a float, by Python's exact round-half-even of a fraction."""
    if math.isnan(x):
        return form.nan_code
    negative = math.copysign(1.0, x) < 0
    if negative and not form.signed:
        return 0
    sign = (1 << 15) if negative else 0
    if math.isinf(x):
        return sign + form.infinity_code
    size = abs(Fraction(x))
    if not size:
        return sign
    exponent = max(math.frexp(abs(x))[1] - 1, 1 - form.bias)
    units = round(size / Fraction(2) ** (exponent - form.mantissa_bits))
    code = ((exponent + form.bias - 1) << form.mantissa_bits) + units
    if form.keep_positive:
        code = max(code, 1)
    return sign + min(code, form.max_code)


def encoded(form: Format, x: np.ndarray, **options: object) -> np.ndarray:
    """Codes, which must be the same eagerly and in a graph."""
    eager = form.encode(tf.constant(x), **options).numpy()
    graph = tf.function(lambda t: form.encode(t, **options))(tf.constant(x)).numpy()
    np.testing.assert_array_equal(eager, graph)
    assert eager.dtype == np.uint16
    return eager


@formats
@dtypes
def test_every_code_reads_as_the_definition_says(form: Format, dtype: type):
    expected = values_of(form).astype(dtype)
    for decode in (form.decode, tf.function(form.decode)):
        read = decode(tf.constant(CODES), tf.as_dtype(dtype)).numpy()
        np.testing.assert_array_equal(read, expected)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(read)[number], np.signbit(expected)[number])


@formats
@dtypes
def test_encode_of_decode_is_the_code(form: Format, dtype: type):
    values = values_of(form)
    codes = encoded(form, form.decode(CODES, dtype).numpy())
    nan = np.isnan(values)
    np.testing.assert_array_equal(codes[~nan], CODES[~nan])
    assert set(codes[nan].tolist()) == {form.nan_code}
    stochastic = encoded(form, form.decode(CODES, dtype).numpy(), rounding="stochastic", seed=3)
    np.testing.assert_array_equal(codes, stochastic)


@formats
def test_larger_code_larger_value(form: Format):
    positive = values_of(form)[: form.infinity_code + 1]
    assert np.all(np.diff(positive) > 0)
    if form.signed:
        negative = values_of(form)[1 << 15 : (1 << 15) + form.infinity_code + 1]
        np.testing.assert_array_equal(negative, -positive)


@pytest.mark.parametrize("form", NEAREST, ids=lambda f: f.name)
@dtypes
def test_every_tie_goes_to_even_and_its_neighbours_to_the_nearest(form: Format, dtype: type):
    finite = values_of(form)[: form.max_code + 1]
    ties = (finite[:-1] + finite[1:]) / 2  # one bit more than the format: exact
    lower = np.arange(form.max_code)
    exact = ties.astype(dtype) == ties
    assert exact[1 << form.mantissa_bits :].all()  # bf16 subnormals' ties need more than float32
    ties, lower = ties[exact].astype(dtype), lower[exact]
    np.testing.assert_array_equal(encoded(form, ties), lower + lower % 2)
    above = np.nextafter(ties, dtype(np.inf))
    below = np.nextafter(ties, dtype(-np.inf))
    np.testing.assert_array_equal(encoded(form, above), lower + 1)
    np.testing.assert_array_equal(encoded(form, below), lower)
    if form.signed:
        np.testing.assert_array_equal(encoded(form, -above), lower + 1 + (1 << 15))
        np.testing.assert_array_equal(encoded(form, -below), lower + (1 << 15))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.floats(width=64)
        | st.floats(width=32)
        | st.builds(math.ldexp, st.floats(-2, 2), st.integers(-70, 30)),
        min_size=40,
        max_size=40,
    ),
)
def test_random_floats_round_as_fractions_do(floats: list[float]):
    for form in ALL:
        wide = np.array(floats)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        for x in (wide, narrow):
            expected = [reference(form, float(v)) for v in x]
            np.testing.assert_array_equal(form.encode(tf.constant(x)).numpy(), expected)


@formats
@dtypes
def test_ends_of_the_range(form: Format, dtype: type):
    huge, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    x = np.array([np.inf, np.nan, -np.nan, huge, form.max, 0.0, tiny], dtype)
    least = 1 if form.keep_positive else 0
    expected = [form.infinity_code, form.nan_code, form.nan_code]
    expected += [form.max_code, form.max_code, 0, least]
    assert encoded(form, x).tolist() == expected
    x = np.array([-np.inf, -huge, -1.0, -tiny, -0.0], dtype)
    sign, one = 1 << 15, form.bias << form.mantissa_bits
    below = [sign + code for code in (form.infinity_code, form.max_code, one, 0, 0)]
    assert encoded(form, x).tolist() == (below if form.signed else [0] * 5)


def test_stated_numbers():
    """What the documentation says about the two formats that kdist defines."""
    assert (FIRST_MOMENT.bias, SECOND_MOMENT.bias) == (39, 47)
    assert FIRST_MOMENT.max == (2 - 2**-9) * 2.0**23
    assert (FIRST_MOMENT.min_normal, FIRST_MOMENT.min_subnormal) == (2.0**-38, 2.0**-47)
    assert SECOND_MOMENT.max == 65504
    assert (SECOND_MOMENT.min_normal, SECOND_MOMENT.min_subnormal) == (2.0**-46, 2.0**-56)
    assert SECOND_MOMENT.min_normal == pytest.approx(1e-7**2, rel=0.5)
    assert SECOND_MOMENT.min_subnormal < 1e-8**2
    assert "bias 47" in str(SECOND_MOMENT) and "0xFC00" in str(SECOND_MOMENT)
    assert "bias 39" in str(FIRST_MOMENT) and "1.67608e+07" in str(FIRST_MOMENT)
    for form in ALL:
        values = values_of(form)
        assert values[form.max_code] == form.max
        assert values[1] == form.min_subnormal
        assert values[1 << form.mantissa_bits] == form.min_normal
        assert FORMATS[form.name] is form
    assert FORMATS["fp32"] is None


@dtypes
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_no_positive_second_moment_becomes_zero(dtype: type, rounding: str):
    tiny = np.array([2.0**-57, 2.0**-58, 1e-30, np.finfo(dtype).smallest_subnormal], dtype)
    assert encoded(SECOND_MOMENT, tiny, rounding=rounding, seed=1).tolist() == [1] * 4
    assert encoded(SECOND_MOMENT, np.zeros(2, dtype), rounding=rounding, seed=1).tolist() == [0, 0]


@formats
@dtypes
def test_stochastic_rounding_is_unbiased(form: Format, dtype: type):
    """The mean of n roundings is the value, within 5 standard errors; seed fixed."""
    n = 40_000
    rng = np.random.default_rng(0)
    ulp = 2.0**-form.mantissa_bits
    probes = [1.0 + 0.3 * ulp, 1.9999, 3.7e-5 * rng.uniform(), form.max * 0.7001]
    if form is not BF16:  # its subnormals are ties of float32's
        probes += [2.3 * form.min_subnormal, 1.7 * form.min_subnormal]
    if form is FIRST_MOMENT:
        probes += [0.01 * form.min_subnormal, -0.4 * form.min_subnormal]
    for i, probe in enumerate(np.array(probes, dtype)):
        codes = encoded(form, np.full(n, probe), rounding="stochastic", seed=i)
        drawn = form.decode(codes, tf.float64).numpy()
        low, high = np.sort(np.unique(drawn))[[0, -1]]
        assert low <= float(probe) <= high and len(np.unique(codes)) <= 2
        odds = (float(probe) - low) / (high - low)
        error = math.sqrt(odds * (1 - odds) / n) * (high - low)
        assert abs(drawn.mean() - float(probe)) < 5 * error


def test_odds_of_values_far_below_the_smallest():
    """With 2^-16 of the smallest number, one of 2^16 draws is not 0: 16 +- 4 of 2^20."""
    x = np.full(1 << 20, FIRST_MOMENT.min_subnormal * 2.0**-16, np.float32)
    ups = int(np.count_nonzero(FIRST_MOMENT.encode(x, "stochastic", 5).numpy()))
    assert 4 <= ups <= 36
    double = x.astype(np.float64) * 2.0**-900
    assert not np.any(FIRST_MOMENT.encode(double, "stochastic", 5).numpy())


def test_seed_decides_the_codes():
    x = np.linspace(0.1, 2.0, 999)
    draw = [FIRST_MOMENT.encode(x, "stochastic", s).numpy() for s in (1, 1, 2, tf.constant([1, 0]))]
    np.testing.assert_array_equal(draw[0], draw[1])
    np.testing.assert_array_equal(draw[0], draw[3])
    assert np.any(draw[0] != draw[2])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types_go_through_float32(dtype: tf.DType):
    x = tf.cast(tf.constant([0.1, 3.0, 1e-5]), dtype)
    expected = FIRST_MOMENT.encode(tf.cast(x, tf.float32))
    np.testing.assert_array_equal(FIRST_MOMENT.encode(x), expected)


def test_refusals():
    with pytest.raises(ValueError, match=r"rounding='up'"):
        BF16.encode([1.0], "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=None"):
        BF16.encode([1.0], "stochastic")
    with pytest.raises(ValueError, match="dtype='int32'"):
        BF16.encode(tf.constant([1]))
    with pytest.raises(ValueError, match="dtype='float16'"):
        BF16.decode(CODES, "float16")
    with pytest.raises(ValueError, match="mantissa_bits=8"):
        Format(name="x", signed=True, exponent_bits=6, mantissa_bits=8, bias=31)
    for bias in (-80, 120):
        with pytest.raises(ValueError, match=f"bias={bias}"):
            Format(name="x", signed=True, exponent_bits=6, mantissa_bits=9, bias=bias)
