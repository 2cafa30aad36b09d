"""A training loop of one's own over a mesh: gradients, apply, reduce.

    python examples/custom_loop.py

For what `fit` cannot express. The three functions take and give whole tensors, on any mesh: here
the loop looks at the gradients' norm and leaves out steps in which it explodes.
"""

import sys
from collections.abc import Sequence

import kdist

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

import example_flags


def build() -> keras.Model:
    """Builds a small regression network from `(batch, 8)` to `(batch, 1)`."""
    x = inputs = keras.Input((8,))
    x = layers.Dense(64, activation="tanh", name="up")(x)
    return keras.Model(inputs, layers.Dense(1, name="down")(x), name="regression")


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "data=2,model=2", "axes of the mesh", flag_values=values)
    flags.DEFINE_integer("steps", 100, "steps", lower_bound=1, flag_values=values)
    flags.DEFINE_float("limit", 2.0, "largest norm of a gradient to use", flag_values=values)
    return values


def main(argv: Sequence[str]) -> float:
    """Runs the example; returns the mean absolute error after training."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    keras.utils.set_random_seed(0)
    mesh = kdist.mesh(**example_flags.parse_mesh(args.mesh))
    layouts = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
    config = kdist.ParallelConfig(
        mesh=mesh, layout_map=layouts if "model" in mesh.axis_names else None
    )
    model = kdist.parallelize(build(), config)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")

    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
    left_out = 0
    for step in range(args.steps):
        rows = rng.integers(0, len(x), 32)
        loss, gradients = kdist.gradients(model, x[rows], y[rows])
        if tf.linalg.global_norm(gradients) > args.limit:
            left_out += 1
            continue
        kdist.apply_gradients(model, gradients)
        if step % 20 == 0:
            print(f"step {step:4d}  loss {float(loss):.4f}")

    predicted = model.predict(x, verbose=0)
    error = float(kdist.reduce(model, lambda a, b: tf.reduce_mean(tf.abs(a - b)), predicted, y))
    print(f"mean absolute error {error:.4f}, {left_out} steps left out")
    return error


if __name__ == "__main__":
    main(sys.argv)
