"""Predicts clicks with DLRM: networks on all devices, and embedding tables dealt to them.

    python examples/click_through.py
    python examples/click_through.py --mesh model=4 --axis model
    python examples/click_through.py --tables host
    python examples/click_through.py --tables all

The model is DLRM (Naumov et al., 2019): one table per category column, a small network for the
numbers, the products between all pairs of vectors, and a network on top. The networks are small and
data-parallel. The tables hold nearly all bytes, so each device has some of them, or some rows or
columns, and vectors travel to the devices that look them up, by all-to-all.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import kdist

import keras
import numpy as np
from absl import flags
from keras import layers, ops
from rich.console import Console
from rich.table import Table

import click_data
import example_flags

WARM_UP = 5
"""Batches of the first epoch that are not timed: the first ones are traced."""


class PairProducts(layers.Layer):
    """Products between all pairs of vectors: `(batch, vectors, width)` to `(batch, vectors**2)`."""

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the flattened Gram matrix of each example."""
        products = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        return ops.reshape(products, (-1, x.shape[1] * x.shape[1]))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, int]:
        """Returns `(batch, vectors**2)`."""
        _, vectors, _ = input_shape
        if vectors is None:
            raise ValueError(f"The number of vectors must be known. Received: {input_shape}")
        return input_shape[0], vectors * vectors


def build(tables: Sequence[kdist.layers.TableConfig], numbers: int) -> keras.Model:
    """Builds the model.

    Args:
        tables: the embedding table of each category column, all of one width.
        numbers: numeric columns.

    Returns:
        A functional model from `{"categories": int32 (batch, tables), "numbers": float32 (batch,
        numbers)}` to the log-odds of a click, `(batch, 1)`.
    """
    width = tables[0].embedding_dim
    categories = keras.Input((len(tables),), dtype="int32", name="categories")
    dense = keras.Input((numbers,), name="numbers")
    features = [
        kdist.layers.FeatureConfig(f"column_{i}", table, (None,), (None, width))
        for i, table in enumerate(tables)
    ]
    look_up = kdist.layers.DistributedEmbedding(features, name="tables")
    bottom = layers.Dense(width, activation="relu", name="bottom")(dense)
    vectors = [bottom, *look_up([categories[:, i] for i in range(len(tables))])]
    stacked = layers.Concatenate(name="vectors")(vectors)
    stacked = layers.Reshape((len(vectors), width), name="stacked")(stacked)
    products = PairProducts(name="products")(stacked)
    x = layers.Concatenate(name="features")([products, bottom])
    x = layers.Dense(64, activation="relu", name="top_1")(x)
    x = layers.Dense(32, activation="relu", name="top_2")(x)
    log_odds = layers.Dense(1, name="log_odds")(x)
    return keras.Model({"categories": categories, "numbers": dense}, log_odds, name="clicks")


def uneven(rows: int, parts: int) -> tuple[int, ...]:
    """Splits rows so that each device has more than the one before.

    >>> uneven(64, 3)
    (10, 21, 33)
    """
    shares = sum(range(1, parts + 1))
    sizes = [max(1, rows * part // shares) for part in range(1, parts)]
    return (*sizes, rows - sum(sizes))


@dataclasses.dataclass(frozen=True)
class Variant:
    """Where tables are.

    Attributes:
        tables: "plain" (one device trains, without kdist), "dealt", "split", "host" or "cut".
        mesh: axes and their sizes.
        axis: what tables are dealt, split or cut over.
        alltoall: whether rows travel by all-to-all.
    """

    tables: str
    mesh: dict[str, Any]
    axis: str = "data"
    alltoall: bool = True

    def __str__(self) -> str:
        if self.tables == "plain":
            return "plain Keras, one device"
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        over = "" if self.tables == "host" else f" over {self.axis}"
        masked = "" if self.tables in ("host", "cut") or self.alltoall else ", masked"
        return f"{self.tables}{over}{masked} ({mesh})"

    def configs(
        self, rows: Sequence[int], width: int, batch: int
    ) -> list[kdist.layers.TableConfig]:
        """The tables, each with its place.

        Args:
            rows: of each table.
            width: of all.
            batch: impressions in a global batch.
        """
        tables = [
            kdist.layers.TableConfig(f"table_{i}", size, width) for i, size in enumerate(rows)
        ]
        devices = self.mesh.get(self.axis, 1)
        if self.tables == "dealt":
            lookups = {one.name: batch for one in tables}
            tables, deal = kdist.deal_tables(tables, devices, lookups=lookups, axis=self.axis)
            print(deal)
        elif self.tables == "host":
            tables = [dataclasses.replace(one, placement="host") for one in tables]
        elif self.tables == "split":
            tables = [
                dataclasses.replace(
                    one,
                    placement="split",
                    rows=uneven(one.vocabulary_size, devices),
                    axis=self.axis,
                )
                for one in tables
            ]
        return tables

    def parallel(self, model: keras.Model) -> keras.Model:
        """The model, over the mesh."""
        cut = {".*table_[0-9]+/embeddings": (self.axis, None)} if self.tables == "cut" else {}
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(**self.mesh),
            layout_map=cut,
            enable_alltoall=self.alltoall and self.tables in ("dealt", "split"),
        )
        return kdist.parallelize(model, config)


class RowsPerSecond(keras.callbacks.Callback):
    """Times batches.

    Args:
        batch: impressions in a batch.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch
        self._seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it."""
        self._seconds.append(time.perf_counter() - self._begun)

    @property
    def median(self) -> float:
        """Impressions per second in the median batch."""
        return self._batch / statistics.median(self._seconds[WARM_UP:] or self._seconds)


def train(variant: Variant, args: flags.FlagValues, data: Sequence[Any]) -> tuple[float, float]:
    """Trains with tables in one place.

    Args:
        variant: which.
        args: the flags.
        data: impressions to train on, and others.

    Returns:
        AUC on the others, and impressions per second.
    """
    keras.utils.set_random_seed(args.seed)
    learn, rest = data
    model = build(variant.configs(args.rows, args.width, args.batch), args.numbers)
    if variant.tables != "plain":
        variant.parallel(model)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    if variant.tables != "plain":
        model.plan().summary()
    timer = RowsPerSecond(args.batch)
    model.fit(*learn, batch_size=args.batch, epochs=args.epochs, callbacks=[timer])
    found = model.evaluate(*rest, batch_size=args.batch, verbose=0, return_dict=True)
    return float(found["auc"]), timer.median


def variants(args: flags.FlagValues) -> list[Variant]:
    """What the flags ask for.

    Raises:
        ValueError: The mesh has no such axis.
    """
    mesh = example_flags.parse_mesh(args.mesh)
    if args.tables != "all":
        if args.tables not in ("host", "plain") and args.axis not in mesh:
            raise ValueError(f"--axis is an axis of the mesh {mesh}. Received: {args.axis!r}")
        if args.tables == "cut" and args.axis == "data":
            raise ValueError("--tables=cut is over an inner axis: --mesh=model=4 --axis=model")
        return [Variant(args.tables, mesh, args.axis, args.alltoall)]
    devices = int(np.prod(list(mesh.values())))
    data, model = {"data": devices}, {"model": devices}
    return [
        Variant("plain", {}),
        Variant("dealt", data),
        Variant("dealt", data, alltoall=False),
        Variant("dealt", model, "model"),
        Variant("split", data),
        Variant("cut", model, "model"),
        Variant("host", data),
    ]


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "data=4", "axes and their sizes", flag_values=values)
    flags.DEFINE_enum(
        "tables",
        "dealt",
        ["dealt", "split", "host", "cut", "plain", "all"],
        "where tables are: dealt to devices, split unevenly, on the host, cut evenly, on the one "
        "device of plain Keras, or all of these one after the other",
        flag_values=values,
    )
    flags.DEFINE_string("axis", "data", "axis of dealt, split and cut", flag_values=values)
    flags.DEFINE_bool("alltoall", True, "whether rows go by all-to-all", flag_values=values)
    click_data.define_flags(values, epochs=2)
    return values


def main(argv: Sequence[str]) -> list[float]:
    """Runs the example; returns the AUC on held-out impressions of each variant."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    data = click_data.learn_and_rest(args)
    found = [(variant, *train(variant, args, data)) for variant in variants(args)]
    table = Table("tables", title="held-out AUC (0.5 is guessing), and speed of the median batch")
    table.add_column("AUC", justify="right")
    table.add_column("impressions/s", justify="right")
    for variant, auc, speed in found:
        table.add_row(str(variant), f"{auc:.4f}", f"{speed:,.0f}")
    Console().print(table)
    return [auc for _, auc, _ in found]


if __name__ == "__main__":
    main(sys.argv)
