"""A run goes on with as many machines as there are."""

import threading
import time
from pathlib import Path

import kdist

import pytest

pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'kdist[ray]'")

import ray
from ray.cluster_utils import Cluster

from . import functions
from .runs import check, trainer

pytestmark = [pytest.mark.usefixtures("settings"), pytest.mark.long]


def test_fewer_machines_go_on(tmp_path: Path, float64: None) -> None:
    """A machine goes away; two of the three workers go on from the last checkpoint."""
    given = {"include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **given})
    away = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)

    def take_away() -> None:
        while not (tmp_path / "waiting").exists():
            time.sleep(0.2)
        cluster.remove_node(away, allow_graceful=False)
        (tmp_path / "done").touch()

    try:
        ray.init(address=cluster.address)
        threading.Thread(target=take_away, daemon=True).start()
        config = {"folder": str(tmp_path), "wait": True}
        given = {"train_loop_config": config, "max_failures": 3, "num_workers": (2, 3)}
        result = trainer(functions.trains, tmp_path, **given).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    saver = kdist.callbacks.ShardedCheckpoint(tmp_path / "alone", every_steps=2)
    check(result.return_value, functions.alone(callbacks=[saver]), 1e-9)
    assert (tmp_path / "starts-0").read_text().split() == ["3", "2"]
