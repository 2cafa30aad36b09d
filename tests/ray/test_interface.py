"""Ray is optional; what is refused of its settings."""

import subprocess
import sys

import kdist
from kdist._compat import ray_train
from kdist.cluster.sources import find

import pytest

WITHOUT = """
import sys
import kdist
assert not [name for name in sys.modules if name.split(".")[0] == "ray"], "Ray was imported"
sys.modules["ray"] = sys.modules["ray.train"] = None
try:
    kdist.ray
except ImportError as error:
    assert "pip install 'kdist[ray]'" in str(error), error
else:
    raise AssertionError("no error")
"""


def test_ray_is_imported_on_first_use_only() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_workers_of_another_trainer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find({}) is None
    monkeypatch.setattr(ray_train, "workers", lambda: 2)
    with pytest.raises(ValueError, match=r"with kdist.ray.Trainer .* 2 workers of another trainer"):
        find({})
    said = {"KDIST_COORDINATOR": "a:1", "KDIST_NUM_PROCESSES": "2", "KDIST_PROCESS_ID": "1"}
    place = find(said)
    assert place is not None and place.process == 1
    monkeypatch.setattr(ray_train, "workers", lambda: 1)
    assert find({}) is None


def test_split_datasets_are_refused() -> None:
    train = pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'kdist[ray]'")
    with pytest.raises(ValueError, match="no dataset is split among workers"):
        kdist.ray.Trainer(print, dataset_config=train.DataConfig())
    made = kdist.ray.Trainer(print)
    assert not ray_train.splits(made.data_config)
