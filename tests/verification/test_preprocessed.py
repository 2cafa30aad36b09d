"""Models that make something of a batch before their steps get it, as KerasHub's tasks do."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.preprocessed import preprocessed

import keras
import numpy as np
import pytest

RANDOM = np.random.default_rng(0)
TEXTS = np.array([" ".join(map(str, row)) for row in RANDOM.integers(0, 9, (6, 5))])
LABELS = RANDOM.normal(size=(6, 2))


class Task(keras.Model):
    """Reads texts as numbers, which its layers cannot."""

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        x = np.array([[float(word) for word in text.split()] for text in x])
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def fit(self, x: Any, y: Any, **kwargs: Any) -> Any:
        return super().fit(*self.preprocess_samples(x, y), **kwargs)

    def train_on_batch(self, x: Any, y: Any, **kwargs: Any) -> Any:
        return super().train_on_batch(*self.preprocess_samples(x, y), **kwargs)

    def predict_on_batch(self, x: Any, **kwargs: Any) -> Any:
        return super().predict_on_batch(self.preprocess_samples(x), **kwargs)


class OwnStep(Task):
    """With a step of its own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Learned(Task):
    """One that no configuration makes again."""

    def get_config(self) -> Any:
        raise NotImplementedError


def task(kind: type[Task] = Task, **config: Any) -> Task:
    inputs = keras.Input((5,))
    model = kind(inputs, keras.layers.Dense(2, name="last")(inputs))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), **config))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("kind", [Task, OwnStep, Learned])
def test_verify_takes_what_fit_takes(kind: type[Task]) -> None:
    report = kdist.verify(task(kind), TEXTS, LABELS)
    assert report.ok, report
    assert ("twin" in report.way) == (kind is not Learned), report.way


@pytest.mark.parametrize("kind", [Task, OwnStep])
def test_the_first_batch_of_fit_is_prepared_once(
    kind: type[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    task(kind, verify="first_step").fit(TEXTS, LABELS, batch_size=6, verbose=0)
    assert "verify='first_step'" in capsys.readouterr().out


class Packer(keras.layers.Layer):
    """Makes rows of texts, and is built when the first come."""

    def build(self, shape: Any) -> None:
        self.inside = keras.layers.Layer()


def _with_packer(layout_map: dict[str, Any] | None = None) -> Task:
    inputs = keras.Input((5,))
    model = Task(inputs, keras.layers.Dense(3, name="last")(inputs))
    model.preprocessor = Packer()
    mesh = kdist.mesh(data=2, model=2)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, layout_map=layout_map))
    return model


def test_layers_that_make_batches_need_not_be_built_for_a_plan() -> None:
    model = _with_packer({".*last/kernel": (None, None)})
    assert not model.preprocessor.built
    assert [w.path for w in model.plan().weights] == ["last/kernel", "last/bias"]


def test_layouts_are_refused_at_once_beside_layers_that_make_batches() -> None:
    with pytest.raises(ValueError, match="last/kernel"):
        _with_packer({".*last/kernel": (None, "model")})


def test_preprocessed() -> None:
    x, y, sample_weight = preprocessed(task(), TEXTS, LABELS, None)
    assert x.shape == (6, 5) and y is LABELS and sample_weight is None
    other = keras.Sequential([keras.layers.Dense(1)])
    assert all(
        a is b for a, b in zip(preprocessed(other, TEXTS, None, LABELS), (TEXTS, None, LABELS))
    )


def test_a_fit_of_the_models_own_is_called_where_it_prepares_nothing() -> None:
    calls: list[type] = []

    class Counting(keras.Model):
        def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(self))
            return super().train_on_batch(*args, **kwargs)

    inputs = keras.Input((5,))
    model = Counting(inputs, keras.layers.Dense(2)(inputs))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adam", "mse")
    assert kdist.verify(model, np.ones((4, 5)), np.ones((4, 2))).ok
    assert calls
