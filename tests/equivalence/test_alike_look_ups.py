"""Tables that the batch looks up, and the model too, by ids that are the same in each batch.

One device has one gradient for such a look-up, whatever the batch is; so replicas' and
micro-batches' are summed, and those of other look-ups, and of other stages, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import kdist

import keras
import pytest

from .case import CLASSES, FEED_FORWARD, Case
from .features import BY_NAME as FEATURES
from .harness import compare
from .host_tables import ROWS, _data, on_host
from .matrix import MESHES, level_config, spread
from .optimizer_zoo import OPTIMIZERS
from .test_own_look_ups import INTERLEAVED, OVER, on
from .test_split_tables import split


class Looking(keras.layers.Layer):
    """Looks rows of a table up, whatever it is given."""

    def __init__(self, table: keras.layers.Embedding, name: str) -> None:
        super().__init__(name=name)
        self.table = table


class Added(Looking):
    """Adds rows of places, some of which are the same, to what it is given."""

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(x.shape[1]) % 4)


class Spread(Looking):
    """Adds them too, and looks them up for each example anew."""

    def call(self, x: Any) -> Any:
        places = keras.ops.arange(x.shape[1]) % 4
        return x + self.table(keras.ops.broadcast_to(places, keras.ops.shape(x)[:2]))


def _mixed() -> keras.Model:
    """Two stages, each of which looks up by both; one row more than once."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, name="vocabulary")
    x = Added(table, "first")(table(tokens))
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = Added(table, "second")(x)
    x = keras.layers.Concatenate(1, name="both")([x, table(tags)])
    x = keras.layers.Flatten()(x)
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name="mixed")


def _by_places(layer: type[Looking], stages: bool, name: str) -> keras.Model:
    """A model that looks places up, and nothing by the batch.

    Args:
        layer: What adds their rows, `Added` or `Spread`.
        stages: Whether each of two stages does.
        name: Of the model.
    """
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, name="vocabulary")
    x = layer(table, "first")(_numbers(tokens, tags))
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.Flatten()(layer(table, "second")(x) if stages else x)
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name=name)


def _numbers(tokens: Any, tags: Any) -> Any:
    """Ids as what a layer computes with, which looks nothing up."""
    both = keras.layers.Concatenate(name="given")([tokens, tags])
    x = keras.ops.expand_dims(keras.ops.cast(both, "float64") / ROWS, -1)
    return keras.layers.Dense(8, name="wide")(x)


class Leading(keras.layers.Layer):
    """Puts a row of a table, the same for each example, before what it is given."""

    def __init__(self, table: keras.layers.Embedding, flat: bool, name: str) -> None:
        super().__init__(name=name)
        self.table, self.flat = table, flat

    def call(self, x: Any) -> Any:
        rows = keras.ops.shape(x)[0]
        first = keras.ops.full((rows,) if self.flat else (rows, 1), 3, dtype="int32")
        found = self.table(first)
        return keras.ops.concatenate([found[:, None] if self.flat else found, x], 1)


def _leading(alone: bool) -> keras.Model:
    """A token before each sequence, as of a classifier: constants, and as many as rows.

    Args:
        alone: Nothing else is looked up.
    """
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    tags = keras.Input((2,), dtype="int32", name="tags")
    table = keras.layers.Embedding(ROWS, 8, name="vocabulary")
    if alone:
        x = _numbers(tokens, tags)
    else:
        x = keras.layers.Concatenate(1, name="both")([table(tokens), table(tags)])
    x = Leading(table, alone, "first")(x)
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Flatten()(keras.layers.Dense(8, name="down")(x))
    return keras.Model([tokens, tags], keras.layers.Dense(CLASSES, name="head")(x), name="leading")


CASES = (
    {
        name: Case(name=name, build=partial(_leading, alone), data=_data, layout_map=FEED_FORWARD)
        for name, alone in (("leading", False), ("alone", True))
    }
    | {
        "mixed": Case(name="mixed", build=_mixed, data=_data, layout_map=FEED_FORWARD),
    }
    | {
        name: Case(
            name=name,
            build=partial(_by_places, layer, stages, name),
            data=_data,
            layout_map=FEED_FORWARD,
        )
        for name, layer, stages in (("alike", Added, True), ("broadcast", Spread, False))
    }
)


STAGES = {"first": (0, 0), "up": (0, 1), "down": (1, 2), "second": (1, 2), "head": (1, 3)}
STAGES |= {"vocabulary": (0, 0)}  # last: it is inside of others
"""Of layers: the stage of two; of two that have two chunks each, the virtual one."""


def declared(place: str, mesh: str, chunks: int = 1) -> Callable[[keras.Model], None]:
    """Declares where the table is, and stages if there are some."""

    def declare(model: keras.Model) -> None:
        if place == "host":
            on_host(model)
        elif place != "device":
            split(mesh, place)(model)
        if "pipe" in mesh:
            for name, (stage, virtual) in STAGES.items():
                if name in {layer.name for layer in model.layers}:
                    kdist.set_stage(model.get_layer(name), virtual if chunks > 1 else stage)

    return declare


@pytest.mark.parametrize(
    ("case", "place", "optimizer", "level", "mesh"),
    spread(
        [
            (case, place, optimizer, level, mesh)
            for case in CASES
            for place in ("device", "host", "data")
            for optimizer in ("adagrad", "adam")
            for level in ("level0", "level3")
            for mesh in (*OVER, "data3")
            if place == "device" or "data" in mesh and mesh in OVER
        ],
        [
            ("mixed", "device", "adagrad", "level0", "data2"),
            ("mixed", "host", "adam", "level3", "data2_model2"),
            ("mixed", "data", "adagrad", "level0", "pipe2_data2"),
            ("mixed", "device", "adagrad", "level3", "pipe2_data2"),
            ("alike", "device", "adam", "level0", "pipe2_data2"),
            ("alike", "host", "adagrad", "level0", "pipe2_data2"),
            ("leading", "device", "adam", "level0", "data2"),
            ("leading", "device", "adagrad", "level3", "data2_model2"),
            ("leading", "host", "adagrad", "level0", "data2"),
            ("alone", "device", "adagrad", "level0", "data2"),
            ("alone", "device", "adam", "level3", "pipe2_data2"),
            ("alone", "device", "adagrad", "level0", "data3"),
        ],
        quick=12,
    ),
)
def test_they_equal_one_device(
    case: str, place: str, optimizer: str, level: str, mesh: str
) -> None:
    compare(
        CASES[case],
        {**MESHES, **OVER, "data3": {"data": 3}}[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=on(mesh, level) if mesh in OVER else level_config(level),
        declare=declared(place, mesh),
    )


@pytest.mark.long
@pytest.mark.parametrize("place", ["device", "host", "data"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved"])
def test_in_other_schedules(schedule: str, case: str, place: str) -> None:
    other = kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")
    compare(
        CASES[case],
        OVER["pipe2_data2"],
        optimizer=OPTIMIZERS["adagrad"],
        config={"pipeline": other if schedule == "zero_bubble" else INTERLEAVED},
        declare=declared(place, "pipe2_data2", 1 if schedule == "zero_bubble" else 2),
    )


@pytest.mark.long
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("feature", ["gradient_accumulation", "steps_per_execution"])
def test_with(feature: str, place: str) -> None:
    compare(
        CASES["mixed"],
        OVER["data2"],
        optimizer=OPTIMIZERS["adagrad"],
        features=[FEATURES[feature]],
        declare=declared(place, "data2"),
    )


@pytest.mark.filterwarnings("error:Constant ids")
@pytest.mark.parametrize(
    ("case", "place", "optimizer", "mesh"),
    spread(
        [
            (case, place, optimizer, mesh)
            for case in CASES
            for place in ("device", "host", "data")
            for optimizer in ("adagrad", "adam")
            for mesh in ("data2", "data2_model2", "pipe2_data2", "pipe2_data2_model2")
        ],
        [
            ("leading", "device", "adam", "data2"),
            ("alone", "device", "adagrad", "pipe2_data2"),
            ("broadcast", "device", "adam", "data2_model2"),
            ("broadcast", "host", "adagrad", "data2"),
            ("alike", "device", "adam", "data2"),
        ],
        quick=5,
    ),
)
def test_one_row_of_a_replica_or_micro_batch(
    case: str, place: str, optimizer: str, mesh: str
) -> None:
    """There ids for each row look like those that are looked up once."""
    compare(
        CASES[case],
        OVER[mesh],
        optimizer=OPTIMIZERS[optimizer],
        batch_size=4 if "pipe" in mesh else 2,
        samples=8,
        config=on(mesh, "level0"),
        declare=declared(place, mesh),
    )


@pytest.mark.parametrize(
    ("case", "optimizer", "level", "mesh"),
    spread(
        [
            (case, optimizer, level, mesh)
            for case in ("alike", "broadcast", "alone")
            for optimizer in ("adagrad", "adam")
            for level in ("level0", "level3")
            for mesh in ("data2", "data2_model2", "pipe2_data2")
        ],
        [("alike", "adam", "level0", "data2"), ("alone", "adagrad", "level3", "data2")],
        quick=4,
    ),
)
def test_op_by_op(case: str, optimizer: str, level: str, mesh: str) -> None:
    """Eager tensors do not tell where they come from: a trace does."""
    compare(
        CASES[case],
        OVER[mesh],
        optimizer=OPTIMIZERS[optimizer],
        config=on(mesh, level),
        declare=declared("device", mesh),
        compile={"run_eagerly": True},
    )


class ByValue(Looking):
    """Looks places up in a way that no graph can have."""

    def call(self, x: Any) -> Any:
        if keras.ops.is_tensor(x) and hasattr(x, "graph") and TRACED:
            raise TypeError("no numbers in a graph")
        return x + self.table(keras.ops.arange(x.shape[1]))


TRACED: list[bool] = []


@pytest.mark.parametrize(
    ("traced", "reason"),
    [(False, "the model cannot be traced"), (True, "the batch looks up in the same tables")],
)
def test_what_cannot_be_told_op_by_op_is_said(
    traced: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CASES["mixed"].build() if traced else _by_places(ByValue, False, "places")
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adagrad", "sparse_categorical_crossentropy", run_eagerly=True)
    x, y, _ = _data(0, 8)
    model.evaluate(x, y, verbose=0)  # builds what Keras traces itself
    if not traced:
        monkeypatch.setattr(f"{__name__}.TRACED", [True])
    with pytest.warns(UserWarning, match=f"run_eagerly: it is not known.*{reason}"):
        model.train_on_batch(x, y)
