"""From any mesh, level and placement to any other: the state to the bit, and the losses after."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import kdist
from kdist.api.attached import attached
from kdist.checkpoint import store, variables
from kdist.checkpoint.manifest import STORE
from kdist.optimizer.logical_slots import SlotParts
from kdist.storage import unborn
from kdist.storage.variables import parts_of

import keras
import numpy as np
import pytest

from ..equivalence.harness import precision
from ..equivalence.matrix import product, spread
from .kinds import KINDS, VOCABULARY, Kind, adam, build_frozen, build_tied, split, state, train
from .runs import bytes_read

NAMES = tuple(KINDS)
DEFAULT = [
    ("plain", "data2-model2-level3"),
    ("data3-level1", "split-model"),
    ("data4-level2", "plain"),
    ("data2-model2-level3", "data3-level1"),
    ("pipe2-data2-level1", "data4-level3"),
    ("split-model", "host-table"),
    ("pipe2-interleaved", "state-host"),
    ("state-host", "pipe4-zero-bubble"),
    ("pipe4-zero-bubble", "global"),
    ("global", "pipe2-interleaved"),
]


@pytest.fixture(autouse=True)
def float64():
    with precision("float64"):
        yield


@functools.cache
def run(name: str):
    """A checkpoint after an epoch; the state then; the losses of the next epoch."""
    model = KINDS[name].model()
    train(model, 1)
    directory = tempfile.mkdtemp()
    kdist.checkpoint.save(model, directory)
    return Path(directory), state(model), train(model, 1)


@pytest.mark.parametrize(("source", "target"), spread(product(NAMES, NAMES), DEFAULT))
def test_training_goes_on_anywhere(source, target):
    directory, saved, losses = run(source)
    model = KINDS[target].model()
    restored = kdist.checkpoint.restore(model, directory)
    assert restored.step == 4
    for a, b in zip(saved, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(train(model, 1), losses, rtol=1e-9)


def _lazy_adagrad():
    """A table with an optimizer of its own, which touches the rows that a batch looks up."""
    rules = {".*table/embeddings": kdist.lazy(keras.optimizers.Adagrad(0.1))}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(adam(), rules))


LAZY = ("plain", "host-table", "split-data", "pipe2-data2-level1", "data4-level3")
LAZY_DEFAULT = [("host-table", "split-data"), ("data4-level3", "plain")]


@pytest.mark.parametrize(("source", "target"), spread(product(LAZY, LAZY), LAZY_DEFAULT))
def test_tables_with_optimizers_of_their_own_go_on_anywhere(source, target, tmp_path):
    kinds = [dataclasses.replace(KINDS[n], optimizer=_lazy_adagrad) for n in (source, target)]
    goes_on(*kinds, tmp_path)


TIED = ("plain", "data4-level3", "data2-model2", "pipe2-data2-level1", "pipe2-interleaved")
TIED_DEFAULT = [("pipe2-data2-level1", "data4-level3"), ("data2-model2", "pipe2-interleaved")]


@pytest.mark.parametrize(("source", "target"), spread(product(TIED, TIED), TIED_DEFAULT))
def test_a_weight_of_both_ends_goes_on_anywhere(source, target, tmp_path):
    goes_on(*(dataclasses.replace(KINDS[n], build=build_tied) for n in (source, target)), tmp_path)


AT_LEVELS = ("plain", "data4-level3", "data2-model2-level3", "pipe2-data2-level1", "data3-level1")
FROZEN_DEFAULT = [("data4-level3", "data2-model2-level3"), ("plain", "data4-level3")]


@pytest.mark.parametrize(
    ("source", "target"), spread(product(AT_LEVELS, AT_LEVELS), FROZEN_DEFAULT, quick=1)
)
def test_what_does_not_train_goes_on_anywhere(source, target, tmp_path):
    goes_on(
        *(dataclasses.replace(KINDS[n], build=build_frozen) for n in (source, target)), tmp_path
    )


CODED = ("data2-model2", "data3-level1", "data4-level3", "pipe2-data2-level1")
CODED_DEFAULT = [("data3-level1", "data4-level3")]


@pytest.mark.parametrize(("source", "target"), spread(product(CODED, CODED), CODED_DEFAULT))
def test_16_bit_moments_go_on_anywhere(source, target, tmp_path):
    """Their values are saved, which their formats have; so they come back to the bit."""
    coded = {"state_format": kdist.StateFormatConfig(first="1-6-9", second="0-6-10")}
    kinds = [dataclasses.replace(KINDS[name], state=coded) for name in (source, target)]
    goes_on(*kinds, tmp_path)


def goes_on(source, target, directory):
    """The state of one kind goes to another, to the bit, and then the losses are equal."""
    model, again = source.model(), target.model()
    train(model, 1)
    kdist.checkpoint.save(model, directory)
    saved, losses = state(model), train(model, 1)
    kdist.checkpoint.restore(again, directory)
    for a, b in zip(saved, state(again), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(train(again, 1), losses, rtol=1e-9)


def test_more_is_read_than_is_held_ahead(monkeypatch):
    """As of a model of more than 256 MiB: reads are taken up while others begin."""
    monkeypatch.setattr(variables, "AHEAD_BYTES", 300)
    directory, saved, _ = run("data4-level2")
    model = KINDS["data2-model2"].model()
    kdist.checkpoint.restore(model, directory)
    for a, b in zip(saved, state(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_slots_are_read_as_parts_before_the_first_step(monkeypatch):
    """No slot is whole for a moment, and the step that follows finds them in their places."""
    directory, _, losses = run("data4-level3")
    model = KINDS["data4-level3"].model()
    made = unborn.Unborn.made
    whole = []
    monkeypatch.setattr(unborn.Unborn, "made", lambda self: whole.append(self) or made(self))
    kdist.checkpoint.restore(model, directory)
    assert not whole
    read = count_reads(monkeypatch)
    np.testing.assert_allclose(train(model, 1), losses, rtol=1e-9)
    assert not read
    slots = [v for v in model.optimizer.variables if v.shape.rank == 2]
    assert slots
    for slot in slots:
        assert len({str(part.index) for part in parts_of(slot)}) > 1


def count_reads(monkeypatch):
    """Notes slots that are put together from their parts."""
    read, whole = [], SlotParts.whole
    monkeypatch.setattr(SlotParts, "whole", lambda self: read.append(self) or whole(self))
    return read


def test_a_model_that_trains_already_goes_back():
    """Local optimizers, rows and vectors of buckets exist by then."""
    directory, saved, losses = run("data4-level2")
    model = KINDS["data2-model2-level3"].model()
    train(model, 2)
    kdist.checkpoint.restore(model, directory)
    for a, b in zip(saved, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(train(model, 1), losses, rtol=1e-9)


def test_each_part_is_written_once_and_what_a_device_needs_is_read_once():
    """At level 3 on two by two devices, no file has a copy, and nothing is read twice."""
    model = KINDS["data2-model2-level3"].model()
    train(model, 1)
    directory = tempfile.mkdtemp()
    folder = kdist.checkpoint.save(model, directory)
    manifest = kdist.checkpoint.directory.load(folder)
    for _, array in manifest.arrays:
        assert sum(np.prod(p.shape, dtype=int) for p in array.parts) == array.elements
    kernel = next(a for a in manifest.groups["model"] if a.path == "up/kernel")
    assert {part.shape for part in kernel.parts} == {(4, 16)}


def wide(level: int) -> keras.Model:
    """Kernels that are large beside what else a checkpoint has to say."""
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(256, name=f"wide{n}") for n in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers], name="wide")
    mesh = kdist.mesh(data=2, model=2)
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    layouts = {".*kernel": (None, "model")}
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=mesh, layout_map=layouts, optimizer=optimizer)
    )
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("level", [0, 3])
def test_bytes_written_and_read_are_those_of_the_parts(tmp_path, level):
    model = wide(3)
    x = np.ones((8, 256))
    model.fit(x, x, verbose=0)
    folder = kdist.checkpoint.save(model, tmp_path)
    manifest = kdist.checkpoint.directory.load(folder)
    arrays = sum(
        a.elements * store.dtype_of(a.dtype).itemsize
        for group in ("model", "optimizer")
        for a in manifest.groups[group]
    )
    files = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert arrays < files < 1.05 * arrays
    other = wide(level)
    before = bytes_read()
    kdist.checkpoint.restore(other, tmp_path)
    assert arrays < bytes_read() - before < 1.05 * arrays


@pytest.mark.parametrize("axis", ["model", "data"])
def test_a_table_of_which_one_device_has_all_rows_comes_back(axis, tmp_path):
    """Its part is the whole, and yet no copy beside parts."""
    rows = {"data": 2, "model": 2}, 1, True
    alone = Kind(*rows, declare=split(axis, (0, VOCABULARY)))
    goes_on(alone, KINDS["plain"], tmp_path / "from")
    goes_on(KINDS["plain"], alone, tmp_path / "to")
    goes_on(alone, Kind(*rows, declare=split(axis, (VOCABULARY, 0))), tmp_path / "other")


def test_loss_scale_comes_back(tmp_path):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            adam(), initial_scale=64.0, dynamic_growth_steps=3
        )

    kinds = [Kind({"data": 2}, 1, optimizer=scaled), Kind({"data": 4}, 3, optimizer=scaled)]
    goes_on(*kinds, tmp_path)


def test_compressed_gradients_go_on_with_what_they_had_not_sent():
    def compressed():
        return {
            "compression": kdist.CompressionConfig(patterns={".*kernel": kdist.PowerSGD(rank=2)})
        }

    kind = Kind({"data": 3}, config=compressed)
    others = Kind({"data": 4}, 1, config=compressed), Kind({"data": 2}, 3, config=compressed)
    model = kind.model()
    train(model, 1)
    directory = tempfile.mkdtemp()
    kdist.checkpoint.save(model, directory)
    losses = train(model, 1)
    for other, trained in ((kind, False), (others[0], True), (others[1], False)):
        same = other.model()
        if trained:
            train(same, 1)
        kdist.checkpoint.restore(same, directory)
        np.testing.assert_allclose(train(same, 1), losses, rtol=1e-9)


def not_sent(model):
    """By number of the weight, the sum of what replicas have not sent of its gradients."""
    found = {}
    weights = model.trainable_variables
    position = {id(v): n for n, v in enumerate(weights)}
    for (variable, start), kept in attached(model).low_rank.items():
        n = position[variable]
        total = found.setdefault(n, np.zeros(weights[n].shape))
        box = tuple(slice(a, a + size) for a, size in zip(start, kept.shape))
        total[box] += sum(one.numpy() for one in kept.errors.values()).reshape(kept.shape)
    return found


def powers(rank, pattern=".*kernel"):
    """Options of a kind."""
    power = kdist.PowerSGD(rank=rank)
    return lambda: {"compression": kdist.CompressionConfig(patterns={pattern: power})}


UNSENT = {
    "data3": Kind({"data": 3}, config=powers(2)),
    "inner": Kind({"data": 2, "model": 2}, 3, layouts=True, config=powers(2)),
    "rank1": Kind({"data": 2}, config=powers(1)),
}


@pytest.mark.parametrize(
    ("source", "target"), [("data3", "inner"), ("inner", "data3"), ("inner", "rank1")]
)
def test_what_was_not_sent_is_cut_as_weights_are(source, target, tmp_path):
    model = UNSENT[source].model()
    train(model, 1)
    kdist.checkpoint.save(model, tmp_path)
    other = UNSENT[target].model()
    train(other, 1)
    with pytest.warns(UserWarning, match="had not sent yet goes on"):
        kdist.checkpoint.restore(other, tmp_path)
    before, after = not_sent(model), not_sent(other)
    assert before.keys() == after.keys() and any(np.abs(v).max() > 1e-4 for v in before.values())
    for n, total in before.items():
        np.testing.assert_allclose(after[n], total, rtol=1e-12, atol=1e-15)
    train(other, 1)


def test_what_was_not_sent_of_other_gradients_is_dropped(tmp_path):
    model = UNSENT["data3"].model()
    train(model, 1)
    kdist.checkpoint.save(model, tmp_path)
    other = Kind({"data": 3}, config=powers(2, "up/kernel")).model()
    train(other, 1)
    with pytest.warns(UserWarning, match="compression begins anew"):
        kdist.checkpoint.restore(other, tmp_path)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_not_sent_of_a_frozen_layer_is_left_out(compiled, tmp_path):
    def frozen():
        model = UNSENT["data3"].model()
        train(model, 1)
        model.get_layer("up").trainable = False
        if compiled:
            model.compile(adam(), "mse", metrics=["mae"])
        else:
            train(model, 1)
        return model

    model, other = frozen(), frozen()
    kdist.checkpoint.save(model, tmp_path)
    kdist.checkpoint.restore(other, tmp_path)
    np.testing.assert_allclose(train(other, 1), train(model, 1), rtol=1e-9)


def test_another_model_is_refused_and_stays_as_it_was():
    directory, *_ = run("plain")
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    other.compile("adam", "mse")
    before = other.get_weights()
    with pytest.raises(kdist.checkpoint.CheckpointError, match="another one"):
        kdist.checkpoint.restore(other, directory)
    for a, b in zip(before, other.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_a_damaged_checkpoint_gives_way_to_the_one_before():
    model = KINDS["data4"].model()
    train(model, 1)
    directory = tempfile.mkdtemp()
    good = kdist.checkpoint.save(model, directory)
    before = state(model)
    train(model, 1)
    bad = kdist.checkpoint.save(model, directory)
    for file in (bad / STORE / "d").iterdir():
        file.write_bytes(file.read_bytes()[:40])
    with pytest.warns(UserWarning, match="cannot be read.*before it is taken"):
        assert kdist.checkpoint.restore(model, directory).folder == good
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(kdist.checkpoint.CheckpointError, match="cannot be read"):
        kdist.checkpoint.restore(model, directory, step=8)


def test_what_is_not_there_is_said(tmp_path):
    model = KINDS["plain"].model()
    with pytest.raises(kdist.checkpoint.CheckpointError, match="no whole checkpoint"):
        kdist.checkpoint.restore(model, tmp_path)
    assert kdist.checkpoint.latest(tmp_path) is None
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(kdist.checkpoint.CheckpointError, match="no weights yet"):
        kdist.checkpoint.save(unbuilt, tmp_path)
    with pytest.raises(ValueError, match="keep is a number"):
        kdist.checkpoint.save(model, tmp_path, keep=0)


def test_what_is_no_model_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for call in (kdist.checkpoint.save, kdist.checkpoint.restore):
        with pytest.raises(TypeError, match="comes first, before the directory. Received: m"):
            call(str(tmp_path), model)
