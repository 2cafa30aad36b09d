"""Private names of Keras and TensorFlow stand in `kdist/_compat` alone, where tests hold them.

What a class or a table of kdist has to name is listed below, and is still a name of theirs.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import pytest
import tensorflow as tf

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = [
    path
    for folder in ("kdist", "layers", "callbacks")
    for path in sorted((CHECKOUT / folder).rglob("*.py"))
    if "_compat" not in path.parts
]
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "__setattr__", "__delattr__")
"""Functions whose second argument is the name of an attribute."""
MODULES = ("keras.src", "tensorflow.python", "tensorflow.compiler", "tensorflow.dtensor")
"""Private ones. Messages of graphs (`tensorflow.core`) are a format of files."""
ALLOWED: dict[str, dict[str, set[str]]] = {
    "Methods by which Keras's optimizer calls that class.": {
        "layers/lazy.py": {
            "_apply_weight_decay",
            "_backend_apply_gradients",
            "_clip_gradients",
            "_get_variable_index",
        }
    },
    "Methods by which Keras and TensorFlow's checkpoints and files call a variable.": {
        "kdist/storage/view_class.py": {
            "_direct_assign",
            "_export_to_saved_model_graph",
            "_restore_from_tensors",
            "_serialize_to_tensors",
            "_shared_name",
        }
    },
    "What is known of each slot of Keras's optimizers: tests/config/test_state_config.py": {
        "kdist/config/state_format.py": {
            "_accumulated_delta_vars",
            "_accumulated_grads",
            "_accumulators",
            "_average_gradients",
            "_linears",
            "_momentums",
            "_velocities",
            "_velocity_hats",
            *("_c", "_m", "_r", "_u", "_v"),
        }
    },
}
"""Why -> file -> names."""
ELSEWHERE = {"_output_shapes": "nodes of graphs", "_layout": "nodes of graphs"} | {
    "_current_frames": "sys",
    "_getframe": "sys",
    "_exit": "os",
    "_fields": "named tuples",
}
"""Documented names, and those of attributes of nodes, which have none but such -> of what."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name[0] == "_" != name[1:2]


def examples() -> Iterator[object]:
    """Objects of Keras and TensorFlow that have the attributes which training gives them."""
    x = keras.Input((1,))
    model = keras.Model(x, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", metrics=["mae"])
    plain = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    for optimizer in (
        plain,
        keras.optimizers.Adam(use_ema=True, amsgrad=True),
        keras.optimizers.RMSprop(momentum=0.9, centered=True),
        *(keras.optimizers.Ftrl(), keras.optimizers.Adadelta(), keras.optimizers.Adafactor()),
        *(keras.optimizers.Adamax(), keras.optimizers.MultiOptimizer(lambda variable: plain)),
    ):
        optimizer.build(model.trainable_variables)
        yield optimizer
    yield from (model, keras.Sequential([model]), model.layers[1], model.weights[0])
    yield from (model._compile_loss, model._compile_metrics, keras.losses.MeanSquaredError())
    yield from (keras.callbacks.Callback(), keras.callbacks.SwapEMAWeights())
    function = tf.function(lambda t: t + 1)
    concrete = function.get_concrete_function(tf.ones(2))
    yield from (function, concrete, concrete.graph, concrete.outputs[0], concrete.outputs[0].op)
    yield from (tf.Variable(1.0), tf.ones(1), tf.GradientTape(), tf.data.Dataset.from_tensors(1))


@functools.cache
def theirs() -> frozenset[str]:
    """Private names that objects of Keras and TensorFlow have."""
    return frozenset(name for one in examples() for name in dir(one) if is_private(name))


KINDS = (ast.Attribute, ast.Call, ast.ClassDef, ast.Constant, ast.Dict)
KINDS += (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Name)


def nodes_of(source: str) -> list[ast.AST]:
    """What says names in a file."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS)]


@functools.cache
def in_files() -> dict[Path, list[ast.AST]]:
    return {path: nodes_of(path.read_text(encoding="utf-8")) for path in FILES}


def is_own(base: ast.expr) -> bool:
    """Whether an attribute is one of the object, or class, that a method is of."""
    if isinstance(base, ast.Call):
        base = base.func
    return isinstance(base, ast.Name) and base.id in ("self", "cls", "super")


def asked_for(node: ast.AST, *functions: str) -> tuple[ast.expr, str] | None:
    """Of a call such as `getattr(one, "name")`: these two."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    called = getattr(node.func, "attr", getattr(node.func, "id", None))
    name = getattr(node.args[1], "value", None)
    return (node.args[0], name) if called in functions and is_private(name) else None


@functools.cache
def ours() -> frozenset[str]:
    """Private names that kdist defines: functions, classes, and what `self` and `cls` are given."""
    found = set()
    for node in itertools.chain.from_iterable(in_files().values()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own(node.value) else set()
        elif (asked := asked_for(node, "setattr", "__setattr__")) and is_own(asked[0]):
            found.add(asked[1])
    return frozenset(found)


@functools.cache
def bases() -> dict[str, list[str]]:
    """By class of kdist, what it derives from."""
    nodes = itertools.chain.from_iterable(in_files().values())
    found = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {node.name: [ast.unparse(base) for base in node.bases] for node in found}


def derives(base: str) -> bool:
    """Whether a class is one of Keras or TensorFlow, or derives from one."""
    return base.split(".")[0] in ("keras", "tf") or any(map(derives, bases().get(base, ())))


def overridden(node: ast.ClassDef, read: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Methods that Keras calls: of a class of its own, or of one that stands in for such a class.

    Args:
        node: A class.
        read: Attributes that code of its file reads; what it calls itself may have any name.
    """
    of_theirs = any(derives(ast.unparse(base)) for base in node.bases)
    for one in node.body:
        private = isinstance(one, ast.FunctionDef) and is_private(one.name)
        if private and one.name in theirs() and (of_theirs or one.name not in read):
            yield one.lineno, one.name


def private_in(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of Keras or TensorFlow, or of nobody known."""
    read = frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
    tables = [node.keys for node in nodes if isinstance(node, ast.Dict)]
    keys = {id(key) for table in tables for key in table}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = node.attr in ours() and (is_own(node.value) or node.attr not in theirs())
            found = [] if own else [(node.lineno, node.attr)]
        elif isinstance(node, ast.Constant) and is_private(node.value):
            own = node.value in ours() and id(node) not in keys
            found = [(node.lineno, node.value)] if node.value in theirs() and not own else []
        elif asked := asked_for(node, *BY_NAME):
            base, name = asked
            unknown = name not in ours() | theirs()
            known = name in ours() and name in theirs() and not is_own(base)
            found = [(node.lineno, name)] if unknown or known else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULES):
            found = [(node.lineno, str(node.module))]
        elif isinstance(node, ast.Import):
            found = [(node.lineno, n.name) for n in node.names if n.name.startswith(MODULES)]
        else:
            found = list(overridden(node, read)) if isinstance(node, ast.ClassDef) else []
        yield from (one for one in found if one[1] not in ELSEWHERE)


def found() -> list[tuple[str, int, str]]:
    """All of them in kdist, by file and line."""
    return [
        (path.relative_to(CHECKOUT).as_posix(), *one)
        for path, nodes in in_files().items()
        for one in sorted(private_in(nodes))
    ]


def test_private_names_are_in_compat_alone() -> None:
    allowed = {
        (file, name) for of in ALLOWED.values() for file, names in of.items() for name in names
    }
    used = found()
    left = [f"{file}:{line}: {name}" for file, line, name in used if (file, name) not in allowed]
    assert not left, "\n".join(left)
    assert allowed <= {(file, name) for file, _, name in used}, "no longer used"


def test_what_kdist_names_is_still_there() -> None:
    """An override of a method that Keras has renamed is never called, and nothing fails of it."""
    names = {name for of in ALLOWED.values() for one in of.values() for name in one}
    assert names <= theirs()


@pytest.mark.parametrize(
    "code",
    [
        "def f(model):\n    return model._compile_loss",
        "def f(model):\n    return getattr(model, '_compile_loss')",
        "def f(optimizer):\n    object.__setattr__(optimizer, '_learning_rate', 1)",
        "def f(optimizer):\n    optimizer._learning_rate = 1",
        "def f(one):\n    return one._of_nobody_known",
        "def f(one):\n    return hasattr(one, '_of_nobody_known')",
        "class C(keras.Layer):\n    def _clear_losses(self): ...",
        "class C(Lazy):\n    def _backend_update_step(self, *_): ...",
        "class C:\n    def _backend_update_step(self, *_): ...",
        "class C(keras.Optimizer):\n    def f(self): return self._accumulated_gradients",
        "C = type('C', (), {\n'_direct_assign': None})",
        "pass\nfrom keras.src import backend",
        "pass\nimport tensorflow.python.eager",
    ],
)
def test_what_is_private_is_found(code: str) -> None:
    lines = [line for line, _ in private_in(nodes_of(code))]
    assert set(lines) == {2}, code


@pytest.mark.parametrize(
    "code",
    [
        "class C:\n    def f(self): return self._learning_rate",
        "class C:\n    def _call(self): ...\n    def f(self): return self._call()",
        "def f(one):\n    return one._has_master",
        "def f(one):\n    return one.__dict__, getattr(one, '__dict__')",
        "def f(node):\n    return node.attr['_output_shapes']",
    ],
)
def test_what_is_of_kdist_is_not(code: str) -> None:
    assert list(private_in(nodes_of(code))) == []
