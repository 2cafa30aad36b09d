"""`kdist.ray.Trainer`: Ray Train's trainer, whose workers are the processes of one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kdist._compat import ray_train
from kdist.ray.worker import in_workers

import ray.train

_Base: Any = ray_train.trainer()


class Trainer(_Base):
    """Trains on workers that Ray Train starts, places, starts again and scales.

    `train_fn` starts in each worker. Its call of `kdist.init` returns in the first one alone, whose
    mesh then has the devices of all: what stands behind it happens once. So do `ray.train.report`,
    `get_checkpoint` and `get_dataset_shard`; what Ray wants of every worker, such as as many calls
    of `report`, the others do by themselves.

    All else is Ray's: with `FailureConfig(max_failures=3)` all workers start again when one fails,
    with `ScalingConfig(num_workers=(2, 4))` as many as there is room for; `ShardedCheckpoint` of
    this package goes on from the last checkpoint that Ray has, on any number of workers.

    Args:
        train_fn: What trains: a function with no argument, or with one, `train_loop_config`.
        train_loop_config: For `train_fn`.
        scaling_config: See `ray.train.ScalingConfig`: how many workers, and what each has.
        run_config: See `ray.train.RunConfig`: where results lie, how often to start again.
        datasets: Ray datasets by name, for `ray.train.get_dataset_shard(name)`, which gives all
            rows: the one program reads them, and sends each device its own.
        dataset_config: See `ray.train.DataConfig`. It must split none, as the default.
        **others: See `ray.train.v2.api.data_parallel_trainer.DataParallelTrainer`.

    Raises:
        ValueError: `dataset_config` splits datasets among workers.

    Example:
    ```python
    import kdist.ray, keras, numpy as np, ray.train

    def train_fn():
        kdist.init(cpu_devices=2)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=4)))
        model.compile("adam", "mse")
        x, y = np.ones((64, 8)), np.ones((64, 4))
        saver = kdist.ray.ShardedCheckpoint(every_steps=4)
        model.fit(x, y, batch_size=8, epochs=2, callbacks=[saver])

    trainer = kdist.ray.Trainer(train_fn, scaling_config=ray.train.ScalingConfig(num_workers=2))
    result = trainer.fit()
    ```
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: ray.train.DataConfig | None = None,
        **others: Any,
    ) -> None:
        if dataset_config is None:
            dataset_config = ray.train.DataConfig(datasets_to_split=[])
        elif ray_train.splits(dataset_config):
            raise ValueError(
                "One program reads all rows, and sends each device its own, so no dataset is split "
                "among workers. Give ray.train.DataConfig(datasets_to_split=[]). "
                f"Received: dataset_config={dataset_config!r}"
            )
        super().__init__(
            in_workers(train_fn),
            train_loop_config=None if train_loop_config is None else dict(train_loop_config),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=dataset_config,
            **others,
        )
