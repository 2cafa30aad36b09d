"""Two matrix products on four devices, each cut in another way; then as a pipeline of eight.

    python examples/hybrid_matmul.py
    python examples/hybrid_matmul.py --stages=2

The first product is cut by the rows of its input, so each device computes a quarter of the batch.
The second is cut by the columns of its weight, so each device computes a quarter of the features,
for which it needs every row: the one re-layout between the two is a gather of the rows.

             input (4, 1)      weight (1, 1)                input (1, 1)      weight (1, 4)
    device 0 [rows 0 ]                                                        [c|       ]
    device 1 [rows 1 ]    @    [ whole ]     -- gather -->  [ whole ]    @    [ |c|     ]
    device 2 [rows 2 ]                                                        [   |c|   ]
    device 3 [rows 3 ]                                                        [     |c  ]

With two stages, each product has four devices of its own, and the batch passes through in
micro-batches: while the second product works on one, the first works on the next.

It is the network that introductions to hybrid parallelism use; a strategy counts the cuts of each
dim, for the layer's input and then for its weight.
"""

import sys
from collections.abc import Sequence

import kdist

import keras
import numpy as np
from absl import flags
from keras import layers
from sklearn import datasets

import example_flags

ROWS = ((4, 1), (1, 1))
COLUMNS = ((1, 1), (1, 4))


def build(hidden: int) -> keras.Model:
    """Builds a network from float32 `(batch, 64)` to logits `(batch, 10)`, its two products cut.

    Args:
        hidden: features between the layers; divisible by 4.
    """
    first = layers.Dense(hidden, use_bias=False, name="rows")
    second = layers.Dense(hidden, use_bias=False, name="columns")
    kdist.shard(first, in_strategy=ROWS)
    kdist.shard(second, in_strategy=COLUMNS)
    image = keras.Input((64,), name="image")
    x = layers.ReLU(name="relu_1")(first(image))
    x = layers.ReLU(name="relu_2")(second(x))
    return keras.Model(image, layers.Dense(10, name="logits")(x), name="hybrid")


def parallel(model: keras.Model, stages: int = 1, micro_batches: int = 4) -> keras.Model:
    """Lays a network out over four devices a stage, and compiles it.

    Args:
        model: From `build`.
        stages: 1, or 2: the second product then has a stage of its own.
        micro_batches: Parts of a batch that pass through two stages; each divisible by 4.
    """
    if stages == 1:
        config = kdist.ParallelConfig(mesh=kdist.mesh(model=4), layout_map={})
    else:
        config = kdist.ParallelConfig(
            mesh=kdist.mesh(pipe=stages, model=4),
            layout_map={},
            pipeline=kdist.PipelineConfig(
                micro_batches=micro_batches, stages={"rows": 0, "columns": 1}
            ),
        )
    model = kdist.parallelize(model, config)
    compiled(model)
    return model


def compiled(model: keras.Model) -> None:
    """Compiles the network as its introductions do; on one device too."""
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "hidden", 128, "features between the layers", lower_bound=4, flag_values=values
    )
    flags.DEFINE_integer("batch", 32, "images in a global batch", lower_bound=4, flag_values=values)
    flags.DEFINE_integer("stages", 1, "stages", lower_bound=1, upper_bound=2, flag_values=values)
    flags.DEFINE_integer(
        "micro_batches", 4, "parts of a batch, if staged", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("epochs", 10, "passes over the images", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of the weights", flag_values=values)
    return values


def main(argv: Sequence[str]) -> float:
    """Runs the example; returns the last epoch's training loss."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    keras.utils.set_random_seed(args.seed)
    digits = datasets.load_digits()
    images = (digits.data / 16).astype(np.float32)
    count = len(images) // args.batch * args.batch

    model = parallel(build(args.hidden), args.stages, args.micro_batches)
    if args.stages > 1:
        model.plan().summary()
        # The functions of a pipeline are lowered with its first step.
        model.train_on_batch(images[: args.batch], digits.target[: args.batch])
    print(kdist.inspect(model, batch_size=args.batch))
    history = model.fit(
        images[:count], digits.target[:count], batch_size=args.batch, epochs=args.epochs
    )
    return float(history.history["loss"][-1])


if __name__ == "__main__":
    main(sys.argv)
