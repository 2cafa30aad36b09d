"""A program for test_born_limited.py: what a model is made, trained, saved under a limit of memory.

    python born_limited.py WHAT FOLDER [GROUP]

It does all on a small model first, and then sets the limit: a quarter more than what it should
need, over what the process has by then; of resident memory, where there is a GROUP of
`tests.memory_group`, else of addresses. With "pooled" there is no limit, but a look at TensorFlow's
pool. Prints lines of JSON, in mebibytes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import kdist
from kdist._compat import keras_saving
from kdist.storage import recipes
from kdist.storage.variables import parts_of

import h5py
import keras
import numpy as np
import tensorflow as tf

from tests.memory_group import enter

HEADROOM = 1.25
SMALL, WIDTH, LAYERS = 64, 1024, 24
LARGE = (4096, 8192)
LEVEL3 = kdist.OptimizerConfig(level=3)


def config() -> kdist.ParallelConfig:
    even, odd = r".*block_\d*[02468]/kernel", r".*block_\d*[13579]/kernel"
    layouts = {even: (None, "model"), odd: ("model", None)}
    return kdist.ParallelConfig(mesh=kdist.mesh(model=4), layout_map=layouts)


def build(inputs: int, units: list[int]) -> keras.Model:
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(n, "tanh", name=f"block_{i}") for i, n in enumerate(units)]
    return keras.Sequential([keras.Input((inputs,)), *stack])


def born(inputs: int, units: list[int]) -> keras.Model:
    with kdist.scope(config()):
        return build(inputs, units)


def trained(model: keras.Model, folder: Path) -> None:
    """One step, saved and restored."""
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    x = np.ones((2, model.input_shape[-1]), "float32")
    model.train_on_batch(x, x)
    say("trained")
    kdist.checkpoint.save(model, folder)
    say("saved")
    kdist.checkpoint.restore(model, folder)
    say("restored")


def touch(model: keras.Model) -> None:
    """Makes all parts."""
    for variable in model.weights:
        parts_of(variable)


def size(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def say(what: str, **more: Any) -> None:
    found = {"now": size("VmSize") >> 20, "peak": size("VmPeak") >> 20}
    print(json.dumps({"what": what, **found, **more}), flush=True)


def write(model: keras.Model, folder: Path) -> None:
    """The same weights as a file of Keras's, in an archive, and compressed."""
    model.save_weights(folder / "large.weights.h5")
    model.save(folder / "large.keras")
    with (
        h5py.File(folder / "large.weights.h5") as old,
        h5py.File(folder / "packed.weights.h5", "w") as new,
    ):

        def copy(at: str, one: Any) -> None:
            if isinstance(one, h5py.Group):
                new.require_group(at)
            else:
                new.create_dataset(at, data=one[()], compression="gzip", compression_opts=1)

        old.visititems(copy)


def loaded(does: str, folder: Path) -> None:
    """Reads a file of one large weight, in what anonymous memory the parts and a shard take.

    "inside": in the scope; "after": by a model that has its parts. "whole": as Keras reads.
    "before": as Keras reads, before the optimizer is known, which cuts weights at level 3.
    With "_keras", of a `.keras` archive; with "_gzip", of a compressed `.h5` file.
    """
    does, _, kind = does.partition("_")
    units, path = [LARGE[1], SMALL], folder / "large.weights.h5"
    if does == "write":
        write(build(LARGE[0], units), folder)
        return
    read = {"": path, "keras": folder / "large.keras", "gzip": folder / "packed.weights.h5"}[kind]
    model = None
    if does == "after":
        touch(model := born(LARGE[0], units))
    shard = LARGE[0] * LARGE[1]
    base = size("VmData")
    # Before: an array that waits, and the parts; or the array that Keras reads.
    more = {"after": 0, "before": 8 * shard}.get(does, 4 * shard)
    allowed = base + more + shard + 5 * recipes.CHUNK
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    say("limit", base=base >> 20, allowed=allowed >> 20)
    if does == "whole":
        keras_saving.mapped_files = contextlib.nullcontext
    if does == "before":
        with kdist.scope(kdist.ParallelConfig(mesh=kdist.mesh(data=4), optimizer=LEVEL3)):
            model = build(LARGE[0], units)
        keras.saving.load_weights(model, path)
        model.compile("sgd", "mse")
        touch(model)
    elif model is None:
        with kdist.scope(config()):
            model = build(LARGE[0], units)
            model.load_weights(read)
        touch(model)
    else:
        model.load_weights(read)
    say("loaded", data=size("VmData") >> 20)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    with h5py.File(path) as file:
        for name, layer in zip(("dense", "dense_1"), model.layers):
            stored = file[f"layers/{name}/vars/0"]
            held = parts_of(layer.kernel)
            assert len(held) == 4
            assert all((stored[part.index] == part.target.numpy()).all() for part in held)
    say("same")


def limit(needed: int, group: Path | None) -> None:
    """From now on the process may have a quarter more than it needs, on top of what it has."""
    base = size("VmSize")
    allowed = base + int(HEADROOM * needed)
    if group is not None:
        enter(group, int(HEADROOM * needed))
    else:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    say("limit", base=base >> 20, needed=needed >> 20, allowed=allowed >> 20)


def main(what: str, folder: Path, group: Path | None = None) -> None:
    kdist.init(cpu_devices=4)
    make, does = what.split("-")
    if make == "file":
        loaded(does, folder)
        return
    trained(born(SMALL, [SMALL] * LAYERS), folder / "small")
    if does == "build":
        limit(4 * LARGE[0] * LARGE[1], group)
        units = [LARGE[1], SMALL]
        if make == "born":
            touch(born(LARGE[0], units))
        else:
            touch(kdist.parallelize(build(LARGE[0], units), config()))
        say("built")
        return
    parameters = 4 * LAYERS * (WIDTH + 1) * WIDTH
    needed = 4 * parameters  # themselves, two slots, gradients
    if not make.startswith("pooled"):
        limit(needed, group)
    model = born(WIDTH, [WIDTH] * LAYERS)
    second = [tf.identity(v) for v in model.weights] if make.endswith("copied") else None
    trained(model, folder / "large")
    del second
    if make.startswith("pooled"):
        pooled(needed, parameters)


def pooled(needed: int, parameters: int) -> None:
    """Says what of TensorFlow's pool was in use at most, with the parts that are not from it."""
    try:
        used = tf.config.experimental.get_memory_info("CPU:0")["peak"] + parameters >> 20
    except ValueError:
        used = None
    say("pool", used=used, allowed=int(HEADROOM * needed) >> 20)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
