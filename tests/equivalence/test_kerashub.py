"""KerasHub's backbones and tasks, unmodified, with their own layout maps.

Every row is long: KerasHub is not a dependency of the tests (it brings the full `tensorflow` wheel
over `tensorflow-cpu`), so the default suite must not need it. `sh run.sh test --long` installs it
without its dependencies; in another environment a row without KerasHub fails and says what to
install; none is skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached

import keras
import numpy as np
import pytest

from .case import Case, Data, Layout
from .features import Feature
from .harness import Run, compare, compiled, precision, train
from .optimizer_zoo import OPTIMIZERS
from .outcome import FLOAT32, check

pytestmark = pytest.mark.long

VOCABULARY = 32
TOKENS = 8
AXES = {"batch": 2, "model": 2}
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}


def _hub() -> Any:
    """The models of KerasHub, imported when a row runs: collecting must work without it."""
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "This row needs KerasHub: run `sh run.sh test --long`, or install keras-hub, regex and "
            "tokenizers with `pip install --no-deps`."
        ) from error
    return keras_hub.models


def _llama() -> keras.Model:
    backbone = _hub().LlamaBackbone(num_query_heads=4, num_key_value_heads=2, dropout=0.0, **SIZES)
    return _hub().LlamaCausalLM(backbone=backbone, preprocessor=None)


def _gpt2() -> keras.Model:
    backbone = _hub().GPT2Backbone(num_heads=4, dropout=0.0, max_sequence_length=TOKENS, **SIZES)
    return _hub().GPT2CausalLM(backbone=backbone, preprocessor=None)


def _bert() -> keras.Model:
    backbone = _hub().BertBackbone(num_heads=4, dropout=0.0, max_sequence_length=TOKENS, **SIZES)
    return _hub().BertTextClassifier(
        backbone=backbone, num_classes=4, preprocessor=None, dropout=0.0
    )


def _text(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, (samples, TOKENS + 1)).astype("int32")
    lengths = rng.integers(2, TOKENS + 1, samples)
    mask = (np.arange(TOKENS)[None] < lengths[:, None]).astype("int32")
    x = {"token_ids": tokens[:, :-1] * mask, "padding_mask": mask}
    return x, tokens[:, 1:], mask.astype("float32")


def _sentences(seed: int, samples: int) -> Data:
    x, _, _ = _text(seed, samples)
    rng = np.random.default_rng(seed)
    x["segment_ids"] = rng.integers(0, 2, (samples, TOKENS)).astype("int32")
    return x, rng.integers(0, 4, samples).astype("int32"), rng.uniform(0.1, 3, samples)


ENCODER_LAYOUT: dict[str, Layout] = {
    ".*self_attention(_layer)?/(query|key|value)/kernel": (None, "model", None),
    ".*self_attention(_layer)?/attention_output/kernel": ("model", None, None),
    ".*feedforward_intermediate_dense/kernel": (None, "model"),
    ".*feedforward_output_dense/kernel": ("model", None),
    "token_embedding/embeddings": ("model", None),
}


def _case(name: str, build: Callable[[], keras.Model], data: Callable[[int, int], Data]) -> Case:
    return Case(
        name=name,
        build=build,
        data=data,
        metrics=list,
        layout_map=ENCODER_LAYOUT,
        zero_gradient_paths=(".*/key/bias",),
    )


CASES = {
    "llama": _case("llama", _llama, _text),
    "gpt2": _case("gpt2", _gpt2, _text),
    "bert": _case("bert", _bert, _sentences),
}
LAYOUTS: dict[str, Any] = {"llama": lambda mesh: _hub().LlamaBackbone.get_layout_map(mesh)}
WEIGHTED = Feature(name="sample_weight", sample_weight=True)


def _options(name: str) -> dict[str, Any]:
    # GPT-2 and BERT ship no layout map: theirs is written here, by axis name.
    return {
        "optimizer": OPTIMIZERS["adam"],
        "dtype": "float32",
        "layout_map": LAYOUTS.get(name),
        "features": (WEIGHTED,),
        "epochs": 3,
    }


@pytest.mark.parametrize("name", CASES)
def test_task_equals_one_device(name: str, engine: str) -> None:
    compare(CASES[name], AXES, engine=engine, **_options(name))


@pytest.mark.parametrize("name", CASES)
def test_task_on_replicas_equals_one_device(name: str, engine: str) -> None:
    options = {**_options(name), "layout_map": {}}
    compare(CASES[name], {"batch": 4}, engine=engine, **options)


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 2}, {"pipe": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_task_in_stages_equals_one_device(name: str, axes: dict[str, int], engine: str) -> None:
    options = {**_options(name), "layout_map": ENCODER_LAYOUT if "model" in axes else {}}
    if name != "llama":  # its rotary embedding computes in float32
        options["dtype"] = "float64"
    config = {"pipeline": kdist.PipelineConfig(micro_batches=2), "indivisible": "replicate"}
    compare(CASES[name], axes, engine=engine, config=config, **options)


def _generate(run: Run, engine: str) -> np.ndarray:
    with precision(run.dtype):
        model = compiled(run, engine)
        model.compile(optimizer="adam", loss=run.case.loss("sum_over_batch_size"), sampler="greedy")
        x, y, weight = run.case.data(0, 16)
        model.fit(x, y, sample_weight=weight, batch_size=8, epochs=2, shuffle=False, verbose=0)
        prompt = {"token_ids": x["token_ids"].copy(), "padding_mask": x["padding_mask"].copy()}
        prompt["token_ids"][:, 3:] = 0
        prompt["padding_mask"][:, 3:] = 0
        return np.array(model.generate(prompt, stop_token_ids=None)["token_ids"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_after_training_gives_the_same_text(name: str, engine: str) -> None:
    layouts = LAYOUTS.get(name)
    run = Run(
        case=CASES[name],
        mesh_axes=AXES,
        optimizer=OPTIMIZERS["adam"],
        dtype="float32",
        layout_map=layouts,
    )
    np.testing.assert_array_equal(_generate(run, "plain"), _generate(run, engine))


def _generated(level: int | None) -> list[np.ndarray]:
    """What GPT-2 generates at first, after `parallelize` if there is a level, and in training."""
    with precision("float64"):
        keras.utils.set_random_seed(1)
        model, (x, y, _) = _gpt2(), _text(0, 16)
        loss = CASES["gpt2"].loss("sum_over_batch_size")
        model.compile(keras.optimizers.Adam(0.05), loss, sampler="greedy")
        prompt = {name: np.where(np.arange(TOKENS) < 3, rows, 0) for name, rows in x.items()}
        texts = [model.generate(dict(prompt), stop_token_ids=None)]
        if level is not None:
            optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
            config = kdist.ParallelConfig(
                mesh=kdist.mesh(**AXES), layout_map=ENCODER_LAYOUT, optimizer=optimizer
            )
            kdist.parallelize(model, config)
        for _ in range(3):
            texts.append(model.generate(dict(prompt), stop_token_ids=None))
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return [np.array(one["token_ids"]) for one in texts]


@pytest.mark.parametrize("level", [0, 3])
def test_generate_before_weights_move(level: int) -> None:
    """KerasHub keeps the function that it has traced; weights are elsewhere afterwards."""
    expected = _generated(None)
    np.testing.assert_array_equal(expected, _generated(level))
    assert any((expected[0] != text).any() for text in expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_trains_only_its_own_weights(name: str, engine: str) -> None:
    lora = Feature(name="lora", edit=lambda model: model.backbone.enable_lora(2))
    run = Run(case=CASES[name], mesh_axes=AXES, **_options(name))
    run = dataclasses.replace(run, features=(WEIGHTED, lora))
    expected, actual = train(run, "plain"), train(run, engine)
    check(expected, actual, FLOAT32, title=f"{run.title} [{engine}]")
    start = compiled(run, "plain")
    frozen = {v.path: np.array(v) for v in start.non_trainable_weights}
    trained = {v.path: np.array(v) for v in start.trainable_weights}
    assert any("lora" in path for path in trained)
    for path, value in frozen.items():
        np.testing.assert_array_equal(actual.weights[path], value, err_msg=path)
    assert any((actual.weights[path] != value).any() for path, value in trained.items())


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Elements of each array that Keras has made a tensor of, to assign it; of which variable."""
    sizes: list[tuple[str, int]] = []
    own = keras.Variable._convert_to_tensor

    def convert(self: Any, value: Any, dtype: Any = None) -> Any:
        sizes.append((self.path, int(np.prod(np.shape(value)))))
        return own(self, value, dtype)

    monkeypatch.setattr(keras.Variable, "_convert_to_tensor", convert)
    return sizes


@pytest.mark.parametrize("pieces", [None, 1e-5], ids=["one_file", "sharded_files"])
@pytest.mark.parametrize("name", CASES)
def test_a_preset_fills_shards(
    name: str, pieces: float | None, tmp_path: Path, converted: list[tuple[str, int]]
) -> None:
    """No weight is whole on a device, nor put together on the way there; then the task trains."""
    plain = CASES[name].build()
    plain.save_to_preset(tmp_path, **({} if pieces is None else {"max_shard_size": pieces}))
    assert (len(list(tmp_path.glob("model*.h5"))) > 1) == (pieces is not None)
    layouts = LAYOUTS.get(name, lambda mesh: ENCODER_LAYOUT)(kdist.mesh(**AXES))
    shards = kdist.OptimizerConfig(level=3, threshold_kb=0)
    mesh = kdist.mesh(**AXES)
    converted.clear()
    with kdist.scope(kdist.ParallelConfig(mesh=mesh, layout_map=layouts, optimizer=shards)):
        model = type(plain).from_preset(str(tmp_path), preprocessor=None)
    for one in (plain, model):
        one.compile(keras.optimizers.SGD(0.1), CASES[name].loss("sum_over_batch_size"))
    for entry in attached(model).entries.values():
        for part in entry.stored_parts():
            size = np.prod(part.target.shape)
            assert size <= -(-np.prod(entry.variable.shape) // 2), entry.variable.path
    weights = {v.path for v in model.trainable_variables}
    assert not [(path, size) for path, size in converted if path in weights]
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    x, y, weight = CASES[name].data(0, 8)
    losses = [
        one.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, verbose=0).history["loss"]
        for one in (plain, model)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)
