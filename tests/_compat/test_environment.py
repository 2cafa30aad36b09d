import os
import subprocess
import sys
import textwrap
import types

import kdist
from kdist._compat import environment

import keras
import pytest
import tensorflow as tf


def long(*values: object):
    return pytest.param(*values, marks=pytest.mark.long)


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process, without what this process has set."""
    ours = ("DTENSOR_", "KERAS_BACKEND", "TF_NUM_INTRAOP_THREADS")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    clean |= {"TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_sets_the_environment():
    assert os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] == "0"
    assert os.environ["DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.REVERSEV2"] == "1"
    assert os.environ["KERAS_BACKEND"] == "tensorflow" == keras.config.backend()


def test_a_value_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.REVERSEV2", "yes")
    environment.prepare()
    assert os.environ["DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.REVERSEV2"] == "yes"


def test_a_combiner_that_is_on_is_refused(monkeypatch):
    monkeypatch.setenv(environment.COMBINER, "1")
    with pytest.raises(ValueError, match=r"silently wrong.*unset.*Received.*'1'"):
        environment.prepare()


def test_the_settings_work_after_tensorflow_has_started():
    # Without the fallback, reversing fails; with the combiner, the two sums become one collective.
    code = """
        import tensorflow as tf
        import keras
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        tf.constant(1.0) + 1.0
        from kdist._compat import environment
        environment.prepare()
        from kdist.dtensor.lowered import collectives, record
        from tensorflow.experimental import dtensor
        mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
        layout = dtensor.Layout(["model", "unsharded"], mesh)
        x = dtensor.pack([tf.ones((2, 4))] * 2, layout)
        tf.function(lambda x: tf.reverse(x, [0]))(x)
        program = tf.function(lambda x: (tf.reduce_sum(x), tf.reduce_sum(x * x)))
        with record() as recorder:
            program(x)
        print("reductions:", len(collectives(recorder, mesh)))
    """
    result = run(code)
    assert "reductions: 2" in result.stdout, result.stderr[-2000:]


def test_another_backend_is_refused():
    result = run("import kdist", KERAS_BACKEND="jax")
    assert result.returncode != 0
    assert "TensorFlow backend" in result.stderr and "='jax'" in result.stderr


def test_keras_of_another_backend_is_refused(monkeypatch):
    # Stands for a keras imported with JAX, which need not be installed here.
    fake = types.ModuleType("keras")
    fake.config = types.SimpleNamespace(backend=lambda: "jax")
    monkeypatch.setitem(sys.modules, "keras", fake)
    with pytest.raises(ValueError, match="(?s)TensorFlow backend.*='jax'"):
        environment._check_backend()


def test_init_again_with_the_same_number_is_fine():
    count = len(tf.config.list_logical_devices("CPU"))
    kdist.init(cpu_devices=count)
    kdist.init()
    assert len(tf.config.list_logical_devices("CPU")) == count


def test_init_after_the_start_with_another_number_is_refused():
    tf.constant(0.0)
    with pytest.raises(ValueError, match=r"already started with 8 CPU devices.*Received.*=3"):
        kdist.init(cpu_devices=3)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "8"])
def test_init_refuses_other_than_a_positive_integer(count):
    with pytest.raises(ValueError, match="integer of at least 1.*Received: cpu_devices="):
        kdist.init(cpu_devices=count)


def test_init_makes_the_devices():
    result = run(
        "import kdist, tensorflow as tf\n"
        "kdist.init(cpu_devices=5)\n"
        "print('devices:', len(tf.config.list_logical_devices('CPU')))"
    )
    assert "devices: 5" in result.stdout, result.stderr[-2000:]


def threads(call: str, before: str = "", **environment: str) -> str:
    """What `init` makes of the threads of an operation, as TensorFlow was told."""
    result = run(
        f"""
        import os
        import kdist, tensorflow as tf
        threading = tf.config.threading
        {before}
        {call}
        tf.constant(1.0) + 1.0
        print("threads:", threading.get_intra_op_parallelism_threads())
        """,
        **environment,
    )
    assert "threads:" in result.stdout, result.stderr[-2000:]
    return result.stdout.split("threads:")[1].strip()


@pytest.mark.parametrize(
    ("call", "before", "environment", "expected"),
    [
        ("kdist.init(cpu_devices=99)", "", {}, "1"),
        ("kdist.init(cpu_devices=99, threads_per_op=3)", "", {}, "3"),
        long("kdist.init(cpu_devices=1)", "os.sched_getaffinity = lambda pid: {0, 1}", {}, "0"),
        long("kdist.init(threads_per_op=2)", "", {}, "2"),
        long(
            "kdist.init(cpu_devices=99)",
            "threading.set_intra_op_parallelism_threads(5)",
            {},
            "5",
        ),
        ("kdist.init(cpu_devices=99)", "", {"TF_NUM_INTRAOP_THREADS": "2"}, "0"),
    ],
)
def test_threads_of_an_operation(call, before, environment, expected):
    assert threads(call, before, **environment) == expected


@pytest.mark.parametrize("count", [-1, True, 2.0])
def test_init_refuses_other_threads(count):
    with pytest.raises(ValueError, match="integer of at least 0.*Received: threads_per_op="):
        kdist.init(threads_per_op=count)


def test_threads_cannot_change_after_the_start():
    tf.constant(0.0)
    with pytest.raises(ValueError, match="already started with .* threads.*threads_per_op=7"):
        kdist.init(threads_per_op=7)


@pytest.mark.parametrize(
    ("given", "running", "expected"),
    [
        ([None, None], None, [True, True]),
        ([None, False], None, []),
        ([None, None], 4, []),
    ],
)
def test_memory_of_gpus_grows(monkeypatch, given, running, expected):
    """With TensorFlow's discovery replaced."""
    gpus, made = [f"GPU:{n}" for n in range(len(given))], []
    config = environment.tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: None)
    growth = dict(zip(gpus, given))
    monkeypatch.setattr(config.experimental, "get_memory_growth", growth.get)
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda gpu, on: made.append(on))
    monkeypatch.setattr(environment.dtensor_internals, "context_devices", lambda: running)
    environment.grow_gpu_memory()
    assert made == expected
