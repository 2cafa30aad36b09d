"""Other ways to ask for the same training: each leaves what the plain way leaves.

XLA, several steps per call, batches of many sizes, all-to-all re-layouts, declarations on layers
instead of a layout map, and weights that are stored sliced over the data axis.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import keras
import pytest

from .attention_models import ATTENTION
from .case import Case, Layout
from .features import BY_NAME as FEATURES
from .harness import Run, build, compare, compiled, precision, reference_engine, train_batches
from .matrix import MESHES, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT64, check
from .zoo import BY_NAME

DATA_MESHES = [mesh for mesh, axes in MESHES.items() if "model" not in axes]
INNER_MESHES = [mesh for mesh, axes in MESHES.items() if "model" in axes]
DATA_NAMES = ("data", "batch")


@pytest.mark.parametrize(
    ("name", "mesh"),
    # Each device compiles what it computes: on more of them, for minutes.
    spread(product(BY_NAME, [*DATA_MESHES, "data2_model2"]), [("mlp", "data2")]),
)
def test_xla_computes_the_same(name: str, mesh: str, engine: str) -> None:
    # The reference stays without XLA, so that both ways of computing are compared.
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        compile={"jit_compile": True},
    )


@pytest.mark.parametrize(
    ("name", "mesh", "feature"),
    spread(
        product(BY_NAME, MESHES, ("three_steps_per_execution", "steps_without_barrier")),
        [
            ("mlp", "model2", "three_steps_per_execution"),
            ("encoder", "data4", "steps_without_barrier"),
        ],
    ),
)
def test_several_steps_per_execution(name: str, mesh: str, feature: str, engine: str) -> None:
    # Seven batches, the last one smaller: executions of three, three and one.
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        samples=53,
        epochs=1,
        features=(FEATURES[feature],),
    )


SIZES = (8, 5, 3, 8, 1, 13)


@pytest.mark.parametrize(
    ("name", "mesh", "feature"),
    spread(
        product(BY_NAME, ("data4", "data2_model2", "model2"), ("none", "sample_weight")),
        [("encoder", "data4", "sample_weight"), ("mlp", "data2_model2", "none")],
    ),
)
def test_batches_of_many_sizes(name: str, mesh: str, feature: str, engine: str) -> None:
    case = BY_NAME[name]
    run = Run(
        case=case,
        mesh_axes=MESHES[mesh],
        optimizer=OPTIMIZERS["sgd_momentum"],
        features=(FEATURES[feature],),
    )
    expected = train_batches(run, reference_engine(run), SIZES)
    actual = train_batches(run, engine, SIZES)
    check(expected, actual, FLOAT64, case.zero_gradient_paths, title=f"{run.title} [{engine}]")


@pytest.mark.parametrize(
    ("name", "mesh"), spread(product(BY_NAME, INNER_MESHES), [("mlp", "model2")])
)
def test_alltoall_may_be_used(name: str, mesh: str, engine: str) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        config={"enable_alltoall": True},
    )


# Declarations ---------------------------------------------------------------------------------


def _declare_mlp(model: keras.Model) -> None:
    import kdist

    kdist.shard(model.get_layer("up"), weights={"kernel": (None, "model"), "bias": ("model",)})
    kdist.shard(model.get_layer("down"), weights={"kernel": ("model", None)})


def _declare_mlp_activations(model: keras.Model) -> None:
    import kdist

    up, down = model.get_layer("up"), model.get_layer("down")
    # The second operand of `in_strategy` is the kernel; a cut of its last dim takes the bias along.
    kdist.shard(up, in_strategy=((None, None), (None, "model")), out_strategy=(None, "model"))
    kdist.shard(down, in_strategy=((None, "model"), ("model", None)), out_strategy=(None, None))


def _declare_gpt(model: keras.Model) -> None:
    import kdist

    attention = {pattern.partition("attention/")[2]: cut for pattern, cut in ATTENTION.items()}
    for layer in model.layers:
        if layer.name.endswith("_attention"):
            kdist.shard(layer, weights=attention)
        elif layer.name.endswith("_up"):
            kdist.shard(layer, weights={"kernel": (None, "model"), "bias": ("model",)})
        elif layer.name.endswith("_down"):
            kdist.shard(layer, weights={"kernel": ("model", None)})
    kdist.shard(model.get_layer("vocabulary"), weights={"embeddings": ("model", None)})


DECLARATIONS: Mapping[str, tuple[str, Callable[[keras.Model], None]]] = {
    "mlp_weights": ("mlp", _declare_mlp),
    "mlp_activations": ("mlp", _declare_mlp_activations),
    "gpt_weights": ("gpt", _declare_gpt),
}


def _layouts(run: Run) -> dict[str, tuple]:
    """Path -> layout of every weight, as kdist placed it."""
    from kdist.api.attached import attached

    with precision(run.dtype):
        model = compiled(run, "kdist")
        entries = attached(model).entries
        return {v.path: tuple(entries[id(v)].placement.layout.dims) for v in model.weights}


@pytest.mark.parametrize(
    ("declared", "mesh"),
    spread(product(DECLARATIONS, INNER_MESHES), [("mlp_activations", "model2")]),
)
def test_declarations_instead_of_a_layout_map(declared: str, mesh: str, engine: str) -> None:
    name, declare = DECLARATIONS[declared]
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        layout_map={},
        declare=declare,
    )


@pytest.mark.parametrize("declared", DECLARATIONS)
def test_declarations_cut_what_the_layout_map_cuts(declared: str) -> None:
    name, declare = DECLARATIONS[declared]
    run = Run(case=BY_NAME[name], mesh_axes={"model": 2}, optimizer=OPTIMIZERS["sgd"])
    expected = _layouts(run)
    assert any("model" in dims for dims in expected.values())
    assert _layouts(dataclasses.replace(run, layout_map={}, declare=declare)) == expected


# Weights sliced over the data axis -------------------------------------------------------------


def sliced_over_data(case: Case, axes: Mapping[str, int]) -> dict[str, Layout]:
    """The case's layouts, with the data axis on one more dim of every weight that has one for it.

    That is the last dim that nothing else cuts and that the axis divides: a weight stored so is
    gathered before use, its gradient scattered (ZeRO-3 for that weight).
    """
    axis = next(name for name in axes if name in DATA_NAMES)
    layouts: dict[str, Layout] = {}
    with precision("float64"):
        shapes = {v.path: tuple(v.shape) for v in build(case).trainable_variables}
    for path, shape in shapes.items():
        found = [cut for pattern, cut in case.layout_map.items() if re.fullmatch(pattern, path)]
        cut = found[0] if found and "model" in axes else (None,) * len(shape)
        free = [i for i, n in enumerate(shape) if cut[i] is None and n % axes[axis] == 0]
        if free:
            cut = tuple(axis if i == free[-1] else one for i, one in enumerate(cut))
        layouts[re.escape(path)] = cut
    assert sum(axis in cut for cut in layouts.values()) > len(layouts) / 3
    return layouts


SLICED_MESHES = {
    **{name: MESHES[name] for name in ("data2", "data4", "data2_model2")},
    "batch2_model2": {"batch": 2, "model": 2},
}


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    spread(
        product(BY_NAME, SLICED_MESHES, ("adam", "lamb")),
        [("mlp", "data2", "adam"), ("mlp", "data2_model2", "adam")],
    ),
)
def test_weights_sliced_over_data(name: str, mesh: str, optimizer: str, engine: str) -> None:
    axes = SLICED_MESHES[mesh]
    compare(
        BY_NAME[name],
        axes,
        optimizer=OPTIMIZERS[optimizer],
        engine=engine,
        layout_map=sliced_over_data(BY_NAME[name], axes),
    )
