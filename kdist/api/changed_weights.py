"""A model whose weights have changed since its steps were made: gained, lost, moved, frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kdist._compat import keras_models, keras_seeds
from kdist.storage.retired import moves
from kdist.storage.variables import stored

import keras

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel


def take_up_weights(parallel: Parallel, kind: str) -> None:
    """Makes the steps anew if the model has gained or lost weights since they were made.

    Raises:
        ValueError: To train, the optimizer has to know the new weights first.
    """
    follow_weights(parallel, kind)
    follow_generator(parallel, kind)
    if kind == "train" and parallel.update is None and not parallel.own_updates.began:
        follow_frozen(parallel)
    follow_gained(parallel)
    if kind == "train" and parallel.unknown_to_optimizer is not None:
        gained, lost = parallel.unknown_to_optimizer
        raise ValueError(
            "The model's weights have changed since compile(), which enable_lora, quantize "
            "and new layers do. Call model.compile(...) again before training goes on. "
            f"Received: new weights={gained}, gone={lost}"
        )


def follow_gained(parallel: Parallel) -> bool:
    """Makes the steps anew if the model has gained or lost weights; tells whether."""
    gained, lost = parallel.gained_and_lost()
    if not gained and not lost:
        return False
    optimizer = parallel.model.optimizer if parallel.model.compiled else None
    if optimizer is not None and optimizer.built:
        parallel.unknown_to_optimizer = (gained, lost)
    parallel.forget_functions(parallel.jit_compile)
    return True


def follow_generator(parallel: Parallel, kind: str) -> None:
    """Has a function that is to be traced draw as it would if steps were made now.

    They are made anew if Keras has made its generator of random numbers since. Functions that are
    there draw from none; the next one may.
    """
    if parallel.program is None or parallel.has_made(kind):
        return
    if keras_seeds.is_late(parallel.program.unseeded):
        parallel.forget_functions(parallel.jit_compile)
    keras_seeds.make_unseeded_generator()


def follow_frozen(parallel: Parallel) -> bool:
    """Makes the steps anew if layers were frozen or thawed since they were made; tells whether."""
    if parallel.program is None:
        return False
    made = [id(v) for v in parallel.program.state.trainable]
    if made != [id(v) for v in parallel.model.trainable_variables]:
        parallel.forget_functions(parallel.jit_compile)
        parallel.spread_parameters()
        return True
    return False


def follow_thawed(parallel: Parallel) -> None:
    """Makes the steps anew if weights train now that were frozen when they were made.

    What trained then is among what the new ones may train: functions of before may go on.
    """
    if parallel.program is None:
        return
    before, model = parallel.program.state.trainable, parallel.model
    now, known = model.trainable_variables, {id(v) for v in before}
    if all(id(v) in known for v in now):
        return
    with keras_models.trainable_as(keras_models.flags_to_train(model, [*before, *now])):
        parallel.forget_functions(parallel.jit_compile)
        parallel.place_for_own()


def follow_fusion(parallel: Parallel) -> None:
    """Has optimizers update with the present buckets, in steps that are traced from now on.

    Weights that are stored cut move to where they are updated then: which are cut by rows, and
    which are dealt out whole, depends on what travels together.
    """
    if parallel.update is not None:
        parallel.update.jobs.let_go()
    parallel.update = None
    parallel.own_updates.let_go()
    if parallel.layouts is None or parallel.level != 3:
        return
    wanted = parallel.wanted_placements()
    if any(parallel.entries[id(v)].placement != placement for v, placement in wanted):
        parallel.forget_functions(parallel.jit_compile)
        parallel.spread_parameters()


def follow_between_steps(parallel: Parallel, kind: str) -> None:
    """Makes the steps anew if a callback has other models move weights, or freezes some.

    Of what is frozen only op by op, as Keras trains then; traced steps hear of it by `compile`.
    """
    if parallel.moves_seen != moves():
        follow_weights(parallel, kind)
        parallel.moves_seen = moves()
    if kind == "train" and parallel.model.run_eagerly:
        follow_frozen(parallel)


def moved_weights(parallel: Parallel, among: Iterable[keras.Variable]) -> list[str]:
    """Paths of weights, of some, that another model, which has them too, has moved since."""
    entries = parallel.entries_of(list(among))
    return [e.variable.path for e in entries if (stored(e.variable) or e) is not e]


def follow_weights(parallel: Parallel, kind: str) -> None:
    """Makes the steps anew if another model, which has the same weights, has moved them.

    Raises:
        ValueError: What trains has to be where the model's own optimizer updates it.
    """
    entries = parallel.entries
    now = {key: stored(entry.variable) or entry for key, entry in entries.items()}
    moved = [n for n, entry in entries.items() if now[n] is not entry]
    if not moved:
        if parallel.level is None and kind == "train":  # it was used since, where the weights are
            parallel.forget_functions(parallel.jit_compile)
        return
    trained = [id(v) for v in parallel.trained if id(v) in moved]
    if trained and kind == "train":
        raise _moved_by_another(parallel, trained)
    entries.update((n, now[n]) for n in moved)
    if trained:
        parallel.level = None  # the other's
    parallel.forget_functions(parallel.jit_compile)


def follow_to_plan(parallel: Parallel) -> None:
    """Has what is told of a step follow the weights: moved by another model, gained or lost.

    Raises:
        ValueError: It has moved what trains, to where this model has no step.
    """
    compiled = parallel.model.compiled and parallel.model.optimizer is not None
    entries = parallel.entries
    follow_weights(parallel, "train" if compiled else "plan")
    if compiled and parallel.level is None and parallel.layouts is not None:
        theirs = [id(v) for v in parallel.trained if entries[id(v)].placed_for() is not parallel]
        raise _moved_by_another(parallel, theirs)
    if parallel.layouts is not None and follow_gained(parallel):
        parallel.place()
        parallel.spread_parameters(takes=False)


def _moved_by_another(parallel: Parallel, weights: Sequence[int]) -> ValueError:
    paths = [parallel.entries[n].variable.path for n in weights]
    return ValueError(
        "Another model that has the same weights was compiled since, and has moved them to "
        "where its optimizer updates them. Compile this one again to train it. Received: "
        f"model={parallel.model.name!r}, moved={paths}"
    )
