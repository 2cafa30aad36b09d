"""A `PyDataset` that changes between epochs, and data that are others when a run goes on."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist.callbacks import ShardedCheckpoint
from kdist.checkpoint import dataset_state, remembered
from kdist.checkpoint.dataset_state import DatasetState
from kdist.checkpoint.position import check_data
from kdist.checkpoint.sources import Indexed

import keras
import numpy as np
import pytest

from ..cluster.stopping import StopAfter, Stopped
from ..equivalence.matrix import product, spread
from .runs import BATCH, ROWS, STEPS, Seen, arrays, build, dataset, generate

STOPS = (STEPS - 1, STEPS, STEPS + 3, 2 * STEPS, 2 * STEPS + 1)
"""With the last, a run goes on at the end of an epoch."""

DEFAULT = [
    ("shuffled", STEPS + 3, True),
    ("own_numbers", 2 * STEPS, False),
    ("says", 2 * STEPS + 1, True),
]


class Shuffled(keras.utils.PyDataset):
    """Rows in an order of its own, as Keras's examples draw it."""

    def __init__(self, rows: int = ROWS, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(rows)

    def __len__(self) -> int:
        return -(-len(self.order) // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return tuple(one[rows] for one in arrays())

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class OwnNumbers(Shuffled):
    """Draws from generators of its own, before each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [np.random.default_rng(3), np.random.RandomState(4)]
        self.random = random.Random(5)

    def on_epoch_begin(self) -> None:
        for one in self.generators:
            one.shuffle(self.order)
        self.random.random()
        self.order = np.roll(self.order, self.random.randrange(ROWS))

    def on_epoch_end(self) -> None:
        pass


class Says(Shuffled):
    """Says itself what it remembers."""

    def on_epoch_end(self) -> None:
        self.order = np.roll(self.order, 5)

    def get_state(self) -> Any:
        return self.order.tolist()

    def set_state(self, state: Any) -> None:
        self.order = np.asarray(state)


KINDS: dict[str, Callable[[], keras.utils.PyDataset]] = {
    "shuffled": Shuffled,
    "workers": lambda: Shuffled(workers=2),
    "own_numbers": OwnNumbers,
    "says": Says,
}


def run(data: dict[str, Any], saver: ShardedCheckpoint, stop: int | None = None) -> Any:
    """What is seen of each step, and the weights, if the run ends."""
    model, seen = build({"data": 2}, 1), Seen()
    rest = [StopAfter(stop)] if stop else []
    with contextlib.suppress(Stopped):
        found = model.fit(**data, epochs=3, verbose=0, callbacks=[seen, saver, *rest])
        return seen.steps, found.history, [w.numpy().tolist() for w in model.weights]
    return None


@functools.cache
def unbroken(kind: str, shuffle: bool) -> Any:
    saver = ShardedCheckpoint(tempfile.mkdtemp(), every_steps=2)
    return run({"x": KINDS[kind](), "shuffle": shuffle}, saver)


@pytest.mark.parametrize(
    ("kind", "stop", "shuffle"), spread(product(KINDS, STOPS, (True, False)), DEFAULT)
)
def test_its_orders_are_those_of_an_unbroken_run(
    tmp_path: Path, kind: str, stop: int, shuffle: bool
) -> None:
    def data() -> dict[str, Any]:
        return {"x": KINDS[kind](), "shuffle": shuffle}

    assert run(data(), ShardedCheckpoint(tmp_path, every_steps=2), stop) is None
    saver = ShardedCheckpoint(tmp_path, every_steps=2, resume=True)
    assert run(data(), saver) == unbroken(kind, shuffle)
    assert saver.restored.step in (stop - 1, stop - 2)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch_size": (lambda: whole_arrays(batch_size=4), "batch_size=4; before: batch_size=8"),
    "rows": (lambda: whole_arrays(rows=12), "rows=12, .*before: rows=44"),
    "shuffle": (lambda: whole_arrays(shuffle=False), "shuffle=False; before: shuffle=True"),
    "kind": (lambda: {"x": dataset("known")}, "data='a tf.data.Dataset'.*before: data='arrays'"),
    "generator": (lambda: {"x": generate(), "steps_per_epoch": STEPS}, "data='a generator'"),
    "given": (lambda: whole_arrays(steps_per_epoch=STEPS), "'given'; before: .*='not given'"),
    "fewer": (lambda: whole_arrays(steps_per_epoch=3), "steps_per_epoch=3; before"),
}


def whole_arrays(rows: int = ROWS, **options: Any) -> dict[str, Any]:
    x, y = arrays()
    return {"x": x[:rows], "y": y[:rows], "batch_size": BATCH, **options}


@pytest.mark.parametrize("other", OTHERS)
def test_data_that_are_others_are_refused(tmp_path: Path, other: str) -> None:
    """Within an epoch; and a generator, which is read from its beginning, at its end too."""
    make, text = OTHERS[other]
    run(whole_arrays(), ShardedCheckpoint(tmp_path, every_steps=2), stop=5)
    for at_the_end in (False, True):
        if at_the_end:
            run(whole_arrays(), ShardedCheckpoint(tmp_path, resume=True))
        refused = not at_the_end or other == "generator"
        with (
            pytest.raises(kdist.checkpoint.CheckpointError, match=f"Give fit the data.*{text}")
            if refused
            else contextlib.nullcontext()
        ):
            build({"data": 2}, 1).fit(
                **make(),
                epochs=4,
                verbose=0,
                callbacks=[ShardedCheckpoint(tmp_path, resume=True)],
            )


def test_checkpoints_that_do_not_say_what_data_they_are_of() -> None:
    """Those of versions before go on as they did."""
    source = Indexed(Shuffled(), True, False, 0)
    check_data(source, {}, 3, STEPS)
    check_data(source, source.described(), 3, STEPS)
    with pytest.raises(kdist.checkpoint.CheckpointError, match="batches=6; before: batches=7"):
        check_data(source, source.described() | {"batches": 7}, 3, STEPS)


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS - BATCH])
def test_an_order_of_other_rows_is_not_taken(tmp_path: Path, rows: int) -> None:
    """Also where there are as many batches."""
    run({"x": Shuffled()}, ShardedCheckpoint(tmp_path, every_steps=2), STEPS + 3)
    with pytest.raises(kdist.checkpoint.CheckpointError, match="Give fit the data"):
        run({"x": Shuffled(rows)}, ShardedCheckpoint(tmp_path, resume=True))
    run({"x": Shuffled()}, ShardedCheckpoint(tmp_path), STEPS + 3)
    other = Shuffled(rows)
    with pytest.warns(UserWarning, match=rf"order=\[{rows}\]; before: .*order=\[{ROWS}\]"):
        run({"x": other}, ShardedCheckpoint(tmp_path, resume=True))
    assert sorted(other.order) == list(range(rows))


def test_what_a_checkpoint_gave_is_kept() -> None:
    """Of an object that a run before in the same process has changed so."""
    one = Shuffled()
    first = DatasetState(one)
    one.on_epoch_end()
    saved = first.save()
    order = one.order.copy()
    for _ in range(2):
        again = DatasetState(one)
        assert saved is not None
        again.load(saved)
        saved = again.save()
    assert saved is not None
    fresh = Shuffled()
    DatasetState(fresh).load(saved)
    assert np.array_equal(fresh.order, order)


class Harder(Shuffled):
    """Gives other targets from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.harder = self.ended = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, y + self.harder

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.ended += 1  # Keras ends one before the first
        self.harder = int(self.ended > 1)


class Counts(keras.callbacks.Callback):
    """Changes an attribute, and adds one, at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.period = 2

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs = [*self.epochs, epoch]
        self.ended = getattr(self, "ended", 0) + 1


def test_objects_that_outlive_a_run_have_what_the_checkpoint_has(tmp_path: Path) -> None:
    """In a notebook a run goes on with the objects of the one that stopped, in a later epoch."""
    found = []
    for stop in (None, STEPS + 1):
        data, counts = Harder(), Counts()
        for left in (stop, None) if stop else (None,):
            saver = ShardedCheckpoint(tmp_path / str(stop), every_steps=4, resume=True)
            rest = [StopAfter(left)] if left else []
            model = build({"data": 2}, 1)
            with contextlib.suppress(Stopped):
                model.fit(data, epochs=3, verbose=0, callbacks=[counts, saver, *rest])
            counts.period += 1  # by the user
        weights = [w.numpy().tolist() for w in model.weights]
        found.append((data.order.tolist(), counts.epochs, counts.ended, weights))
    assert saver.restored is not None and saver.restored.step == 4
    assert found[0] == found[1] and counts.period == 4


def test_a_dataset_that_changes_nothing_has_no_state() -> None:
    class Same(Shuffled):
        on_epoch_end = keras.utils.PyDataset.on_epoch_end

    assert DatasetState(Same()).save() is None


def test_what_is_not_kept_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_state, "LARGE", 100)
    with pytest.warns(UserWarning, match=r"Shuffled has an.*\['order'\]: changed") as told:
        one = Shuffled()
        state = DatasetState(one)
        for _ in range(2):
            one.on_epoch_end()
            state.save()
    assert len(told) == 1
    one.file = object()  # type: ignore[attr-defined]
    one.count = collections.Counter()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=r"\['count', 'file'\]: no plain data"):
        DatasetState(one)


def test_generators_go_on_where_they_were() -> None:
    """Also those that others hold too; and arrays of their state are no lists."""
    for make in (np.random.default_rng, np.random.RandomState, random.Random):
        owner, holder = OwnNumbers(), make(7)
        owner.random = holder
        saved: list[np.ndarray] = []
        text = json.dumps(remembered.encode({"random": holder}, saved))
        expected = [holder.random() for _ in range(3)]
        put = json.loads(text)["dict"]
        remembered.put(owner, put, saved)
        assert owner.random is holder and [holder.random() for _ in range(3)] == expected
        owner.random = None
        remembered.put(owner, put, saved)
        assert [owner.random.random() for _ in range(3)] == expected
    generator = np.random.Generator(np.random.MT19937(3))
    saved = []
    state = json.loads(json.dumps(remembered.encode(generator, saved)))
    assert remembered.decode(state, saved).random() == generator.random()
