"""Serves what was exported by plain TensorFlow, in a fresh process, without kdist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .exports import ROWS, TEXT

SERVE = """
import sys, json, numpy as np, tensorflow as tf
folder, exports, rows = sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
text = tf.constant(np.load(folder + "/text.npy"))
there = tf.saved_model.LoadOptions(experimental_variable_policy="save_variable_devices")
for one in exports:
    found, at, name = {}, f"{folder}/{one}", one.rsplit("-", 1)[0]
    try:
        served = tf.saved_model.load(at, options=there)
        for n in rows:
            x = tf.constant(np.load(f"{folder}/{name}-{n}.npy"))
            found[str(n)] = tf.cast(served.serve(x), tf.float32).numpy()
        (default,) = served.signatures["serving_default"](x).values()
        found["default"] = tf.cast(default, tf.float32).numpy()
        found["words"] = tf.cast(served.words(text), tf.float32).numpy()
        found["where"] = json.dumps(
            [[v.device[-1:], [*v.shape]] for v in served._all_variables])
    except Exception as error:
        found["error"] = repr(error)
    np.savez(at + ".npz", **found)
assert not any(m.split(".")[0] == "kdist" for m in sys.modules)
"""


def in_a_fresh_process(folder: Path, exports: Sequence[str], rows: Sequence[int] = ROWS) -> None:
    """Serves exports of a folder, each as model and way, and writes what they give."""
    np.save(folder / "text.npy", TEXT)
    given = [sys.executable, "-c", SERVE, str(folder), ",".join(exports), str(list(rows))]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        given, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def compare(folder: Path, name: str, way: str, expected: dict[str, np.ndarray]) -> Any:
    """Compares what was served with what was expected; devices and shapes of its variables."""
    with np.load(folder / f"{name}-{way}.npz") as served:
        assert "error" not in served.files, str(served["error"])
        for key in (*map(str, ROWS), "words"):
            want = np.asarray(expected[f"{way}-{key}"], "float32")
            np.testing.assert_allclose(served[key], want, rtol=1e-6, atol=1e-6, err_msg=key)
        np.testing.assert_array_equal(served["default"], served[str(ROWS[-1])])
        return json.loads(str(served["where"]))
