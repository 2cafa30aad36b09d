"""Every public name has an example in its docstring, which runs, and prints what it says."""

import ast
import contextlib
import dataclasses
import doctest
import inspect
import io
import re
import textwrap
from types import ModuleType
from typing import Any

import kdist
import kdist.pipeline

import keras
import numpy as np
import pytest
import tensorflow as tf

MODULES = (
    kdist,
    kdist.comm,
    kdist.callbacks,
    kdist.layers,
    kdist.checkpoint,
    kdist.export,
    kdist.pipeline,
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ELSEWHERE = {"kdist.comm.connect"}
"""Its example joins a process that is not there: tests/comm/test_processes.py runs two."""
KINDS = (kdist.pipeline.Instruction, kdist.pipeline.WeightInstruction)
"""Their docstrings have the example of the classes that derive from them."""


def public() -> dict[str, Any]:
    """Classes and functions that users call, and methods of these with an example, by name."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in module.__all__:
            one = getattr(module, name)
            if isinstance(one, ModuleType) or not callable(one):
                continue
            found[f"{module.__name__}.{name}"] = one
            for method, function in vars(one).items() if inspect.isclass(one) else ():
                if not method.startswith("_") and code_of(function):
                    found[f"{module.__name__}.{name}.{method}"] = function
    return found


@dataclasses.dataclass(frozen=True)
class Code:
    """Code of a docstring, what it prints ("" for anything), and how Python compiles it."""

    source: str
    printed: str = ""
    mode: str = "exec"


def code_of(one: Any) -> list[Code]:
    """The examples of a docstring: blocks, and lines of a prompt with what they print."""
    text = inspect.getdoc(one) or ""
    blocks = [Code(textwrap.dedent(code)) for code in BLOCK.findall(text)]
    lines = doctest.DocTestParser().get_examples(BLOCK.sub("", text))
    return blocks + [Code(line.source, line.want, "single") for line in lines]


PUBLIC = public()
EXAMPLES = {
    **{module.__name__: module for module in MODULES if code_of(module)},
    **{name: one for name, one in PUBLIC.items() if code_of(one) and name not in ELSEWHERE},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    one = PUBLIC[name]
    derived = inspect.isclass(one) and issubclass(one, KINDS) and one not in KINDS
    assert derived or code_of(one), f"{name} has no example"


def build_model() -> keras.Model:
    """What examples call the user's model: 16 numbers in, 4 out."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, "relu", name="up"),
            keras.layers.Dense(32, "relu", name="down"),
            keras.layers.Dense(4, name="head"),
        ]
    )


def trained() -> keras.Model:
    """What examples call `model`: parallel over two replicas, compiled, with one step done."""
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2))
    model = kdist.parallelize(build_model(), config)
    model.compile("adam", "mse")
    model.train_on_batch(*data())
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0).normal
    return draw(size=(64, 16)).astype("float32"), draw(size=(64, 4)).astype("float32")


def needs_model(examples: list[Code]) -> bool:
    """Whether code reads `model` before it makes one."""
    for statement in (one for e in examples for one in ast.parse(e.source).body):
        found = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "model"]
        if found:
            return not any(isinstance(n.ctx, ast.Store) for n in found)
    return False


def run(name: str) -> None:
    examples, (x, y) = code_of(EXAMPLES[name]), data()
    scope = {"kdist": kdist, "keras": keras, "np": np, "tf": tf, "x": x, "y": y}
    scope |= {"build_model": build_model}
    if needs_model(examples):
        scope["model"] = trained()
    for one in examples:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(one.source, name, one.mode), scope)
        same = doctest.OutputChecker().check_output(one.printed, out.getvalue(), FLAGS)
        assert same or not one.printed, f"{one.source}prints {out.getvalue()}, not {one.printed}"


def takes_long(name: str) -> bool:
    """Whether its example makes a model, or measures the machine."""
    return any(re.search("model|calibrate", one.source) for one in code_of(EXAMPLES[name]))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not takes_long(name)])
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(name)


@pytest.mark.parametrize("name", filter(takes_long, EXAMPLES))
def test_an_example_that_takes_long_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(name)
