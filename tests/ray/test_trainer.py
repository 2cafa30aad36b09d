"""Ray Train's workers are one program, whose failures Ray mends."""

from pathlib import Path
from typing import Any

import kdist

import numpy as np
import pytest

pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'kdist[ray]'")

import ray.train

from . import functions

pytestmark = [pytest.mark.usefixtures("started"), pytest.mark.long]


def trainer(function: Any, folder: Path, **named: Any) -> kdist.ray.Trainer:
    failures = ray.train.FailureConfig(max_failures=named.pop("max_failures", 0))
    return kdist.ray.Trainer(
        function,
        scaling_config=ray.train.ScalingConfig(num_workers=named.pop("num_workers", 2)),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "storage"), failure_config=failures
        ),
        **named,
    )


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=1e-12)
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kill", [None, 1, 0])
def test_training_that_is_killed_equals_one_that_is_not(
    kill: int | None, tmp_path: Path, float64: None
) -> None:
    config = {"folder": str(tmp_path)} | ({} if kill is None else {"kill": kill})
    given = {"train_loop_config": config, "max_failures": 1}
    result = trainer(functions.trains, tmp_path, **given).fit()
    saver = kdist.callbacks.ShardedCheckpoint(tmp_path / "alone", every_steps=2)
    check(result.return_value, functions.alone([saver]))
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in (0, 1)]
    assert starts == [["2"] * (1 if kill is None else 2)] * 2
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
