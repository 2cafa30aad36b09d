"""Parts of a new variable are those of the whole that Keras draws, to the bit."""

from __future__ import annotations

import itertools
import random

from kdist.storage import recipes

import keras
import numpy as np
import pytest

INITIALIZERS = {
    "zeros": keras.initializers.Zeros,
    "ones": keras.initializers.Ones,
    "constant": lambda: keras.initializers.Constant(0.3),
    "uniform": keras.initializers.RandomUniform,
    "normal": lambda: keras.initializers.RandomNormal(0.5, 2.0),
    "truncated": keras.initializers.TruncatedNormal,
    "glorot_uniform": keras.initializers.GlorotUniform,
    "glorot_normal": keras.initializers.GlorotNormal,
    "he_normal": keras.initializers.HeNormal,
    "lecun_uniform": keras.initializers.LecunUniform,
    "untruncated": lambda: keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
    "orthogonal": keras.initializers.Orthogonal,
    "identity": lambda: keras.initializers.Identity(0.3),
}
DTYPES = ("float32", "float64", "float16", "bfloat16")


def whole(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    keras.utils.set_random_seed(3)
    return keras.ops.convert_to_numpy(INITIALIZERS[name]()(shape, dtype=dtype))


def recipe(name: str, shape: tuple[int, ...], dtype: str) -> recipes.Recipe:
    keras.utils.set_random_seed(3)
    found = recipes.recipe_of(INITIALIZERS[name](), shape, dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_any_range_is_that_of_the_whole(name: str, dtype: str) -> None:
    if name == "orthogonal" and "16" in dtype:
        pytest.skip("Keras cannot make it in 16 bits")
    shape = (37, 41)
    expected = whole(name, shape, dtype).reshape(-1)
    found = recipe(name, shape, dtype)
    chance = random.Random(0)
    for _ in range(20):
        start = chance.randrange(expected.size)
        count = chance.randrange(1, expected.size - start + 1)
        part = found.block(shape, dtype, start, count).numpy()
        np.testing.assert_array_equal(part, expected[start : start + count])


@pytest.mark.parametrize("shape", [(3, 3), (7, 2), (2, 7), (1, 5), (5, 1), (0, 2)])
def test_an_identity_is_made_in_parts(shape: tuple[int, ...]) -> None:
    expected = whole("identity", shape, "float32").reshape(-1)
    found = recipe("identity", shape, "float32")
    assert not found.whole
    for start, stop in itertools.combinations_with_replacement(range(expected.size + 1), 2):
        part = found.block(shape, "float32", start, stop - start)
        np.testing.assert_array_equal(part, expected[start:stop])


@pytest.mark.parametrize("name", ["glorot_uniform", "truncated", "normal"])
def test_far_into_a_large_draw(name: str) -> None:
    """Beyond what one thread of TensorFlow draws alone."""
    shape = (1031, 1033)
    expected = whole(name, shape, "float32").reshape(-1)
    found = recipe(name, shape, "float32")
    for start in (1, 262_143, 700_001, expected.size - 5):
        part = found.block(shape, "float32", start, 5).numpy()
        np.testing.assert_array_equal(part, expected[start : start + 5])


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 1, 50), (2, 3, 4, 5), (0, 4), (1, 60)])
@pytest.mark.parametrize("limit", [1, 16, 40, 1 << 20])
def test_blocks_tile_a_variable(shape: tuple[int, ...], limit: int, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "CHUNK", limit)
    made = recipe("normal", shape, "float32") if shape else recipe("ones", shape, "float32")
    expected = whole("normal" if shape else "ones", shape, "float32")
    found = np.full(shape, np.nan, "float32")
    for box in recipes.blocks(made, shape, "float32"):
        values = recipes.values(made, shape, "float32", box).numpy()
        assert values.nbytes <= max(limit, 4)
        assert np.isnan(found[box]).all()
        found[box] = values
    np.testing.assert_array_equal(found, expected)


def test_what_must_be_made_at_once() -> None:
    class Own(keras.initializers.RandomNormal):
        def __call__(self, shape, dtype=None):
            return super().__call__(shape, dtype) + 1

    for initializer in (Own(), lambda shape, dtype: keras.ops.ones(shape, dtype)):
        assert recipes.recipe_of(initializer, (2, 2), "float32") is None
    assert recipes.recipe_of(keras.initializers.Identity(), (2, 2, 2), "float32") is None
    generator = keras.random.SeedGenerator(1)
    assert (
        recipes.recipe_of(keras.initializers.Orthogonal(seed=generator), (2, 2), "float32") is None
    )
    before = generator.state.numpy()
    assert recipes.recipe_of(keras.initializers.RandomNormal(seed=generator), (2, 2), "float32")
    assert (generator.state.numpy() != before).any()
