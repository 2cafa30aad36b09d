"""Which saved array a variable gets."""

from kdist.checkpoint.manifest import CheckpointError, SavedArray
from kdist.checkpoint.matching import match

import pytest


def saved(*paths, shape=(2,)):
    return [SavedArray(path, shape, "float32", ()) for path in paths]


def wanted(*paths, shape=(2,)):
    return [(path, shape) for path in paths]


def found(saved_paths, wanted_paths):
    return [one.path for one in match(saved(*saved_paths), wanted(*wanted_paths), "model")]


def test_by_path_in_any_order():
    assert found(["a/kernel", "b/kernel"], ["b/kernel", "a/kernel"]) == ["b/kernel", "a/kernel"]


def test_layers_that_keras_numbers_are_taken_in_order():
    names = ["dense/kernel", "dense_1/kernel", "adam/dense_1_kernel_momentum"]
    others = ["dense_7/kernel", "dense_8/kernel", "adam/dense_8_kernel_momentum"]
    assert found(names, others) == names


OPTIMIZER = "optimizer"


@pytest.mark.parametrize("built_first", [True, False])
def test_names_that_follow_from_how_a_model_was_made(built_first):
    """Keras names weights after the model where it was built, and not where it was loaded."""
    built = ["sequential_1/d/kernel", "sequential_1/d/bias"]
    loaded = ["d/kernel", "d/bias"]
    names, others = (built, loaded) if built_first else (loaded, built)
    assert found(names, others) == names
    slots = [
        ["scale/iteration", "scale/adam/sequential_1_d_kernel_momentum"],
        ["scale/iteration", "adam/d_kernel_momentum"],
    ]
    names, others = slots if built_first else slots[::-1]
    array = match(saved(*names), wanted(*others), OPTIMIZER)
    assert [one.path for one in array] == names


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("model", "first_d/kernel", "d/kernel"),
        ("model", "a/d/kernel", "b/d/kernel"),
        (OPTIMIZER, "adamw/d_momentum", "adam/d_momentum"),
        (OPTIMIZER, "adam/d_kernel_velocity", "adam/d_kernel_momentum"),
    ],
)
def test_other_names_are_refused(what, one, other):
    with pytest.raises(CheckpointError):
        match(saved(one), wanted(other), what)


def test_paths_that_stand_twice_are_taken_in_order():
    array = match(saved("w", "w"), wanted("w", "w"), "model")
    assert [one.path for one in array] == ["w", "w"]


@pytest.mark.parametrize("paths", [["a/kernel"], ["a/kernel", "c/kernel"], ["b/bias", "a/kernel"]])
def test_another_model_is_refused(paths):
    with pytest.raises(CheckpointError, match=r"another one.*Received: "):
        found(["a/kernel", "b/kernel"], paths)


def test_weights_of_lora_are_advised_of():
    paths = ["a/kernel", "a/lora_kernel_a"]
    with pytest.raises(CheckpointError, match=r"were saved\. Call enable_lora, and quantize"):
        found(["a/kernel"], paths)
    with pytest.raises(CheckpointError, match=r"were saved\. Received"):
        found(["a/kernel"], ["a/kernel", "a/dynamic_scale"])


FEW = ["adam/iteration", "adam/learning_rate", "adam/b_kernel_momentum", "adam/b_kernel_velocity"]
MORE = ["adam_1/iteration", "adam_1/learning_rate", "adam_1/a_kernel_momentum"]
MORE += ["adam_1/a_kernel_velocity", "adam_1/b_kernel_momentum", "adam_1/b_kernel_velocity"]


@pytest.mark.parametrize(
    ("first", "second", "where"), [(FEW, MORE, "now"), (MORE, FEW, "in the checkpoint")]
)
def test_frozen_layers_are_advised_of(first, second, where):
    with pytest.raises(CheckpointError, match=f"More weights are trained {where}: ") as found:
        match(saved(*first), wanted(*second), "optimizer")
    assert "iteration" not in str(found.value)  # which both have, under other numbers


@pytest.mark.parametrize("second", [FEW[:3], FEW[:2], [*FEW[:2], "adam/a_kernel_momentum"]])
def test_another_optimizer_is_no_matter_of_frozen_layers(second):
    with pytest.raises(CheckpointError, match=r"that were saved\. Received"):
        match(saved(*FEW), wanted(*second), "optimizer")


def test_another_shape_is_refused():
    with pytest.raises(CheckpointError, match=r"'a'.*\(3,\).*\(2,\)"):
        match(saved("a"), wanted("a", shape=(3,)), "model")
