"""What a user sees on stderr: nothing routine, and everything else."""

import os
import pathlib
import subprocess
import sys

PROGRAM = r"""
import os
import kdist
from kdist.display.notices import without_notices
import keras, numpy as np, tensorflow as tf

kdist.init(cpu_devices=4)
of_no_layer = tf.Variable(1.0)
for middle in (keras.layers.Dense(4, name="up"), keras.layers.Lambda(lambda x: x * of_no_layer)):
    model = keras.Sequential([keras.Input((4,)), middle, keras.layers.Dense(2, name="head")])
    cut = {".*head/kernel": ("model", None)}
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cut)
    kdist.parallelize(model, config).compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)

with without_notices():
    os.write(2, b"I0000 00:00:1.5 7 dtensor_device.cc:1622] DTensor cache key lookup missed for "
             b"__inference_f_1. DTensor is (re-)computing its SPMD transformation.\n")
    os.write(2, b"E0000 00:00:1.5 7 some.cc:1] DTensor cache key lookup missed for a reason\n")
    try:
        tf.io.decode_bmp(b"BM" + bytes(60))
    except tf.errors.InvalidArgumentError:
        pass
tf.get_logger().warning("a warning of TensorFlow's")


@tf.function
def unknown(x):
    "A body that AutoGraph cannot write again."


unknown(tf.constant(1.0))
print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), tf.get_logger().getEffectiveLevel())
"""


def test_training_says_nothing_routine_and_hides_nothing_else(tmp_path: pathlib.Path) -> None:
    """On an inner mesh over DTensor, and on gathered weights."""
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    file = tmp_path / "program.py"  # AutoGraph reads the source
    file.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["None", "30"]
    assert "DTensor cache key lookup missed for __" not in run.stderr
    own = [line for line in run.stderr.splitlines() if "AutoGraph could not transform" in line]
    assert own
    assert all("<function unknown at" in line for line in own)
    assert "DTensor cache key lookup missed for a reason" in run.stderr
    assert "Local rendezvous is aborting" in run.stderr
    assert "a warning of TensorFlow's" in run.stderr
    assert "runs on gathered weights" in run.stderr


DYING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import notices
with notices.without_notices():
    os.write(2, b"the last words\\n")
    os.abort()
"""


def test_what_a_dying_process_says_comes_through() -> None:
    """The filter outlives it."""
    import kdist.display.notices

    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    folder = os.path.dirname(kdist.display.notices.__file__)
    run = subprocess.run(
        [sys.executable, "-S", "-c", DYING, folder], env=env, capture_output=True, timeout=60
    )
    assert run.returncode < 0
    assert b"the last words" in run.stderr
