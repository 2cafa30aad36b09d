"""Predicts clicks with embedding tables cut by rows, split unevenly, or in host memory.

    python examples/click_through.py --mesh data=2,model=2
    python examples/click_through.py --mesh data=4 --tables host
    python examples/click_through.py --mesh data=4 --tables split --axis data

The model has the shape of DLRM (Naumov et al., 2019): one table per category column, a small
network for the numbers, the products between all pairs of vectors, and a network on top. The tables
hold nearly all its bytes, so they are what the mesh divides, or what the host keeps; the networks
are whole on every device.
"""

import sys
from collections.abc import Sequence

import kdist

import keras
import numpy as np
from absl import flags
from keras import layers, ops

import click_data
import example_flags


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


def build(rows: Sequence[int], numbers: int, width: int) -> keras.Model:
    """Builds the model.

    Args:
        rows: rows of each embedding table.
        numbers: numeric columns.
        width: features of an embedding.

    Returns:
        A functional model from `{"categories": int32 (batch, tables), "numbers": float32 (batch,
        numbers)}` to the log-odds of a click, `(batch, 1)`.
    """
    categories = keras.Input((len(rows),), dtype="int32", name="categories")
    dense = keras.Input((numbers,), name="numbers")
    vectors = [layers.Dense(width, activation="relu", name="bottom")(dense)]
    for column, size in enumerate(rows):
        table = layers.Embedding(size, width, name=f"table_{column}")
        vectors.append(table(categories[:, column]))
    stacked = layers.Concatenate(name="vectors")(vectors)
    stacked = layers.Reshape((len(vectors), width), name="stacked")(stacked)
    products = PairProducts(name="products")(stacked)
    x = layers.Concatenate(name="features")([products, vectors[0]])
    x = layers.Dense(64, activation="relu", name="top_1")(x)
    x = layers.Dense(32, activation="relu", name="top_2")(x)
    log_odds = layers.Dense(1, name="log_odds")(x)
    return keras.Model({"categories": categories, "numbers": dense}, log_odds, name="clicks")


def layout_map(axis: str = "model") -> dict[str, tuple[str | None, ...]]:
    """Cuts every table by rows; the rows of each must be divisible by the axis."""
    return {".*table_[0-9]+/embeddings": (axis, None)}


def uneven(rows: int, parts: int) -> tuple[int, ...]:
    """Splits rows so that each device has more than the one before.

    >>> uneven(64, 3)
    (10, 21, 33)
    """
    shares = sum(range(1, parts + 1))
    sizes = [max(1, rows * part // shares) for part in range(1, parts)]
    return (*sizes, rows - sum(sizes))


def place_tables(model: keras.Model, where: str, axis: str, devices: int) -> None:
    """Puts every table on the host, or splits it unevenly over an axis.

    Args:
        model: the model, before `kdist.parallelize`.
        where: "host", "split", or "cut" to leave it to the layout map.
        axis: what to split over.
        devices: size of that axis.
    """
    for layer in model.layers:
        if isinstance(layer, layers.Embedding) and where == "host":
            kdist.place(layer, "host")
        elif isinstance(layer, layers.Embedding) and where == "split":
            kdist.shard(layer, manual_split=uneven(layer.input_dim, devices), axis=axis)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "data=2,model=2", "axes and their sizes", flag_values=values)
    flags.DEFINE_enum(
        "tables", "cut", ["cut", "host", "split"], "where tables are", flag_values=values
    )
    flags.DEFINE_string("axis", "model", "axis of --tables=split", flag_values=values)
    flags.DEFINE_multi_integer(
        "rows", [4096, 2048, 512, 128, 64, 16], "rows of a table", flag_values=values
    )
    flags.DEFINE_integer("numbers", 8, "numeric columns", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("width", 16, "features of an embedding", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "examples", 80_000, "impressions to train on", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "batch", 512, "impressions in a global batch", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "epochs", 2, "passes over the impressions", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "seed of weights and data", flag_values=values)
    return values


def main(argv: Sequence[str]) -> float:
    """Runs the example; returns the AUC on held-out impressions."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    keras.utils.set_random_seed(args.seed)
    held_out = max(args.batch, args.examples // 10)
    clicks = click_data.make(args.examples + held_out, tuple(args.rows), args.numbers, args.seed)
    inputs = {"categories": clicks.categories, "numbers": clicks.numbers}

    def part(rows: slice) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return {name: column[rows] for name, column in inputs.items()}, clicks.clicked[rows]

    train, rest = part(slice(0, args.examples)), part(slice(args.examples, None))
    axes = example_flags.parse_mesh(args.mesh)
    cut = args.tables == "cut" and "model" in axes
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout_map() if cut else {})
    model = build(args.rows, args.numbers, args.width)
    place_tables(model, args.tables, args.axis, axes.get(args.axis, 1))
    kdist.parallelize(model, config)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    model.plan().summary()
    model.fit(*train, batch_size=args.batch, epochs=args.epochs, validation_data=rest)
    auc = model.evaluate(*rest, batch_size=args.batch, verbose=0, return_dict=True)["auc"]
    print(f"\nheld-out AUC: {auc:.4f} (0.5 is guessing)")
    return float(auc)


if __name__ == "__main__":
    main(sys.argv)
