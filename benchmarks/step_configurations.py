"""What the step-time benchmark compares, as data: one row for each way to run the same model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The benchmarked GPT and its global batch; every row does the same arithmetic.

    Attributes:
        layers: blocks.
        width: features of a token.
        length: tokens in a sequence.
        vocabulary: number of different tokens.
        batch: sequences in a global batch.
    """

    layers: int = 4
    width: int = 256
    length: int = 128
    vocabulary: int = 4096
    batch: int = 16


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run the model.

    Attributes:
        name: what the table shows.
        runner: `plain`, `mirrored`, `kdist` or `jax`: see `step_worker.py`.
        axes: mesh axes and their sizes, in order; empty for a single device.
        sizes: what is run.
        level: level of optimizer parallelism, of kdist.
        processes: processes that share the devices, of kdist.
        sequence: `sequence_parallel`, of kdist.
        xla: `jit_compile` of the model, None for Keras's choice.
    """

    name: str
    runner: str
    axes: tuple[tuple[str, int], ...] = ()
    sizes: Sizes = Sizes()
    level: int = 0
    processes: int = 1
    sequence: bool = False
    xla: bool | None = None

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        product = 1
        for _, size in self.axes:
            product *= size
        return product


PLAIN = Configuration("plain Keras, 1 device", "plain")
STEP_ROWS = (
    PLAIN,
    Configuration("MirroredStrategy, 8 replicas", "mirrored", (("data", 8),)),
    Configuration("kdist, data 8", "kdist", (("data", 8),)),
    Configuration("kdist, data 8, level 1", "kdist", (("data", 8),), level=1),
    Configuration("kdist, data 8, level 2", "kdist", (("data", 8),), level=2),
    Configuration("kdist, data 8, level 3", "kdist", (("data", 8),), level=3),
    Configuration("kdist, data 2 x model 2", "kdist", (("data", 2), ("model", 2))),
    Configuration(
        "kdist, data 2 x model 2, level 3", "kdist", (("data", 2), ("model", 2)), level=3
    ),
    Configuration("kdist, data 2 x model 4", "kdist", (("data", 2), ("model", 4))),
    Configuration(
        "kdist, pipe 2 x data 2 x model 2", "kdist", (("pipe", 2), ("data", 2), ("model", 2))
    ),
    *(
        Configuration(
            f"kdist, {' x '.join(f'{name} {size}' for name, size in axes)}, sequence_parallel",
            "kdist",
            axes,
            sequence=True,
        )
        for axes in (
            (("data", 2), ("model", 2)),
            (("data", 2), ("model", 4)),
            (("pipe", 2), ("data", 2), ("model", 2)),
        )
    ),
)
DEEP_SMALL = Sizes(layers=24, width=16, length=8, vocabulary=64, batch=8)
"""Many weights and little arithmetic: what a step costs beside its arithmetic."""
DEEP_ROWS = (
    Configuration("plain Keras, deep and small", "plain"),
    Configuration("kdist, data 4, deep and small", "kdist", (("data", 4),)),
    Configuration("kdist, data 4, level 3, deep and small", "kdist", (("data", 4),), level=3),
    Configuration("kdist, data 2 x model 2, deep and small", "kdist", (("data", 2), ("model", 2))),
)
"""Of `DEEP_SMALL`, whatever the sizes of the other rows are."""
PROCESS_ROWS = (
    *(
        Configuration(
            f"kdist, data 8{', level 3' * (level == 3)}, processes {count} x {8 // count}",
            "kdist",
            (("data", 8),),
            level=level,
            processes=count,
        )
        for level in (0, 3)
        for count in (1, 2, 4)
    ),
    *(
        Configuration(f"kdist, data {n}, processes {n} x 1", "kdist", (("data", n),), processes=n)
        for n in (2, 4)
    ),
    *(
        Configuration(
            f"MultiWorkerMirrored, processes {n} x 1", "multi_worker", (("data", n),), processes=n
        )
        for n in (2, 4)
    ),
)
"""The same mesh in one process and in several, processes x devices of each; and TensorFlow's way of
the same program in each process."""
TORCH_ROWS = tuple(
    Configuration(f"torch DDP (gloo), processes {n} x 1", "ddp", (("data", n),), processes=n)
    for n in (2, 4)
)
JAX_ROWS = (
    Configuration("Keras on JAX, 1 device", "jax"),
    Configuration("Keras on JAX, data 8", "jax", (("data", 8),)),
    Configuration("Keras on JAX, data 2 x model 2", "jax", (("data", 2), ("model", 2))),
    Configuration("Keras on JAX, data 2 x model 4", "jax", (("data", 2), ("model", 4))),
)


def growth_rows(sizes: Sizes) -> tuple[Configuration, ...]:
    """Rows that show how the first step's time grows, with depth and with replicas."""
    depths = tuple(
        Configuration(
            f"kdist, data 2 x model 2, {layers} layers",
            "kdist",
            (("data", 2), ("model", 2)),
            dataclasses.replace(sizes, layers=layers),
        )
        for layers in (2, 4, 6, 8, 24)
    )
    replicas = tuple(
        Configuration(
            f"kdist, data {count}",
            "kdist",
            (("data", count),),
            dataclasses.replace(sizes, batch=max(sizes.batch, count)),
        )
        for count in (1, 2, 4, 8, 16, 32, 64)
    )
    return depths + replicas


def from_json(record: dict) -> Configuration:
    """Reads back what `dataclasses.asdict` made of a configuration."""
    axes = tuple((str(name), int(size)) for name, size in record["axes"])
    sizes = Sizes(**record["sizes"])
    return Configuration(**(record | {"axes": axes, "sizes": sizes}))
