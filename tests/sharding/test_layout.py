"""Layouts of weights, and the maps that give them."""

import itertools
import math
import re
import warnings
from typing import Any

from kdist.sharding.dims import WeightFit, axes_of, cut_of
from kdist.sharding.layout import (
    WeightLayout,
    is_activation_pattern,
    match_pattern,
    read_layout_map,
    resolve_layouts,
)

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from ..runtime.mesh_parts import device_mesh, layouts, meshes, topology


def layout_map(mesh, **patterns):
    made = keras.distribution.LayoutMap(mesh)
    for pattern, layout in patterns.items():
        made[pattern] = layout
    return made


# WeightLayout


def test_entries_have_one_spelling():
    layout = WeightLayout([("model",), (), ["data", "seq"], None])
    assert layout.dims == ("model", None, ("data", "seq"), None)
    assert layout.axes == ("model", "data", "seq")
    assert layout == WeightLayout(("model", None, ("data", "seq"), None))
    assert hash(layout) == hash(WeightLayout(("model", None, ("data", "seq"), None)))


@pytest.mark.parametrize("dims", ["model", None, 3, (1, None), (("model", 2),), ({"model"},)])
def test_entries_of_other_forms_are_refused(dims):
    with pytest.raises(ValueError, match="one entry a dim.*Received"):
        WeightLayout(dims)


@pytest.mark.parametrize("dims", [("model", "model"), (("model", "model"),), (("a", "b"), "a")])
def test_an_axis_cuts_one_dim(dims):
    with pytest.raises(ValueError, match="stands more than once"):
        WeightLayout(dims)


def test_replicated():
    assert WeightLayout.replicated(2) == WeightLayout((None, None))
    assert WeightLayout.replicated(2).is_replicated
    assert WeightLayout(()).is_replicated
    assert not WeightLayout((None, "model")).is_replicated


def test_inner_drops_the_data_axis():
    made = topology(batch=2, model=2)
    assert WeightLayout(("batch", "model")).inner(made).dims == (None, "model")
    assert WeightLayout((("batch", "model"), None)).inner(made).dims == ("model", None)
    assert WeightLayout(("data", None)).inner(made).is_replicated
    assert WeightLayout(("model",)).inner(topology(model=2)).dims == ("model",)


def test_data_dim():
    made = topology(batch=2, model=2)
    assert WeightLayout(("model", "batch")).data_dim(made) == 1
    assert WeightLayout((("model", "batch"), None)).data_dim(made) == 0
    assert WeightLayout(("model", "data")).data_dim(made) == 1
    assert WeightLayout(("model", None)).data_dim(made) is None
    assert WeightLayout(("model", None)).data_dim(topology(model=2)) is None


def test_shard_shape():
    made = topology(data=2, model=3)
    assert WeightLayout((None, "model")).shard_shape((5, 6), made) == (5, 2)
    assert WeightLayout((("data", "model"), None)).shard_shape((12, 7), made) == (2, 7)
    assert WeightLayout(()).shard_shape((), made) == ()


def test_shard_shape_says_which_size_would_work():
    with pytest.raises(ValueError, match=r"10 elements, which model=4 .*\(8 or 12 would work"):
        WeightLayout((None, "model")).shard_shape((5, 10), topology(model=4))
    with pytest.raises(ValueError, match=r"data=2 x model=4 cannot .* of 8 \(8 would work"):
        WeightLayout((("data", "model"),)).shard_shape((3,), topology(data=2, model=4))


def test_shard_shape_of_another_rank():
    with pytest.raises(ValueError, match="1 entries and the tensor 2 dims.*Received"):
        WeightLayout(("model",)).shard_shape((4, 4), topology(model=2))


def test_slice_of_has_the_first_axis_major():
    made = topology(data=2, model=2)
    at = {"data": 1, "model": 0}
    assert WeightLayout((("data", "model"),)).slice_of((8,), made, at) == (slice(4, 6),)
    assert WeightLayout((("model", "data"),)).slice_of((8,), made, at) == (slice(2, 4),)
    assert WeightLayout((None, "data")).slice_of((3, 4), made, at) == (slice(0, 3), slice(2, 4))


def test_slice_of_takes_the_synonym():
    made = topology(batch=2)
    for name in ("data", "batch"):
        layout = WeightLayout((name,))
        assert layout.slice_of((4,), made, {"data": 1}) == (slice(2, 4),)
        assert layout.slice_of((4,), made, {"batch": 1}) == (slice(2, 4),)


@pytest.mark.parametrize("coordinate", [{}, {"model": 2}, {"model": -1}])
def test_slice_of_needs_an_index_inside_the_axis(coordinate):
    with pytest.raises(ValueError, match="from 0 to 1 for axis 'model'"):
        WeightLayout(("model",)).slice_of((4,), topology(model=2), coordinate)


@hypothesis.given(st.data())
def test_slices_partition_the_whole(data):
    made = data.draw(meshes())
    layout = WeightLayout(data.draw(layouts(made.axis_names)))
    factors = [data.draw(st.integers(0, 2)) for _ in layout.dims]
    shape = tuple(f * cut_of(d, made) for f, d in zip(factors, layout.dims, strict=True))
    held = np.zeros(shape, int)
    for index in itertools.product(*map(range, made.shape)):
        part = layout.slice_of(shape, made, dict(zip(made.axis_names, index, strict=True)))
        assert held[part].shape == layout.shard_shape(shape, made)
        held[part] += 1
    copies = math.prod(made.axis_size(a) for a in made.axis_names if a not in layout.axes)
    assert np.all(held == copies)


@hypothesis.given(st.data())
def test_inner_layout_of_a_data_part_is_the_part_of_the_layout(data):
    # Cutting over data first and over the inner axes after is one cut, when data is major.
    made = topology(data=2, model=3)
    dims = data.draw(st.sampled_from([("data", "model"), (("data", "model"), None), ("model",)]))
    layout = WeightLayout(dims)
    shape = (12,) * len(dims)
    whole = np.arange(math.prod(shape)).reshape(shape)
    only_data = WeightLayout(tuple("data" if "data" in axes_of(d) else None for d in dims))
    for d, m in itertools.product(range(2), range(3)):
        at = {"data": d, "model": m}
        outer = whole[only_data.slice_of(shape, made, at)]
        inner = outer[layout.inner(made).slice_of(outer.shape, made, at)]
        assert np.array_equal(inner, whole[layout.slice_of(shape, made, at)])


# layout maps

VARIABLES = [
    ("block_0/up/kernel", (4, 8)),
    ("block_0/up/bias", (8,)),
    ("block_0/down/kernel", (8, 4)),
    ("head/kernel", (4, 6)),
]


def by_path(variables: Any, *arguments: Any) -> tuple[dict[str, WeightLayout], Any]:
    """`resolve_layouts` of variables whose paths differ."""
    layouts, outputs = resolve_layouts(variables, *arguments)
    return dict(zip([path for path, _ in variables], layouts, strict=True)), outputs


def test_every_variable_gets_a_layout():
    made, outputs = by_path(
        VARIABLES, {".*up/kernel": (None, "model"), ".*up/bias": ("model",)}, topology(model=2)
    )
    assert {path: layout.dims for path, layout in made.items()} == {
        "block_0/up/kernel": (None, "model"),
        "block_0/up/bias": ("model",),
        "block_0/down/kernel": (None, None),
        "head/kernel": (None, None),
    }
    assert outputs == {}


def test_no_map_replicates():
    made, outputs = by_path(VARIABLES, None, topology(model=2))
    assert all(layout.is_replicated for layout in made.values())
    assert list(made) == [path for path, _ in VARIABLES]
    assert outputs == {}


def test_patterns_match_whole_paths():
    with pytest.raises(ValueError, match="'up/kernel' applies to no variable"):
        resolve_layouts(VARIABLES, {"up/kernel": (None, "model")}, topology(model=2))


def test_the_path_itself_wins_over_patterns():
    patterns = {"block_0/.*kernel": (None, "model"), "block_0/down/kernel": ("model", None)}
    made, _ = by_path(VARIABLES, patterns, topology(model=2))
    assert made["block_0/down/kernel"].dims == ("model", None)
    assert made["block_0/up/kernel"].dims == (None, "model")


def test_two_patterns_on_one_variable():
    patterns = {".*up/kernel": (None, "model"), "block_0/.*kernel": (None, "model")}
    with pytest.raises(
        ValueError, match=r"'block_0/up/kernel': \['\.\*up/kernel', 'block_0/\.\*kernel'\]"
    ):
        resolve_layouts(VARIABLES, patterns, topology(model=2))


@pytest.mark.parametrize(
    "path",
    [
        "block_0/up/kernel",
        "a/kernel",
        "kernel",
        "block_1/kernel/x",
        "a.b",
        "axb",
        "block_0/up/bias",
    ],
)
def test_matching_is_that_of_keras(path):
    patterns = {"block_.*": (None,), ".*kernel": (None,), "block_0/up/kernel": (None,), "a.b": ()}
    mesh = device_mesh(model=2)
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(patterns, n) for n in range(5)
    ):
        keras_map = layout_map(mesh, **{p: patterns[p] for p in chosen})
        try:
            expected = keras_map[path]
        except ValueError:
            with pytest.raises(ValueError, match="Several patterns match"):
                match_pattern(chosen, path)
            continue
        pattern = match_pattern(chosen, path)
        assert (None if pattern is None else keras_map[pattern]) is expected


def test_a_dict_pattern_without_a_variable_names_the_closest():
    with pytest.raises(ValueError, match=r"\['block_0/up/kernel'.*Received: .*\['.*upp/kernel'\]"):
        resolve_layouts(VARIABLES, {".*upp/kernel": (None, "model")}, topology(model=2))


def test_a_layout_map_pattern_without_a_variable_is_a_warning():
    made = layout_map(device_mesh(model=2), **{".*up/kernel": (None, "model"), "q": ("model",)})
    with pytest.warns(UserWarning, match=r"apply to no variable of the model: \['q'\]"):
        resolved, _ = by_path(VARIABLES, made, topology(model=2))
    assert resolved["block_0/up/kernel"].dims == (None, "model")


def test_a_layout_map_that_fits_does_not_warn():
    made = layout_map(device_mesh(model=2), **{".*up/kernel": (None, "model"), "x/output": (None,)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, outputs = resolve_layouts(VARIABLES, made, topology(model=2))
    assert outputs == {"x/output": (None,)}


def test_tensor_layouts_are_taken():
    value = keras.distribution.TensorLayout((None, "model"))
    made, _ = by_path(VARIABLES, {"head/kernel": value}, topology(model=2))
    assert made["head/kernel"].dims == (None, "model")


def test_the_same_layout_from_every_kind_of_map():
    mesh, made = device_mesh(data=2, model=2), topology(data=2, model=2)
    tuples = {".*/kernel": ("data", "model"), ".*bias": (None,)}
    of_keras = {p: keras.distribution.TensorLayout(d, mesh) for p, d in tuples.items()}
    expected = resolve_layouts(VARIABLES, tuples, made)
    assert resolve_layouts(VARIABLES, of_keras, made) == expected
    assert resolve_layouts(VARIABLES, layout_map(mesh, **tuples), made) == expected


def test_patterns_of_outputs_are_apart():
    patterns = {".*up/output": ("data", "model"), "head/output$": (None, "model")}
    made, outputs = by_path(VARIABLES, patterns, topology(data=2, model=2))
    assert outputs == patterns
    assert all(layout.is_replicated for layout in made.values())


def test_is_activation_pattern():
    assert is_activation_pattern("a/output")
    assert is_activation_pattern(".*output$")
    assert not is_activation_pattern(".*attention_output.*kernel")
    assert not is_activation_pattern("output/kernel")


def test_data_and_batch_are_synonyms():
    made, _ = by_path(VARIABLES, {".*/kernel": ("batch", None)}, topology(data=2))
    assert made["head/kernel"].dims == ("data", None)
    made, _ = by_path(VARIABLES, {".*/kernel": ("data", None)}, topology(batch=2))
    assert made["head/kernel"].dims == ("batch", None)


def test_the_synonym_does_not_cut_twice():
    with pytest.raises(ValueError, match="'data' stands more than once"):
        resolve_layouts(VARIABLES, {"head/kernel": ("batch", "data")}, topology(data=2))


def test_data_on_a_weight_must_divide():
    with pytest.raises(ValueError, match="Dim 1 of 'head/kernel' has 6 elements, which batch=4"):
        resolve_layouts(VARIABLES, {"head/kernel": (None, "batch")}, topology(batch=4, model=2))


def test_an_unknown_axis_lists_those_of_the_mesh():
    with pytest.raises(ValueError, match=r"layout_map\['head/kernel'\].*'modle'.*data=2, model=2"):
        resolve_layouts(VARIABLES, {"head/kernel": (None, "modle")}, topology(data=2, model=2))


def test_rank_of_a_layout():
    with pytest.raises(ValueError, match="layout of 'block_0/up/bias' has 2 entries"):
        resolve_layouts(VARIABLES, {".*up/.*": (None, "model")}, topology(model=2))


def test_one_axis_on_two_dims():
    with pytest.raises(ValueError, match="'model' stands more than once"):
        resolve_layouts(VARIABLES, {"head/kernel": ("model", "model")}, topology(model=2))


@pytest.mark.parametrize("value", ["map", [("a", (None,))], 3])
def test_layout_maps_of_other_types(value):
    with pytest.raises(ValueError, match="A layout map is a dict.*Received: layout_map="):
        read_layout_map(value, topology(model=2))


@pytest.mark.parametrize("value", [None, "model", 4, {"model": 0}, (4, 1)])
def test_layouts_of_other_types(value):
    with pytest.raises(ValueError, match="one entry a dim"):
        read_layout_map({"head/kernel": value}, topology(model=2))


def test_patterns_of_other_types():
    with pytest.raises(ValueError, match="regular expressions. Received: key="):
        read_layout_map({re.compile("a"): (None,)}, topology(model=2))
    with pytest.raises(ValueError, match="is no regular expression"):
        read_layout_map({"(a": (None,)}, topology(model=2))


def test_a_map_for_another_mesh():
    made = layout_map(device_mesh(model=4), **{"head/kernel": (None, "model")})
    with pytest.raises(ValueError, match="another mesh .*model=2: make it with LayoutMap"):
        read_layout_map(made, topology(model=2))
    with pytest.raises(ValueError, match="another mesh"):
        read_layout_map(keras.distribution.LayoutMap(device_mesh(model=4)), topology(model=2))


def test_variables_of_one_path_have_layouts_of_their_own():
    variables = [("a", (4,)), ("a", ()), ("b", (4,))]
    layouts, _ = resolve_layouts(variables, {"b": ("model",)}, topology(model=2))
    assert [one.dims for one in layouts] == [(None,), (), ("model",)]
    fit = WeightFit(topology(model=2), replicate=True)
    variables = [("a", (4,)), ("a", (3,))]
    layouts, _ = resolve_layouts(variables, {"a": ("model",)}, topology(model=2), fit)
    assert [one.dims for one in layouts] == [("model",), (None,)]


def test_variables_of_one_path_are_each_checked():
    with pytest.raises(ValueError, match="3 elements"):
        resolve_layouts([("a", (4,)), ("a", (3,))], {"a": ("model",)}, topology(model=2))


def test_the_data_axis_stands_last_where_axes_cut_a_dim_together():
    """It slices what a device of a replica has; before another axis it would cut no such part."""
    both = topology(data=2, model=2)
    with pytest.raises(ValueError, match=r"stands last .*: \('model', 'data'\)\. Received"):
        resolve_layouts([("a", (8,))], {"a": (("batch", "model"),)}, both)
    for fitting, sizes in (
        (("model", "data"), both),
        (("data", "model"), topology(data=1, model=2)),
    ):
        resolve_layouts([("a", (8,))], {"a": (fitting,)}, sizes)
