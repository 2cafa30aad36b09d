"""`fit`, `evaluate`, `predict` and their forms per batch equal plain Keras."""

from __future__ import annotations

import numpy as np
import pytest

from ..parity import (
    MESHES,
    assert_close,
    assert_same_weights,
    compile_all,
    data,
    everywhere,
    fit_all,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
DATA, INNER = MESHES


def test_compile_fit_evaluate_predict():
    models = everywhere()
    compile_all(models)
    fit_all(models, lambda: data(22), batch_size=8, epochs=2)
    x, y = data(22)
    results = [m.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) for m in models]
    assert list(results[0]) == list(results[1]) == list(results[2])
    assert_close(*results)
    assert_close(*[m.predict(x, batch_size=8, verbose=0) for m in models])


def test_evaluate_and_predict_before_fit():
    models = everywhere()
    compile_all(models)
    x, y = data(10)
    assert_close(*[m.predict(x, batch_size=4, verbose=0) for m in models])
    assert_close(*[m.evaluate(x, y, batch_size=4, verbose=0) for m in models])
    assert not any(m.optimizer.built for m in models)  # it has state of no use
    fit_all(models, lambda: (x, y), batch_size=8)


def test_predict_without_compile():
    x, _ = data(10)
    assert_close(*[m.predict(x, verbose=0) for m in everywhere()])


def test_batch_methods():
    models = everywhere()
    compile_all(models)
    x, y = data(10)
    for _ in range(2):
        assert_close(*[m.train_on_batch(x, y, return_dict=True) for m in models])
    assert_close(*[m.test_on_batch(x, y) for m in models])
    assert_close(*[m.predict_on_batch(x) for m in models])
    assert_same_weights(*models)


def test_train_on_batch_weights():
    models = everywhere()
    compile_all(models)
    x, y = data(10)
    weight = np.linspace(0.5, 2.0, 10)
    assert_close(*[m.train_on_batch(x, y, sample_weight=weight) for m in models])
    assert_close(*[m.test_on_batch(x, y, sample_weight=weight) for m in models])
    assert_same_weights(*models)


def test_rows_fewer_than_replicas():
    models = pair(DATA)
    compile_all(models)
    x, y = data(2)
    fit_all(models, lambda: (x, y), epochs=2)
    assert_close(*[m.predict(x, verbose=0) for m in models])


def test_fit_twice_goes_on():
    models = pair(DATA)
    compile_all(models)
    fit_all(models, batch_size=8)
    fit_all(models, lambda: data(16), batch_size=8, epochs=3, initial_epoch=1)


def test_summary_shows_whole_shapes():
    plain, parallel = pair(INNER)
    texts = []
    for model in (plain, parallel):
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        texts.append("\n".join(map(str, lines)))
    assert texts[0] == texts[1]
    assert "83" in texts[1]
