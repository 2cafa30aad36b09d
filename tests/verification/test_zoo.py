"""Every model of the zoo is found equal to one device, in float64 and in its own dtype."""

import kdist

import keras
import pytest

from ..equivalence import zoo
from ..equivalence.harness import precision
from ..equivalence.matrix import product, spread
from .decided import decided_batch
from .models import MESHES, batch, small, zoo_model

EQUAL = product([c for c in zoo.ZOO if not c.has_batchnorm], MESHES)


@pytest.mark.parametrize(
    ("name", "mesh"),
    spread(
        [(case.name, mesh) for case, mesh in EQUAL],
        [("mlp", "data2_model2")],
    ),
)
def test_the_zoo_is_equal_to_one_device(name, mesh):
    case = zoo.BY_NAME[name]
    model = zoo_model(case, MESHES[mesh])
    report = kdist.verify(model, *case.data(3, 7))
    assert report.ok and report.differences == (), report
    assert report.dtype == "float64"
    assert min(report.compared[kind] for kind in ("output", "loss", "gradient", "slot")) > 0
    assert "Equal to one device" in str(report)


LEVELS = [(case.name, level) for case in (zoo.MLP, zoo.GPT, zoo.TWO_TOWER) for level in (1, 2, 3)]


@pytest.mark.parametrize(("name", "level"), spread(LEVELS, [("two_tower", 3)]))
def test_levels_are_equal_to_one_device(name, level):
    case = zoo.BY_NAME[name]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    report = kdist.verify(zoo_model(case, {"data": 4}, optimizer=optimizer), *case.data(3, 8))
    assert report.ok and report.differences == (), report


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


CASES = [case.name for case in zoo.ZOO if not case.has_batchnorm]


FIRST = [("mlp", "mixed_float16", "data4")]


def _optimizer(policy):
    optimizer = keras.optimizers.Adam(0.01)
    if policy != "mixed_float16":
        return optimizer
    # Keras's first scale, 32768, takes a gradient of 2 out of float16's range: one device would see
    # -inf where each replica has a finite part of it. At 256 no gradient of the zoo gets there.
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)


@pytest.mark.parametrize(
    ("name", "policy", "mesh"),
    spread(product(CASES, POLICIES, ("data2", "data4", "data2_model2")), FIRST),
)
def test_the_zoo_is_equal_in_its_own_dtype(name, policy, mesh):
    case = zoo.BY_NAME[name]
    with precision(policy):
        model = zoo_model(case, MESHES[mesh], policy)
        loss = case.loss("sum_over_batch_size")
        model.compile(_optimizer(policy), loss, case.loss_weights, case.metrics())
        batch = case.data(3, 8)
        if policy != "float32":
            batch = decided_batch(case, policy, model.get_weights(), rows=8)
        report = kdist.verify(model, *batch, dtype="own")
    assert report.ok and report.differences == (), report
    assert report.dtype == policy


# A weight that is off by this much of itself on the mesh must be found.
FOUND = {"float64": 1e-8, "float32": 1e-3, "mixed_float16": 0.2, "mixed_bfloat16": 1.0}


@pytest.mark.parametrize(
    "policy", spread([(policy,) for policy in FOUND], [("float64",), ("mixed_float16",)])
)
def test_a_slightly_wrong_weight_is_found(policy, monkeypatch):
    from kdist.verification import trial

    make = trial._mesh_twin

    def wrong(*args):
        twin, parallel = make(*args)
        kernel = twin.get_layer("down").kernel
        kernel.assign(kernel * (1 + FOUND[policy]))
        return twin, parallel

    monkeypatch.setattr(trial, "_mesh_twin", wrong)
    dtype = "float64" if policy == "float64" else "own"
    with precision("float32" if policy == "float64" else policy):
        model = small()
    report = kdist.verify(model, *batch(), dtype=dtype)
    assert not report.ok and report.dtype == policy
    assert {d.kind for d in report.differences} >= {"output", "loss", "gradient"}
    assert "output" in report.cause
