"""One configuration of the step-time benchmark, in a process of its own.

Started by `step_time.py` with the configuration as JSON. It answers on standard output, one line of
JSON after the mark `@step `: first the seconds of the first step, then, for each line "n" that it
reads, the seconds of n further steps. With `--devices` it answers which devices computed, and ends.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import step_configurations as rows

MARK = "@step "
ON_GPU = "BENCH_ON_GPU"
"""Set, the devices of a row are parts of the first GPU; its value is their memory, in MB."""
MICRO_BATCHES = 4  # of rows with an axis `pipe`
Step = Callable[[], tuple[float, float]]  # runs one step; returns its seconds and the loss


def main() -> None:
    """Serves the configuration named by the first argument until standard input closes."""
    configuration = rows.from_json(json.loads(sys.argv[1]))
    started = time.perf_counter()
    step = RUNNERS[configuration.runner](configuration)
    if "--devices" in sys.argv[2:]:
        # Watching slows the first step, so this is a process of its own that times nothing.
        from compute_devices import compute_devices

        answer(devices=sorted(compute_devices(step)))
        return
    setup = time.perf_counter() - started
    seconds, loss = step()
    _, second = step()
    losses = {"first_loss": loss, "second_loss": second}
    answer(setup_s=setup, first_step_s=seconds, peak_mib=_peak_mib(), **losses, **_gpu())
    for line in sys.stdin:
        answer(steps_s=[step()[0] for _ in range(int(line))])


def _peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _gpu() -> dict[str, Any]:
    """The card, and the most memory that each of its devices has had."""
    if ON_GPU not in os.environ:
        return {}
    import tensorflow as tf

    memory = tf.config.experimental.get_memory_info
    found = [memory(f"GPU:{k}") for k in range(len(tf.config.list_logical_devices("GPU")))]
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    peaks = [one["peak"] / 2**20 for one in found]
    return {"gpu": details.get("device_name"), "gpu_peak_mib": peaks}


def _cut_card(count: int) -> None:
    """Makes several logical devices of the first GPU."""
    import tensorflow as tf

    memory = int(os.environ[ON_GPU]) // count
    part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    card = tf.config.list_physical_devices("GPU")[0]
    tf.config.set_logical_device_configuration(card, [part] * count)


def answer(**record: Any) -> None:
    """Sends a record to the parent."""
    print(MARK + json.dumps(record), flush=True)


def plain(configuration: rows.Configuration) -> Step:
    """Keras on TensorFlow, one device, none of kdist."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if ON_GPU in os.environ:
        _cut_card(1)
    return compiled(build(configuration.sizes), configuration)


def mirrored(configuration: rows.Configuration) -> Step:
    """`tf.distribute.MirroredStrategy` over logical CPU devices."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    count = configuration.devices
    device = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(device, logical)
    if count >= len(os.sched_getaffinity(0)):
        # As kdist.init does: the devices keep the cores busy.
        tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])
    with strategy.scope():
        model = build(configuration.sizes)
        # XLA refuses variables of other devices, so Keras's automatic choice must not turn it on.
        compile_model(model, jit_compile=False)
    return _fit_step(strategy, model, configuration)


def _fit_step(strategy: Any, model: Any, configuration: rows.Configuration) -> Step:
    # Not train_on_batch: under a strategy it hands the whole batch to every replica, so that eight
    # replicas do eight times the work of the other rows, at the same loss. `fit` splits it.
    import keras
    import tensorflow as tf

    sizes = configuration.sizes
    dataset = tf.data.Dataset.from_tensor_slices(batch_of(sizes)).repeat()
    dataset = dataset.batch(sizes.batch, drop_remainder=True)
    share = next(iter(strategy.experimental_distribute_dataset(dataset)))[0].values[0].shape[0]
    if share * configuration.devices != sizes.batch:
        raise ValueError(f"A replica must get its part of the batch. Received: {share} sequences")

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.result = time.perf_counter() - self.start, float(logs["loss"])

    clock = Clock()

    def step() -> tuple[float, float]:
        model.fit(dataset, steps_per_epoch=1, verbose=0, callbacks=[clock])
        return clock.result

    return step


def with_kdist(configuration: rows.Configuration) -> Step:
    """Kdist over logical CPU devices, or over parts of a GPU."""
    import kdist

    if ON_GPU in os.environ:
        _cut_card(configuration.devices)
        kdist.init()
    else:
        # In a process that serves another, this call does not return.
        kdist.init(cpu_devices=max(8, configuration.devices) // configuration.processes)
    axes: dict[str, Any] = dict(configuration.axes)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=layout_of(configuration),
        sequence_parallel=configuration.sequence,
        optimizer=kdist.OptimizerConfig(level=configuration.level),
        pipeline=kdist.PipelineConfig(micro_batches=MICRO_BATCHES) if "pipe" in axes else None,
    )
    model = kdist.parallelize(build(configuration.sizes), config)
    return compiled(model, configuration)


def multi_worker(configuration: rows.Configuration) -> Step:
    """A custom loop under `tf.distribute.MultiWorkerMirroredStrategy`: a replica a process."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    rank, addresses = place()
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build(configuration.sizes)
        adam = keras.optimizers.Adam()
        adam.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = (part(array, rank, configuration.processes) for array in batch_of(configuration.sizes))

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = losses(y, model(x, training=True)) / configuration.processes
        gradients = tape.gradient(loss, model.trainable_variables)
        context = tf.distribute.get_replica_context()
        *gradients, loss = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, loss])
        # The sum is there; Keras's own update of mirrored variables would not add them again.
        adam.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train(x: Any, y: Any) -> Any:
        return strategy.run(replica, args=(x, y))

    return timed(lambda: float(train(x, y)), rank)


def ddp(configuration: rows.Configuration) -> Step:
    """Keras on torch, `DistributedDataParallel` with gloo: a replica a process."""
    os.environ["KERAS_BACKEND"] = "torch"
    rank, addresses = place()
    host, _, port = addresses[0].rpartition(":")
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    import torch

    torch.set_num_threads(1)
    count = configuration.processes
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count)
    model = build(configuration.sizes)
    whole = torch.nn.parallel.DistributedDataParallel(model)
    adam = torch.optim.Adam(whole.parameters(), eps=1e-7)
    x, y = (torch.as_tensor(part(a, rank, count)) for a in batch_of(configuration.sizes))

    def train() -> float:
        adam.zero_grad()
        logits = whole(x).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, y.flatten().long())
        loss.backward()
        adam.step()
        total = loss.detach() / count
        torch.distributed.all_reduce(total)
        return float(total)

    return timed(train, rank)


def place() -> tuple[int, list[str]]:
    """The number of this process, and the addresses of all."""
    return int(os.environ["BENCH_RANK"]), os.environ["BENCH_ADDRESSES"].split(",")


def part(array: Any, rank: int, count: int) -> Any:
    """The rows of a process."""
    size = len(array) // count
    return array[rank * size : (rank + 1) * size]


def timed(train: Callable[[], float], rank: int) -> Step:
    """A step in the first process; the others go with it until they are ended."""

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        loss = train()
        return time.perf_counter() - start, loss

    while rank:
        step()
    return step


def jax(configuration: rows.Configuration) -> Step:
    """Keras on JAX, through `keras.distribution`, over host devices."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import keras
    from keras import distribution

    if configuration.axes:
        names, sizes = zip(*configuration.axes, strict=True)
        devices = distribution.list_devices()[: configuration.devices]
        mesh = distribution.DeviceMesh(sizes, list(names), devices)
        layouts = distribution.LayoutMap(mesh)
        for pattern, layout in layout_of(configuration).items():
            layouts[pattern] = layout
        distribution.set_distribution(
            distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
            if "model" in names
            else distribution.DataParallel(device_mesh=mesh)
        )
    assert keras.backend.backend() == "jax"
    return compiled(build(configuration.sizes), configuration)


RUNNERS: dict[str, Callable[[rows.Configuration], Step]] = {
    "plain": plain,
    "mirrored": mirrored,
    "kdist": with_kdist,
    "jax": jax,
    "multi_worker": multi_worker,
    "ddp": ddp,
}


def build(sizes: rows.Sizes) -> Any:
    """Builds the same model for every row."""
    import keras

    import benchmark_paths  # noqa: F401
    import gpt_model

    keras.utils.set_random_seed(0)
    heads = max(4, sizes.width // 64)  # the widest mesh cuts them by 4
    return gpt_model.build(
        gpt_model.GPTSizes(sizes.vocabulary, sizes.length, sizes.width, sizes.layers, heads)
    )


def layout_of(configuration: rows.Configuration) -> dict[str, tuple[str | None, ...]]:
    """Returns the model's layouts, or none where the mesh has no axis `model`."""
    import benchmark_paths  # noqa: F401
    import gpt_model

    if "model" not in dict(configuration.axes):
        return {}
    return gpt_model.layout_map()


def compile_model(model: Any, **options: Any) -> None:
    """Compiles a model the same way for every row."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(), loss=loss, **options)


def batch_of(sizes: rows.Sizes) -> tuple[Any, Any]:
    """Returns the global batch that every row trains on: random tokens and targets."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (sizes.batch, sizes.length)
    x, y = (rng.integers(0, sizes.vocabulary, shape, dtype=np.int32) for _ in range(2))
    return x, y


def compiled(model: Any, configuration: rows.Configuration) -> Step:
    """Compiles a model and returns its step, by `train_on_batch`."""
    import numpy as np

    compile_model(
        model, **({} if configuration.xla is None else {"jit_compile": configuration.xla})
    )
    x, y = batch_of(configuration.sizes)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        # The loss as a number: the step has really finished when the clock stops.
        loss = float(np.asarray(model.train_on_batch(x, y)))
        return time.perf_counter() - start, loss

    return step


if __name__ == "__main__":
    main()
