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


def test_another_shape_is_refused():
    with pytest.raises(CheckpointError, match=r"'a'.*\(3,\).*\(2,\)"):
        match(saved("a"), wanted("a", shape=(3,)), "model")
