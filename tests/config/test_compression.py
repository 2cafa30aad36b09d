"""Compression: the declaration by pattern, and PowerSGD on simulated replicas."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from kdist.config.compression import Classes, CompressionConfig, PowerSGD, matrix_shape, wire_bytes
from kdist.optimizer import compressors

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, COLUMNS = 24, 16
REPLICAS = 4


def variable(path: str, *shape: int, dtype: str = "float32") -> SimpleNamespace:
    return SimpleNamespace(path=path, shape=shape, dtype=dtype)


MODEL = [
    variable("token_embedding/embeddings", 1000, 64),
    variable("block_0/attention/query/kernel", 64, 8, 8),
    variable("block_0/attention/query/bias", 8, 8),
    variable("block_0/layer_norm/gamma", 64),
    variable("block_0/up/kernel", 64, 256),
    variable("block_0/up/bias", 1, 256),
    variable("conv/kernel", 3, 3, 64, 128),
    variable("head/kernel", 64, 12),
]


def kinds(config: CompressionConfig) -> dict[str, str]:
    return {e.path: str(e.compressor) for e in config.classes(MODEL).entries}


def test_what_overwrites_its_variable_travels_as_it_is() -> None:
    history = variable("up/inputs_amax_history", 1024)
    history.overwrite_with_gradient = True
    classes = CompressionConfig(patterns={".*": "bf16"}).classes([*MODEL, history])
    assert classes.entries[-1].compressor == "none"
    assert "overwritten" in classes.entries[-1].why
    assert {str(e.compressor) for e in classes.entries[:-1]} == {"bf16"}


# --- the declaration


def test_default_classes():
    assert kinds(CompressionConfig()) == {
        "token_embedding/embeddings": "none",
        "block_0/attention/query/kernel": "PowerSGD(rank=4)",
        "block_0/attention/query/bias": "bf16",  # a matrix, but rank 4 of 8 x 8 sends as much
        "block_0/layer_norm/gamma": "none",
        "block_0/up/kernel": "PowerSGD(rank=4)",
        "block_0/up/bias": "none",
        "conv/kernel": "PowerSGD(rank=4)",
        "head/kernel": "PowerSGD(rank=4)",
    }


def test_patterns_win_over_the_default():
    config = CompressionConfig(
        patterns={".*embeddings": "fp16", ".*up/.*": PowerSGD(rank=2), "head/kernel": "none"},
        rest="bf16",
    )
    got = kinds(config)
    assert got["token_embedding/embeddings"] == "fp16"
    assert got["block_0/up/kernel"] == "PowerSGD(rank=2)"
    assert got["block_0/up/bias"] == "none"  # nothing to save, noted
    assert "no fewer bytes" in config.classes(MODEL)["block_0/up/bias"].why
    assert got["head/kernel"] == "none"
    assert got["conv/kernel"] == "bf16"


def test_classes_are_printed_with_bytes():
    classes = CompressionConfig().classes(MODEL)
    text = str(classes)
    assert len(text.splitlines()) == len(MODEL) + 2
    assert "rest" in text and "a vector" in text and "path contains 'embed'" in text
    assert "too small for rank 4" in text
    assert str(classes.nbytes) in text and str(classes.full_bytes) in text
    assert classes.full_bytes == sum(4 * int(np.prod(v.shape)) for v in MODEL)
    assert classes.nbytes == sum(e.nbytes for e in classes.entries) < classes.full_bytes
    assert classes["conv/kernel"].nbytes == 4 * 4 * (576 + 128)
    config = str(CompressionConfig(patterns={"a": PowerSGD(rank=2, warm_start=False)}))
    assert "PowerSGD(rank=2, warm_start=False)" in config and "embeddings: none" in config
    assert str(Classes(())).startswith("variable")


@pytest.mark.parametrize(
    ("patterns", "match"),
    [
        ({".*down/kernel": "bf16"}, r"paths are \['conv/kernel', .*down/kernel"),
        ({".*kernel": "bf16", ".*up.*": "fp16"}, "Several patterns match"),
        ({"head/kernel": PowerSGD(rank=11)}, r"shapes \[\(64, 12\)\].*rank=11"),
        ({".*gamma": PowerSGD(rank=1)}, "smaller rank"),
    ],
)
def test_patterns_against_variables(patterns: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        CompressionConfig(patterns=patterns).classes(MODEL)


def test_casts_of_half_precision_gradients_are_refused():
    half = [variable("up/kernel", 64, 64, dtype="bfloat16")]
    with pytest.raises(ValueError, match="fewer bytes"):
        CompressionConfig(patterns={"up/kernel": "bf16"}).classes(half)
    assert CompressionConfig(rest="fp16").classes(half)["up/kernel"].compressor == "none"


@pytest.mark.parametrize(
    "options",
    [
        {"rest": "int8"},
        {"middle": PowerSGD()},
        {"patterns": [("a", "none")]},
        {"patterns": {"a": 4}},
        {"patterns": {"(": "none"}},
    ],
)
def test_config_refuses(options: dict[str, Any]):
    with pytest.raises(ValueError, match="Received: "):
        CompressionConfig(**options)


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"rank": 2.0}, {"rank": True}, {"warm_start": 1}, {"seed": "a"}]
)
def test_powersgd_refuses(options: dict[str, Any]):
    with pytest.raises(ValueError, match=f"Received: {next(iter(options))}="):
        PowerSGD(**options)


def test_config_does_not_change_with_the_users_dict():
    patterns: dict[str, Any] = {"head/kernel": "bf16"}
    config = CompressionConfig(patterns=patterns)
    patterns.clear()
    assert dict(config.patterns) == {"head/kernel": "bf16"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rest = "none"  # type: ignore[misc]


# --- shapes and bytes


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 3, 64, 128), (576, 128)),
        ((512, 8, 64), (512, 512)),
        ((8, 64, 512), (512, 512)),
        ((7, 5), (7, 5)),
        ((9,), (9, 1)),
        ((), (1, 1)),
        ((2, 2, 2, 2), (4, 4)),
    ],
)
def test_matrix_shape(shape: tuple[int, ...], expected: tuple[int, int]):
    assert matrix_shape(shape) == expected


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_matrix_is_the_cut_with_fewest_factor_bytes(shape: list[int]):
    rows, columns = matrix_shape(shape)
    assert rows * columns == np.prod(shape)
    for cut in range(1, len(shape)):
        assert rows + columns <= np.prod(shape[:cut]) + np.prod(shape[cut:])
    gradient = np.random.default_rng(0).normal(size=shape)
    matrix = compressors.as_matrix(gradient)
    assert tuple(matrix.shape) == (rows, columns)
    np.testing.assert_array_equal(compressors.as_tensor(matrix, shape), gradient)


def test_wire_bytes_are_those_of_the_tensors_that_travel():
    gradient = tf.random.stateless_normal((3, 3, 8, 16), [1, 2])
    matrix = compressors.as_matrix(gradient)
    compressor = PowerSGD(rank=3)
    q = compressors.initial_q("w", gradient.shape, compressor, tf.float32)
    p = compressors.orthogonalize(compressors.left(matrix, q))
    sent = p.numpy().nbytes + compressors.right(matrix, p).numpy().nbytes
    assert wire_bytes(gradient.shape, 4, compressor) == sent == 3 * (72 + 16) * 4
    assert wire_bytes(gradient.shape, 4, "none") == gradient.numpy().nbytes
    half = compressors.to_fp16(gradient, tf.constant(1.0))
    assert wire_bytes(gradient.shape, 4, "fp16") == half.numpy().nbytes
    assert wire_bytes(gradient.shape, 8, "bf16") == compressors.to_bf16(gradient).numpy().nbytes
    assert wire_bytes((8, 8), 2, PowerSGD(rank=1)) == 16 * 4
    assert compressors.as_matrix(tf.cast(gradient, tf.bfloat16)).dtype == tf.float32


# --- PowerSGD


def exchange(matrices: list[Any], q: Any) -> tuple[Any, Any, list[Any]]:
    """One round of PowerSGD over simulated replicas: the sum, the next Q, the errors."""
    p = compressors.orthogonalize(tf.add_n([compressors.left(m, q) for m in matrices]))
    qs = [compressors.right(m, p) for m in matrices]
    errors = [compressors.residual(m, p, own) for m, own in zip(matrices, qs)]
    total = tf.add_n(qs)
    return compressors.decompress(p, total), total, errors


def replicas_of(rank: int, seed: int = 0) -> list[np.ndarray]:
    """Full-rank gradients whose sum has a rank."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(ROWS, COLUMNS)) for _ in range(REPLICAS - 1)]
    whole = rng.normal(size=(ROWS, rank)) @ rng.normal(size=(rank, COLUMNS))
    return [*parts, whole - sum(parts)]


def start(rank: int) -> Any:
    return compressors.initial_q("w", (ROWS, COLUMNS), PowerSGD(rank=rank), tf.float64)


@settings(max_examples=20, deadline=None)
@given(true=st.integers(0, 5), more=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_sum_of_low_rank_is_exact(true: int, more: int, seed: int):
    matrices = replicas_of(true, seed)
    got, _, _ = exchange(matrices, start(max(true + more, 1)))
    np.testing.assert_allclose(got, sum(matrices), rtol=0, atol=1e-9)


def test_too_small_a_rank_is_not_exact():
    matrices = replicas_of(5)
    got, _, _ = exchange(matrices, start(4))
    assert np.abs(got - sum(matrices)).max() > 0.1


@pytest.mark.parametrize("rank", [1, 3])
def test_error_feedback_loses_nothing_over_steps(rank: int):
    """Sum of what was applied = sum of all gradients less the last errors, in every step."""
    q, errors = start(rank), [np.zeros((ROWS, COLUMNS))] * REPLICAS
    applied, given_ = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    for step in range(12):
        gradients = [
            np.random.default_rng(100 * step + i).normal(size=(ROWS, COLUMNS))
            for i in range(REPLICAS)
        ]
        got, q, errors = exchange([g + e for g, e in zip(gradients, errors)], q)
        applied = applied + got.numpy()
        given_ = given_ + sum(gradients)
        lost = sum(e.numpy() for e in errors)
        np.testing.assert_allclose(applied, given_ - lost, rtol=0, atol=1e-9)
        assert np.abs(lost).max() > 0.1


def test_warm_start_follows_the_largest_singular_vectors():
    """Repeated on one matrix it is power iteration: the best approximation of that rank."""
    matrices = replicas_of(COLUMNS)
    u, s, v = np.linalg.svd(sum(matrices))
    best = (u[:, :2] * s[:2]) @ v[:2]
    q = start(2)
    distance = []
    for _ in range(60):
        got, q, _ = exchange(matrices, q)
        distance.append(np.abs(got - best).max())
    assert distance[-1] < 1e-3 < distance[0]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e25])
def test_orthogonalize_is_orthonormal_for_any_matrix(dtype: tf.DType, size: float):
    rng = np.random.default_rng(0)
    column = rng.normal(size=(ROWS, 1))
    cases = [
        np.zeros((ROWS, 3)),
        np.concatenate([column, column, -2 * column], 1),
        np.concatenate([column, 0 * column, 1e-12 * rng.normal(size=(ROWS, 1))], 1),
        rng.normal(size=(ROWS, 3)),
        np.ones((3, 3)),
    ]
    exact = 1e-5 if dtype == tf.float32 else 1e-12
    for case in cases:
        p = tf.constant(case * size, dtype)
        basis = compressors.orthogonalize(p).numpy()
        np.testing.assert_allclose(basis.T @ basis, np.eye(3), rtol=0, atol=exact)
        again = basis @ (basis.T @ (case / max(np.abs(case).max(), 1)))
        np.testing.assert_allclose(
            again, case / max(np.abs(case).max(), 1), rtol=0, atol=exact * 10
        )


def test_a_gradient_that_is_not_finite_does_not_look_finite():
    """What comes out must fail a finite check, as the gradient itself would."""
    for bad in (np.nan, np.inf):
        matrices = replicas_of(2)
        matrices[1][3, 4] = bad
        got, _, _ = exchange(matrices, start(2))
        assert not np.isfinite(got.numpy()).all()


def test_first_q_is_the_same_everywhere_and_differs_by_variable():
    shape, compressor = (8, 6), PowerSGD(rank=2)
    a = compressors.initial_q("a/kernel", shape, compressor, tf.float32)
    with tf.device("/CPU:3"):
        again = tf.function(
            lambda: compressors.initial_q("a/kernel", shape, compressor, tf.float32)
        )()
    np.testing.assert_array_equal(a, again)
    assert np.all(a != compressors.initial_q("b/kernel", shape, compressor, tf.float32))
    seeded = dataclasses.replace(compressor, seed=1)
    assert np.all(a != compressors.initial_q("a/kernel", shape, seeded, tf.float32))
    with pytest.raises(ValueError, match=r"8 x 6.*rank=7"):
        compressors.initial_q("a/kernel", shape, PowerSGD(rank=7), tf.float32)


# --- casts


@settings(max_examples=60, deadline=None)
@given(
    exponent=st.integers(-110, 115),  # TensorFlow takes float32's subnormals for zero
    replicas=st.integers(1, 64),
    wide=st.booleans(),
    seed=st.integers(0, 9),
)
def test_sums_in_fp16_neither_overflow_nor_vanish(
    exponent: int, replicas: int, wide: bool, seed: int
):
    """Worst case: every replica holds the largest value."""
    dtype = tf.float64 if wide else tf.float32
    top = np.random.default_rng(seed).uniform(1, 2) * 2.0**exponent
    gradient = tf.constant([top, -top, top * 2.0**-12, 0.0], dtype)
    scale = compressors.fp16_scale(compressors.largest_finite(gradient), replicas)
    assert np.frexp(scale.numpy())[0] == 0.5
    total = compressors.to_fp16(gradient, scale)
    for _ in range(replicas - 1):
        total = total + compressors.to_fp16(gradient, scale)
    got = compressors.from_fp16(total, scale, dtype).numpy() / replicas
    bound = 1.001 * replicas * 2.0**-11
    np.testing.assert_allclose(got, gradient.numpy(), rtol=bound, atol=0)


def test_the_fp16_scale_uses_the_room():
    for replicas in (1, 4, 1024):
        scale = compressors.fp16_scale(tf.constant(1.5), replicas).numpy()
        assert 2.0**14 < 2 * replicas * scale <= 2.0**15
    assert compressors.fp16_scale(tf.constant(0.0), 4).numpy() == 2.0**126
    for replicas in (0, 1025):
        with pytest.raises(ValueError, match=f"replicas={replicas}"):
            compressors.fp16_scale(tf.constant(1.0), replicas)


def test_1024_replicas_of_the_largest_value():
    """The sequential sum in float16 that rounds most often."""
    gradient = tf.constant([1.9999], tf.float32)
    scale = compressors.fp16_scale(compressors.largest_finite(gradient), 1024)
    one, total = compressors.to_fp16(gradient, scale).numpy(), np.float16([0])
    for _ in range(1024):
        total = total + one
    assert np.isfinite(total).all()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_what_is_not_finite_stays_so(dtype: tf.DType):
    gradient = tf.constant([np.inf, -np.inf, np.nan, 3.0], dtype)
    largest = compressors.largest_finite(gradient)
    assert largest.numpy() == 3.0
    scale = compressors.fp16_scale(largest, 4)
    got = compressors.from_fp16(compressors.to_fp16(gradient, scale), scale, dtype)
    np.testing.assert_array_equal(got, gradient)
    np.testing.assert_array_equal(tf.cast(compressors.to_bf16(gradient), dtype), gradient)
    assert compressors.largest_finite(gradient[:3]).numpy() == 0


def test_bf16_keeps_range_and_8_bits():
    x = tf.constant(np.random.default_rng(0).normal(size=500) * 1e30, tf.float32)
    np.testing.assert_allclose(tf.cast(compressors.to_bf16(x), tf.float32), x, rtol=2.0**-8)
