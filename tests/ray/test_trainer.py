"""Ray Train's workers are one program, whose failures Ray mends."""

import signal
from pathlib import Path

import kdist

import numpy as np
import pytest

pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'kdist[ray]'")

import ray.train

from . import functions
from .runs import check, trainer

pytestmark = [pytest.mark.usefixtures("started"), pytest.mark.long]


@pytest.mark.parametrize(
    ("kill", "how"), [(None, 0), (1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_training_that_is_killed_or_frozen_equals_one_that_is_not(
    kill: int | None, how: int, tmp_path: Path, float64: None
) -> None:
    config = {"folder": str(tmp_path)} | ({} if kill is None else {"kill": kill, "how": int(how)})
    given = {"train_loop_config": config, "max_failures": 1}
    result = trainer(functions.trains, tmp_path, **given).fit()
    saver = kdist.callbacks.ShardedCheckpoint(tmp_path / "alone", every_steps=2)
    check(result.return_value, functions.alone(callbacks=[saver]))
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in (0, 1)]
    assert starts == [["2"] * (1 if kill is None else 2)] * 2
    steps = [int(step) for step in (tmp_path / "steps").read_text().split()]
    again = [k for k in range(1, len(steps)) if steps[k] != steps[k - 1] + 1]
    assert len(again) == (0 if kill is None else 1) and steps[-1] == 15
    assert all(steps[k] in (2, 4, 6) for k in again), "from the newest checkpoint that Ray has"
    assert result.metrics["step"] == functions.ROWS // functions.BATCH * functions.EPOCHS
    with result.checkpoint.as_directory() as folder:
        made = functions.model(2)
        made.build((None, 12))
        kdist.checkpoint.restore(made, folder)
    for mine, other in zip(made.get_weights(), result.return_value["weights"], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_failures_of_the_function(tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError, match="KeyError: 'of the user'") as failed:
        trainer(functions.raises, tmp_path).fit()
    assert list(failed.value.worker_failures) == [0], "the other worker ended with it"
    with pytest.raises(ray.train.WorkerGroupError, match="calls kdist.init\\(\\) before all else"):
        trainer(functions.trains_apart, tmp_path).fit()


def test_rows_of_a_ray_dataset_are_read_once(tmp_path: Path, float64: None) -> None:
    """All rows reach the one program, in their order."""
    import ray.data

    x, y = functions.data()
    rows = ray.data.from_items([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    options = ray.data.ExecutionOptions(preserve_order=True)
    config = ray.train.DataConfig(datasets_to_split=[], execution_options=options)
    given = {"datasets": {"train": rows}, "dataset_config": config}
    result = trainer(functions.from_ray_data, tmp_path, **given).fit()
    check(result.return_value, functions.alone(shuffle=False))
