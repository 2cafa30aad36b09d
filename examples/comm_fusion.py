"""Fusion ids: three blocks of two dense layers, and which of their gradients travel together.

Blocks 1 and 2 have the ids 1 and 2: each block's gradients are one collective. Block 0 has the id
0: its gradients are never fused. Prints each parameter's id, the collectives that result, and what
training with them cost.

    python examples/comm_fusion.py
"""

import sys
from collections.abc import Sequence

import kdist

import keras
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

import example_flags

WIDTH = 32


def build_model() -> keras.Model:
    """Three blocks of two dense layers; block `i` has the fusion id `i`."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for number in range(3):
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(2)]
        block = keras.Sequential(layers, name=f"block_{number}")
        x = block(x)
        kdist.set_comm_fusion(block, number)
    return keras.Model(inputs, x)


def ids_of(model: keras.Model) -> dict[str, int | None]:
    """The fusion id of each parameter."""
    return {v.path: kdist.get_comm_fusion(v) for v in model.trainable_variables}


def buckets_of(model: keras.Model) -> list[list[str]]:
    """The parameters of each collective, in the order in which they leave."""
    plan = model.plan()
    variables = model.trainable_variables
    found = {bucket.members: bucket.members for bucket in plan.buckets}
    fused = {v for members in found for v in members}
    groups = [*found, *((v,) for v in range(len(variables)) if v not in fused)]
    return [[variables[v].path for v in group] for group in sorted(groups, reverse=True)]


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer("replicas", 4, "replicas", 1, 8, flag_values=values)
    flags.DEFINE_integer("steps", 20, "training steps", lower_bound=1, flag_values=values)
    return values


def main(argv: Sequence[str]) -> None:
    """Trains, and prints ids and collectives."""
    args = example_flags.parse(_flags(), argv, __doc__)
    example_flags.start()
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=args.replicas))
    model = kdist.parallelize(build_model(), config)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.steps * 32, WIDTH))
    history = model.fit(x, np.tanh(x), verbose=0, callbacks=[kdist.callbacks.CommFusion()])

    console = Console()
    table = Table("parameter", "fusion id")
    for path, group in ids_of(model).items():
        table.add_row(path, str(group))
    console.print(table)
    table = Table("collective", "parameters", title="gradients that travel together")
    for number, paths in enumerate(buckets_of(model)):
        table.add_row(str(number), ", ".join(paths))
    console.print(table)
    model.plan().summary(console)
    for key, values in history.history.items():
        console.print(f"{key:>18}: {values[-1]:g}")


if __name__ == "__main__":
    main(sys.argv)
