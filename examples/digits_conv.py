"""Reads scikit-learn's handwritten digits with a convolutional network on several devices.

    python examples/digits_conv.py --mesh data=4            each has a quarter of the images
    python examples/digits_conv.py --mesh data=2,model=2    and of two, each half of the channels

The network has BatchNormalization layers. Each replica normalises by the statistics of its own
rows, and the moving averages are the mean of the replicas', so losses depend a little on their
number. With `BatchNormalization(synchronized=True)` the statistics are those of the global batch.
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


def build(filters: int) -> keras.Model:
    """Builds a network from float32 images `(batch, 8, 8, 1)` to probabilities `(batch, 10)`.

    Args:
        filters: filters of the first convolution; the second has twice as many.
    """
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name="conv_1"),
            layers.BatchNormalization(momentum=0.9, name="norm_1"),
            layers.ReLU(name="relu_1"),
            layers.Conv2D(2 * filters, 3, strides=2, padding="same", use_bias=False, name="conv_2"),
            layers.BatchNormalization(momentum=0.9, name="norm_2"),
            layers.ReLU(name="relu_2"),
            layers.Flatten(name="flat"),
            layers.Dense(10, activation="softmax", name="digit"),
        ],
        name="digits",
    )


def load(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns 1,500 training and 297 test images, `(count, 8, 8, 1)` from 0 to 1, with labels."""
    digits = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "data=4", "axes and their sizes", flag_values=values)
    flags.DEFINE_integer(
        "filters", 16, "filters of the first convolution", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("batch", 60, "images in a global batch", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("epochs", 5, "passes over the images", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of weights and order", flag_values=values)
    return values


def main(argv: Sequence[str]) -> float:
    """Runs the example; returns the accuracy on the test images."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    keras.utils.set_random_seed(args.seed)
    train, test = load(args.seed)
    mesh = kdist.mesh(**example_flags.parse_mesh(args.mesh))
    model = build(args.filters)
    # A device makes a part of the first convolution's filters; the second adds up over all parts.
    layout_map = kdist.layout_map_for(model, mesh) if "model" in mesh.axis_names else {}
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layout_map))
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.plan().summary()
    model.fit(*train, batch_size=args.batch, epochs=args.epochs, validation_data=test)
    accuracy = model.evaluate(*test, batch_size=args.batch, verbose=0, return_dict=True)["accuracy"]
    print(f"\ntest accuracy: {accuracy:.3f}")
    return float(accuracy)


if __name__ == "__main__":
    main(sys.argv)
