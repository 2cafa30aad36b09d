"""A parallel model as a SavedModel: whole, or in its parts on several devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kdist._compat import saved_functions
from kdist.api.attached import attached
from kdist.export.signature import Signature, input_specs, leaf_specs
from kdist.export.tables import layers_without, part_by_part, together, vocabularies_of

import keras
import tensorflow as tf

WAYS = {"gather": "inline", "keep": "split"}
"""What becomes of a table's parts by default, by what becomes of all others."""


def saved_model(
    model: keras.Model,
    path: str | os.PathLike[str],
    signatures: Mapping[str, Signature] | None = None,
    shards: Literal["gather", "keep"] = "gather",
    host_tables: Literal["inline", "split"] | None = None,
    verbose: bool = False,
) -> None:
    """Writes a SavedModel that plain TensorFlow serves, without kdist.

    Args:
        model: A built model that was parallelized.
        path: A folder.
        signatures: By name, what is served; by default the model alone, as "serve". The first is
            "serving_default" too.
        shards: With "gather" each weight is one variable, on no device in particular: what
            `model.export(path)` writes. With "keep" each part stays a variable on a device of the
            mesh, and the program is the one that `model.predict` runs: no weight is ever put
            together, neither here nor where it is served. There, as many (logical) devices of the
            kind must exist before it is loaded; TensorFlow puts what has none on the first.
        host_tables: What becomes of tables on the host and those split by hand: "inline" is one
            variable for each, on the host with "keep"; "split" is its parts. By default "inline"
            with "gather" and "split" with "keep".
        verbose: Whether Keras prints the signatures.

    Raises:
        ValueError: For what the model does not allow.

    Example:
        >>> kdist.export.saved_model(model, "served", shards="keep")
        >>> served = tf.saved_model.load("served")
        >>> served.serve(x).shape
        TensorShape([64, 4])
    """
    parallel = attached(model)
    tables = WAYS.get(shards) if host_tables is None else host_tables
    if shards not in WAYS or tables not in WAYS.values():
        raise ValueError(
            'What is served is whole, shards="gather", or in parts, shards="keep", with tables on '
            'the host or split by hand whole, host_tables="inline", or in parts, "split". '
            f"Received: shards={shards!r}, host_tables={host_tables!r}"
        )
    chosen = _checked({"serve": Signature()} if signatures is None else signatures)
    if parallel.layouts is None and tables != WAYS[shards]:
        parallel.prepare("predict", (input_specs(model),))  # finds the tables
    fetched = [] if parallel.layouts is None else parallel.layouts.fetched_layers
    at = os.fspath(path)
    if shards == "gather":
        apart = fetched if tables == "split" else []
        call = part_by_part(model, apart) if apart else model
        with parallel.whole_variables(but=[one.embeddings for one in apart]):
            tracked = layers_without(model, apart)
            _write(model, at, chosen, dict.fromkeys(chosen, call), verbose, tracked)
        return
    calls = {name: lambda x: parallel.predictor(leaf_specs(x))(x) for name in chosen}
    with together(fetched if tables == "inline" else []):
        _write(model, at, chosen, calls, verbose, vocabularies_of(model), keep=True)
    saved_functions.complete(Path(path))


def _checked(signatures: Mapping[str, Signature]) -> Mapping[str, Signature]:
    if not signatures or not all(isinstance(one, Signature) for one in signatures.values()):
        raise ValueError(
            "`signatures` is a dict of kdist.export.Signature by name, with one at least. "
            f"Received: signatures={signatures!r}"
        )
    return signatures


def _write(
    model: keras.Model,
    path: str,
    signatures: Mapping[str, Signature],
    calls: Mapping[str, Any],
    verbose: bool,
    tracked: Sequence[Any] = (),
    keep: bool = False,
) -> None:
    archive = keras.export.ExportArchive()
    for one in tracked:
        archive.track(one)
    for name, one in signatures.items():
        one.build_layers(model)
        for layer in one.layers:
            archive.track(layer)
        archive.add_endpoint(name, one.around(calls[name]), one.specs(model))
    policy = "save_variable_devices" if keep else None
    options = tf.saved_model.SaveOptions(experimental_variable_policy=policy)
    try:
        archive.write_out(path, options=options, verbose=verbose)
    except AssertionError as error:
        if "untracked" not in str(error):
            raise
        raise ValueError(
            "A function before or after the model uses a layer or a table with state of its own, "
            "which is not saved with it. Give the layer itself as `before` or `after`, or several "
            f"in one keras.Model. Received: signatures={sorted(signatures)}; {error}"
        ) from error
