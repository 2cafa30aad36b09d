"""Predicts clicks with a wide-and-deep network whose tables are in host memory.

    python examples/wide_and_deep.py
    python examples/wide_and_deep.py --mesh data=2,model=2
    python examples/wide_and_deep.py --tables all

The model is that of Cheng et al. (2016): a *wide* part has one weight for each value of a category,
and for each pair of values (crosses, hashed), a *deep* part has embeddings and a network. Each part
has its own optimizer, as there: Ftrl with an L1 penalty makes weights of the wide part sparse, and
Adam (where the paper has Adagrad) trains the deep part. Both touch only the rows of tables that a
batch looks up. It is what MindSpore shows `primitive_target="CPU"` with: tables hold nearly all
bytes, so they are on the host, and devices compute the network.
"""

import itertools
import sys
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


class Crosses(layers.Layer):
    """Numbers pairs of category columns: `(batch, columns)` to `(batch, pairs)`.

    Args:
        rows: values of each column.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, rows: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = tuple(rows)
        self.pairs = list(itertools.combinations(range(len(self.rows)), 2))

    def call(self, categories: keras.KerasTensor) -> keras.KerasTensor:
        """Returns a number for each pair of values, different ones for different pairs."""
        ids = ops.cast(categories, "int64")
        start, numbers = 0, []
        for first, second in self.pairs:
            numbers.append(ids[:, first] * self.rows[second] + ids[:, second] + start)
            start += self.rows[first] * self.rows[second]
        return ops.stack(numbers, axis=-1)

    def compute_output_spec(self, categories: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `(batch, pairs)`."""
        return keras.KerasTensor((categories.shape[0], len(self.pairs)), "int64")


def build(args: flags.FlagValues, placement: Any) -> keras.Model:
    """Builds the model.

    Args:
        args: the flags.
        placement: of all tables, as `kdist.layers.TableConfig` takes it.

    Returns:
        A functional model from `{"categories": int32 (batch, columns), "numbers": float32 (batch,
        numbers)}` to the log-odds of a click, `(batch, 1)`.
    """
    rows, width = args.rows, args.width
    categories = keras.Input((len(rows),), dtype="int32", name="categories")
    numbers = keras.Input((args.numbers,), name="numbers")
    columns = [categories[:, i] for i in range(len(rows))]
    table, feature = kdist.layers.TableConfig, kdist.layers.FeatureConfig

    def weights(name: str, size: int) -> kdist.layers.TableConfig:
        return table(name, size, 1, "zeros", combiner="sum", oov="hash", placement=placement)

    crosses = Crosses(rows, name="crosses")(categories)
    pairs = crosses.shape[-1]
    wide_features = [
        feature("crosses", weights("crosses", args.buckets), (None, pairs), (None, 1)),
        *(
            feature(f"value_{i}", weights(f"column_{i}", size), (None,), (None, 1))
            for i, size in enumerate(rows)
        ),
    ]
    wide = kdist.layers.DistributedEmbedding(wide_features, name="wide")([crosses, *columns])
    deep_features = [
        feature(
            f"column_{i}",
            table(f"column_{i}", size, width, placement=placement),
            (None,),
            (None, width),
        )
        for i, size in enumerate(rows)
    ]
    vectors = kdist.layers.DistributedEmbedding(deep_features, name="deep")(columns)
    x = layers.Concatenate(name="features")([*vectors, numbers])
    x = layers.Dense(64, activation="relu", name="up")(x)
    x = layers.Dense(32, activation="relu", name="down")(x)
    deep = layers.Dense(1, name="log_odds")(x)
    return keras.Model(
        {"categories": categories, "numbers": numbers},
        layers.Add(name="wide_and_deep")([*wide, deep]),
        name="wide_and_deep",
    )


def optimizer() -> keras.optimizers.MultiOptimizer:
    """Ftrl for the wide part, Adam for the deep one; of tables, for rows that are looked up."""
    network = keras.optimizers.Adam(2e-3)
    rules = keras.optimizers.OptimizerMap(network)
    ftrl = keras.optimizers.Ftrl(0.05, l1_regularization_strength=1e-4)
    rules["(.*/)?wide/.*"] = kdist.lazy(ftrl)
    rules["(.*/)?deep/.*"] = kdist.lazy(network)
    return keras.optimizers.MultiOptimizer(rules)


def train(tables: str, args: flags.FlagValues, data: Sequence[Any]) -> tuple[float, float, float]:
    """Trains with tables in one place.

    Args:
        tables: "host", "device", or "plain": one device, without kdist.
        args: the flags.
        data: impressions to train on, and others.

    Returns:
        Loss and AUC on the others, and the share of weights of the wide part that are zero.
    """
    keras.utils.set_random_seed(args.seed)
    learn, rest = data
    model = build(args, "host" if tables == "host" else "device")
    if tables != "plain":
        mesh = example_flags.parse_mesh(args.mesh)
        cut = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
        layout_map = cut if "model" in mesh else {}
        config = kdist.ParallelConfig(mesh=kdist.mesh(**mesh), layout_map=layout_map)
        kdist.parallelize(model, config)
    model.compile(
        optimizer=optimizer(),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    if tables != "plain":
        model.plan().summary()
    model.fit(*learn, batch_size=args.batch, epochs=args.epochs)
    found = model.evaluate(*rest, batch_size=args.batch, verbose=0, return_dict=True)
    wide = np.concatenate([one.ravel() for one in model.get_layer("wide").get_weights()])
    return float(found["loss"]), float(found["auc"]), float(np.mean(wide == 0))


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "data=4", "axes and their sizes", flag_values=values)
    flags.DEFINE_enum(
        "tables",
        "host",
        ["host", "device", "plain", "all"],
        "where tables are: on the host, on every device, on the one device of plain Keras, or all "
        "of these one after the other",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "buckets", 100_000, "weights of crosses", lower_bound=1, flag_values=values
    )
    click_data.define_flags(values, epochs=1)
    return values


def main(argv: Sequence[str]) -> list[float]:
    """Runs the example; returns the loss on held-out impressions, wherever tables are."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    data = click_data.learn_and_rest(args)
    places = ["plain", "device", "host"] if args.tables == "all" else [args.tables]
    found = {place: train(place, args, data) for place in places}
    table = Table("tables", title="on held-out impressions (an AUC of 0.5 is guessing)")
    for column in ("loss", "AUC", "wide weights that are 0"):
        table.add_column(column, justify="right")
    for place, (loss, auc, zeros) in found.items():
        table.add_row(place, f"{loss:.5f}", f"{auc:.4f}", f"{zeros:.1%}")
    Console().print(table)
    return [loss for loss, _, _ in found.values()]


if __name__ == "__main__":
    main(sys.argv)
