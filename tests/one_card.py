"""One GPU that plays several: the suite's meshes over logical devices of the first card."""

import os

import tensorflow as tf

ASKED = "KDIST_TEST_GPUS"
MEMORY_MB = "KDIST_TEST_GPU_MB"


def cut_as_asked() -> None:
    """Cuts the first GPU into `KDIST_TEST_GPUS` logical devices of `KDIST_TEST_GPU_MB` (512) each.

    kdist takes GPUs before CPUs, so every mesh of the suite that names no devices is over them.
    Nothing is cut where the variable is not set.
    """
    count = int(os.environ.get(ASKED, "0"))
    if not count:
        return
    card = tf.config.list_physical_devices("GPU")[0]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=int(os.environ.get(MEMORY_MB, "512")))
    tf.config.set_logical_device_configuration(card, [part] * count)
