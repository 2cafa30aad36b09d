"""By which passes TensorFlow optimizes graphs of a step; what users have set is kept."""

import contextlib
import threading

import kdist
from kdist._compat import function_graphs, run_metadata
from kdist.graphs.instantiation import (
    instantiated_cheaply,
    optimized_as_ever,
    prepared_cheaply,
)
from kdist.runtime import by_shape

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

CPUS = ["/device:CPU:0", "/device:CPU:1"]
options = tf.config.optimizer


@contextlib.contextmanager
def user_settings(**given: bool):
    """Meanwhile, the user has set passes."""
    before = options.get_experimental_options()
    options.set_experimental_options(given)
    try:
        yield
    finally:
        usual = {name: name != "auto_mixed_precision_onednn_bfloat16" for name in given}
        options.set_experimental_options({name: before.get(name, usual[name]) for name in given})


def rewriting() -> RewriterConfig:
    """By which passes functions that are called now are optimized."""
    config = ConfigProto.FromString(function_graphs.configured())
    return config.graph_options.rewrite_options


def test_one_pass_is_left_on_cpu():
    with prepared_cheaply(CPUS):
        inside = rewriting()
    assert inside.remapping == inside.arithmetic_optimization == RewriterConfig.OFF
    assert inside.memory_optimization == RewriterConfig.NO_MEM_OPT
    assert inside.dependency_optimization == RewriterConfig.DEFAULT
    assert not inside.disable_meta_optimizer


def test_gpus_keep_all_passes():
    with user_settings(remapping=True), prepared_cheaply(["/device:GPU:0", "/device:GPU:1"]):
        assert rewriting().remapping == RewriterConfig.ON


@pytest.mark.parametrize("remapping", [True, False])
def test_what_the_user_has_set_is_set_again(remapping):
    with user_settings(remapping=remapping, constant_folding=not remapping):
        before = rewriting()
        with contextlib.suppress(ZeroDivisionError), prepared_cheaply(CPUS):
            raise ZeroDivisionError
        assert rewriting() == before
        after = options.get_experimental_options()
    assert after["remapping"] is remapping
    assert after["constant_folding"] is not remapping


def test_inside_of_both_all_can_be_as_the_user_has_set_it():
    with user_settings(remapping=False, constant_folding=True, dependency_optimization=False):
        before = rewriting()
        with prepared_cheaply(CPUS), instantiated_cheaply(CPUS):
            with optimized_as_ever():
                inside = rewriting()
            between = rewriting()
        after = rewriting()
    assert inside == after == before and before.constant_folding == RewriterConfig.ON
    assert between.disable_meta_optimizer and between.constant_folding == RewriterConfig.OFF
    assert between.dependency_optimization == RewriterConfig.OFF


@pytest.mark.parametrize("cheaply", [True, False])
def test_a_step_over_inner_axes_is_prepared_cheaply(cheaply, monkeypatch):
    """Remapping makes one operation of a product and its bias."""
    if not cheaply:
        monkeypatch.setattr(by_shape, "prepared_cheaply", lambda _: contextlib.nullcontext())
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(4)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2)))
    model.compile("sgd", "mse")
    x = np.ones((4, 6), "float32")
    graphs = run_metadata.function_graphs(lambda: model.predict_on_batch(x))
    kinds = {n.op for g in graphs for part in g.partition_graphs for n in part.node}
    assert ("BiasAdd" in kinds) == cheaply


@pytest.mark.parametrize(("replicas", "cheaply"), [(2, True), (1, False)])
def test_a_step_of_replicas_is_prepared_cheaply(replicas, cheaply):
    """And that of one device as Keras prepares its own."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=replicas)))
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    x, y = np.ones((4, 6), "float32"), np.ones((4, 4), "float32")
    seen = []
    apply = keras.optimizers.SGD.apply

    def noted(self, *arguments):
        seen.append(rewriting().memory_optimization == RewriterConfig.NO_MEM_OPT)
        return apply(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.optimizers.SGD, "apply", noted)
        model.train_on_batch(x, y)
    assert seen and {*seen} == {cheaply}


def test_what_is_set_meanwhile_stays():
    with user_settings(remapping=True):
        with prepared_cheaply(CPUS), instantiated_cheaply(CPUS):
            options.set_experimental_options({"remapping": False})
        assert rewriting().remapping == RewriterConfig.OFF


def test_each_thread_has_its_own():
    """What one thread has set before its step is not what another one gets in its own."""
    found = []

    def other():
        with user_settings(shape_optimization=False), prepared_cheaply(CPUS), optimized_as_ever():
            found.append(rewriting().shape_optimization)

    with prepared_cheaply(CPUS):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [RewriterConfig.OFF]


def test_passes_that_change_results_run_in_what_devices_call():
    with user_settings(auto_mixed_precision_onednn_bfloat16=True), instantiated_cheaply(CPUS):
        assert not rewriting().disable_meta_optimizer
    with instantiated_cheaply(CPUS):
        assert rewriting().disable_meta_optimizer


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}, {"pipe": 2}], ids=str)
def test_mixed_precision_by_an_option(axes):
    """Products are of 16 bits where those of plain Keras are, which is the processor's to say."""

    def outputs(mesh, mixed):
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(16, "relu"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((16,)), *hidden])
        if mesh:
            stages = kdist.PipelineConfig(micro_batches=2) if "pipe" in mesh else None
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**mesh), pipeline=stages))
        model.compile("sgd", "mse")
        with user_settings(auto_mixed_precision_onednn_bfloat16=mixed):
            return model.predict_on_batch(np.linspace(-1, 1, 64).reshape(4, 16))

    exact = outputs({}, False)
    in_16_bits = np.abs(exact - outputs({}, True)).max() > 1e-4
    assert (np.abs(exact - outputs(axes, True)).max() > 1e-4) == in_16_bits
    np.testing.assert_allclose(outputs(axes, False), exact, rtol=1e-5, atol=1e-6)
