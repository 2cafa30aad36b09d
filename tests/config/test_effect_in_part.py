"""What a setting does not save, though it saves something, is in the plan and warned of once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist import CompressionConfig, OptimizerConfig

import keras
import pytest

from .test_without_effect import dense, made, noted, warned


def frozen() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(64, name="base"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="head"),
        ],
        name="net",
    )
    model.get_layer("base").trainable = False
    return model


def lora() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(64, name="base"), keras.layers.Dense(4)],
        name="net",
    )
    model.get_layer("base").enable_lora(2)
    return model


def many_small() -> keras.Model:
    layers = [keras.layers.Dense(4, name=f"small_{n}") for n in range(5)]
    return keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.Dense(8, name="large")], name="net"
    )


def small_base() -> keras.Model:
    model = many_small()
    for layer in model.layers[:-1]:
        layer.trainable = False
    return model


def one_large() -> keras.Model:
    layers = [keras.layers.Dense(61, use_bias=False, name="odd"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers], name="net")


def odd_base() -> keras.Model:
    model = one_large()
    model.get_layer("odd").trainable = False
    return model


def normed() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.LayerNormalization(name="norm")], name="net"
    )


def split_table(axis: str) -> keras.Model:
    table = kdist.layers.SplitEmbedding((3, 9), 4, axis=axis, name="table")
    layers = [table, keras.layers.Flatten(), keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input((4,)), *layers], name="net")


def at(level: int, threshold: int = 0) -> OptimizerConfig:
    return OptimizerConfig(level=level, threshold_kb=threshold / 1024)


CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "most bytes frozen below the threshold": (
        small_base,
        {"axes": {"data": 2}, "level": at(3, 100)},
        "level=3 has no effect on 11 of 12 parameters, 432 B of 560 B: they stay whole; the "
        "largest, 'net/small_0/kernel': 64 bytes, below 100. Lower threshold_kb",
    ),
    "one large frozen parameter of odd sizes": (
        odd_base,
        {"axes": {"data": 3}, "level": at(3)},
        "level=3 has no effect on the device that has 'net/odd/kernel': of 1.2 KB it has 976 B, "
        "and no dim of (4, 61) divides by 3 replicas: so one device keeps all of it.",
    ),
    "most bytes below the threshold": (
        many_small,
        {"axes": {"data": 2}, "level": at(1, 100)},
        "level=1 has no effect on 11 of 12 parameters, 432 B of 560 B: they stay whole; the "
        "largest, 'net/small_0/kernel': 64 bytes, below 100. Lower threshold_kb",
    ),
    "one large parameter of odd sizes": (
        one_large,
        {"axes": {"data": 3}, "level": at(3)},
        "level=3 has no effect on the device that has 'net/odd/kernel': of 1.2 KB it has 976 B, "
        "and no dim of (4, 61) divides by 3 replicas: so one device keeps all of it.",
    ),
    "a table that is split by hand over an inner axis": (
        lambda: split_table("model"),
        {"axes": {"data": 2, "model": 2}, "level": at(1)},
        "level=1 has no effect on 1 of 3 parameters, 192 B of 260 B: they stay whole; the largest, "
        "'net/table/embeddings': it is split over 'model' by hand. Split it over the data axis",
    ),
    "compression of vectors": (
        normed,
        {"axes": {"data": 2}, "compression": CompressionConfig()},
        "compression has no effect: all 2 gradients travel as they are; the largest, 'net/norm/"
        "gamma': a vector. Name weights in CompressionConfig(patterns=...)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_noted_and_warned_of_once(name: str) -> None:
    build, options, expected = CASES[name]
    model = made(build=build, **options)
    notes = noted(model)
    assert [one for one in notes if expected in one], notes
    assert len(notes) == 1
    assert warned(model) == notes
    assert warned(model) == []


def transposed() -> keras.Model:
    """Its layers are cut along the rows, then along the columns."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, use_bias=False, name="rows"),
            keras.layers.Dense(4, use_bias=False, name="columns"),
        ],
        name="net",
    )
    kdist.shard(model.layers[0], in_strategy=((2, 1), (1, 1)))
    kdist.shard(model.layers[1], in_strategy=((1, 1), (1, 2)))
    return model


def moving() -> keras.Model:
    """Between its layers a tensor goes from a cut of its columns to one of its rows."""
    first = keras.layers.Dense(4, use_bias=False, name="columns")
    kdist.shard(first, in_strategy=((1, 1), (1, 2)), out_strategy=((1, 2),))
    second = keras.layers.Dense(4, use_bias=False, name="rows")
    kdist.shard(second, in_strategy=((2, 1), (1, 1)))
    return keras.Sequential([keras.Input((4,)), first, second], name="net")


MOVES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], int]] = {
    "cut by columns and rows": (dense, {}, 1),
    "gathers alone": (transposed, {}, 1),
    "a move": (moving, {}, 0),
    "a table in parts": (lambda: split_table("model"), {}, 0),
}


@pytest.mark.parametrize("name", MOVES)
def test_all_to_alls_that_are_allowed_and_move_nothing_are_told(name: str) -> None:
    build, options, count = MOVES[name]
    model = made({"model": 2}, build=build, enable_alltoall=True, **options)
    assert noted(model) == []  # no program is lowered yet
    told = warned(model)
    kinds = {one.kind for one in kdist.inspect(model).collectives}
    assert len(told) == count == len(noted(model)) and ("all-to-all" in kinds) == (name == "a move")
    if count:
        assert told[0].startswith("enable_alltoall=True has no effect: no tensor goes from")


QUIET: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "frozen weights at level 2": (frozen, {"axes": {"data": 2}, "level": at(2)}),
    "frozen weights at level 3": (frozen, {"axes": {"data": 2}, "level": at(3)}),
    "LoRA at level 3": (lora, {"axes": {"data": 2}, "level": at(3, 1024)}),
    "statistics at level 3": (
        normed,
        {"axes": {"data": 2}, "level": at(3)},
    ),
    "frozen weights that a layout cuts": (
        frozen,
        {
            "axes": {"data": 2},
            "level": at(3),
            "layout_map": {"net/base/kernel": (None, "data"), "net/base/bias": ("data",)},
        },
    ),
    "small parameters that were opted out": (
        many_small,
        {
            "axes": {"data": 2},
            "level": at(1),
            "setting": lambda m: [kdist.set_parallel_optimizer(one, False) for one in m.layers[:5]],
        },
    ),
    "a table that is split by hand over the data axis": (
        lambda: split_table("data"),
        {"axes": {"data": 2}, "level": at(1)},
    ),
    "dims that divide": (one_large, {"axes": {"data": 1, "model": 2}}),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_saves_is_not_noted(name: str) -> None:
    build, options = QUIET[name]
    assert noted(made(build=build, **options)) == []


@pytest.mark.parametrize("name", ["frozen weights at level 3", "frozen weights that a layout cuts"])
def test_frozen_weights_are_kept_in_parts(name: str) -> None:
    build, options = QUIET[name]
    model = made(build=build, **options)
    assert warned(model) == []
    kept = kdist.inspect(model).memory
    # Half of the frozen layer, of the norm and of the head; all of the norm's statistics.
    floats = (4 * 64 + 64) / 2 + 2 * 64 / 2 + 2 * 64 + (64 * 4 + 4) / 2
    assert [one.parameters for one in kept] == [4 * floats] * 2
