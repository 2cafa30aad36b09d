"""Runs of the functions, and what they are compared with."""

from pathlib import Path
from typing import Any

import kdist

import numpy as np
import ray.train


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


def check(found: dict[str, Any], wanted: dict[str, Any], most: float = 1e-12) -> None:
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=most)
    for mine, other in zip(found["weights"], wanted["weights"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=most)
