"""Settings of the process that kdist needs before anything is trained.

TensorFlow reads the DTensor ones from the environment each time it lowers a function, so they take
effect even if TensorFlow was imported, or its devices were started, before kdist.
"""

from __future__ import annotations

import os
import sys

from kdist._compat import dtensor_internals

import tensorflow as tf

COMBINER = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
THREADS = "TF_NUM_INTRAOP_THREADS"
FALLBACK_PREFIX = "DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF."


def prepare() -> None:
    """Sets the environment variables that kdist relies on; `import kdist` calls it.

    - `KERAS_BACKEND=tensorflow`.
    - DTensor's all-reduce combiner off: it moves reads and writes past each other, and the
      results are silently wrong.
    - DTensor's fallback on, for every operation of TensorFlow: an operation that DTensor cannot
      cut runs whole on every device instead of failing. A value that the user set stays.

    Raises:
        ValueError: If Keras runs, or is told to run, on another backend, or if the combiner is
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


def set_up_devices(cpu_devices: int | None = None, threads_per_op: int | None = None) -> None:
    """Makes the CPU devices of this process; see `kdist.init`.

    Raises:
        ValueError: See there.
    """
    if threads_per_op is not None:
        _check_threads(threads_per_op)
    grow_gpu_memory()
    if cpu_devices is None:
        _set_threads(threads_per_op)
        return
    if isinstance(cpu_devices, bool) or not isinstance(cpu_devices, int) or cpu_devices < 1:
        raise ValueError(
            "The number of logical CPU devices is an integer of at least 1, or None to leave them "
            f"as they are. Received: cpu_devices={cpu_devices!r}"
        )
    running = dtensor_internals.context_devices()
    if running == cpu_devices:
        _set_threads(threads_per_op)
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
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    if threads_per_op is None and not chosen and THREADS not in os.environ:
        threads_per_op = 1 if cpu_devices >= _cores() else None
    _set_threads(threads_per_op)


def grow_gpu_memory() -> None:
    """Has TensorFlow take memory of GPUs as it needs it, not all of it at the start.

    TensorFlow wants all of them alike: where the user has set one, or cut it into logical devices,
    all stay as they are. After the start nothing can be set any more.
    """
    gpus = tf.config.list_physical_devices("GPU")
    cut = [tf.config.get_logical_device_configuration(gpu) for gpu in gpus]
    given = [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus]
    if any(one is not None for one in (*cut, *given, dtensor_internals.context_devices())):
        return
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)


def _check_threads(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(
            "The number of threads per operation is an integer of at least 0, or None. "
            f"Received: threads_per_op={count!r}"
        )


def _set_threads(count: int | None) -> None:
    """Sets the threads of one operation, if a number is given."""
    now = tf.config.threading.get_intra_op_parallelism_threads()
    if count is None or count == now:
        return
    if dtensor_internals.context_devices() is not None:
        raise ValueError(
            f"TensorFlow has already started with {now} threads per operation (0: one per core); "
            "the number cannot change any more. Call kdist.init right after the imports. "
            f"Received: threads_per_op={count}"
        )
    tf.config.threading.set_intra_op_parallelism_threads(count)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
