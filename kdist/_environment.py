"""Settings of the process that kdist needs before anything is trained.

TensorFlow reads the DTensor ones from the environment each time it lowers a function, so they take
effect even if TensorFlow was imported, or its devices were started, before kdist.
"""

from __future__ import annotations

import os
import sys

from kdist import _private_dtensor

import tensorflow as tf

COMBINER = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
FALLBACK_PREFIX = "DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF."


def prepare() -> None:
    """Sets the environment variables that kdist relies on; `import kdist` calls it.

    - `KERAS_BACKEND=tensorflow`.
    - DTensor's all-reduce combiner off: it moves reads and writes past each other, and the
      results are silently wrong.
    - DTensor's fallback on, for every operation of TensorFlow: an operation that DTensor cannot
      cut runs whole on every device instead of failing. A value that the user set stays.

    Raises:
        ValueError: if Keras runs, or is told to run, on another backend, or if the combiner is
            switched on.
    """
    _check_backend()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    combiner = os.environ.setdefault(COMBINER, "0")
    if combiner != "0":
        raise ValueError(
            "DTensor's all-reduce combiner gives silently wrong results and must be off: unset "
            f"{COMBINER}, or set it to exactly '0'. Received: {COMBINER}={combiner!r}"
        )
    # One variable an operation; all of them together take a few milliseconds.
    for operation in _operations():
        os.environ.setdefault(FALLBACK_PREFIX + operation.upper(), "1")


def init(cpu_devices: int | None = None) -> None:
    """Prepares the devices of this process. Call it before the first tensor is made.

    Args:
        cpu_devices: number of logical CPU devices to make out of the machine's processor, so that
            a mesh fits on a laptop. None leaves the devices as they are; GPUs are found by
            themselves.

    Raises:
        ValueError: if the number is not an integer of at least 1, or if TensorFlow has already
            started with another number of CPU devices. The same number again is fine.

    Example:
    ```python
    import kdist

    kdist.init(cpu_devices=8)
    mesh = kdist.mesh(data=2, model=4)
    ```
    """
    if cpu_devices is None:
        return
    if isinstance(cpu_devices, bool) or not isinstance(cpu_devices, int) or cpu_devices < 1:
        raise ValueError(
            "The number of logical CPU devices is an integer of at least 1, or None to leave them "
            f"as they are. Received: cpu_devices={cpu_devices!r}"
        )
    running = _private_dtensor.context_devices()
    if running == cpu_devices:
        return
    if running is not None:
        raise ValueError(
            f"TensorFlow has already started with {running} CPU device{'s' * (running != 1)}; the "
            "number cannot change any more. Call kdist.init right after the imports, before any "
            f"tensor, variable or layer is made. Received: cpu_devices={cpu_devices}"
        )
    processor = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(cpu_devices)]
    tf.config.set_logical_device_configuration(processor, logical)


def _check_backend() -> None:
    """Refuses every Keras backend but TensorFlow."""
    fix = "Set KERAS_BACKEND=tensorflow before keras is imported, or import kdist first"
    keras = sys.modules.get("keras")
    # A keras that is just being imported has no `config` yet.
    if keras is not None and hasattr(keras, "config"):
        backend = keras.config.backend()
        if backend != "tensorflow":
            raise ValueError(
                "kdist runs on Keras's TensorFlow backend, and keras has been imported with "
                f"another. {fix}. Received: backend={backend!r}"
            )
        return
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    if wanted != "tensorflow":
        raise ValueError(
            "kdist runs on Keras's TensorFlow backend, and the environment asks for another. "
            f"{fix}. Received: KERAS_BACKEND={wanted!r}"
        )


def _operations() -> list[str]:
    """Names of TensorFlow's operations."""
    return [name for name in dir(tf.raw_ops) if name[0].isupper()]
