"""Every internal behind `kdist._compat.learning_rates` is there and does what is expected."""

from __future__ import annotations

import gc
import weakref

from kdist._compat import learning_rates

import keras
import tensorflow as tf

from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(learning_rates, __file__) == []


def test_adopt_learning_rate():
    source, reader = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.1)
    learning_rates.adopt_learning_rate(reader, source)
    source.learning_rate = 0.25
    assert float(reader.learning_rate) == 0.25
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    learning_rates.adopt_learning_rate(reader, keras.optimizers.SGD(schedule))
    assert float(reader.learning_rate) == 1.0


def test_fixed_learning_rate():
    optimizer = keras.optimizers.SGD(0.5)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    own = optimizer._learning_rate
    rate = learning_rates.LearningRate(optimizer)()
    with learning_rates.fixed_learning_rate(optimizer, rate):
        own.assign(100.0)
        assert float(optimizer.learning_rate) == 0.5
        optimizer.apply([tf.constant(1.0)], [variable])
    assert float(variable) == 0.5
    assert optimizer._learning_rate is own
    assert float(optimizer.learning_rate) == 100.0


def test_the_rate_of_a_schedule_is_that_of_a_plain_graph():
    """TensorFlow rounds it otherwise in a graph than op by op, or in one that it does not fold."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.7)
    optimizer = keras.optimizers.SGD(schedule)
    rate = learning_rates.LearningRate(optimizer)
    plain = tf.function(lambda: schedule(optimizer._iterations), autograph=False)
    by_hand = tf.function(lambda: tf.identity(rate()), autograph=False)
    differs = 0
    for step in range(9):
        optimizer._iterations.assign(step)
        assert plain() == by_hand()
        differs += bool(rate() != plain())
    assert differs, "the schedule cannot tell"
    with learning_rates.fixed_learning_rate(optimizer, None):
        assert optimizer._learning_rate is schedule


def test_what_a_schedule_reads_in_python_is_read_in_each_trace():
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    optimizer._iterations.assign(1)
    rate = learning_rates.LearningRate(optimizer)
    assert tf.function(lambda: rate() + rate())() == 1.0
    schedule.decay_rate = 0.25
    assert tf.function(lambda: rate())() == 0.25
    graphs = [weakref.ref(graph) for graph in rate._functions]
    gc.collect()
    assert all(graph() is None for graph in graphs)


def test_is_rate_of():
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([keras.Variable(1.0)])
    rates = [learning_rates.is_rate_of(optimizer, one) for one in optimizer.variables]
    assert rates.count(True) == 1 and float(optimizer.variables[rates.index(True)]) == 0.5


def test_config_without_rate():
    """Keras calls `get_config` of what a schedule is, if that is no variable."""

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 1.0

    optimizer = keras.optimizers.SGD(Schedule(), momentum=0.5)
    own = optimizer._learning_rate
    config = learning_rates.config_without_rate(optimizer)
    assert (config["learning_rate"], config["momentum"]) == (0.0, 0.5)
    assert optimizer._learning_rate is own
