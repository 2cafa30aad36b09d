"""The examples run at small sizes, learn, and show what their texts promise."""

import re

import kdist

import keras
import numpy as np
import pytest

import click_data
import click_through
import comm_fusion
import compute_devices
import custom_loop
import digits_conv
import example_flags
import gpt_model
import hybrid_matmul
import text_data
import train_gpt
import wide_and_deep

SMALL_GPT = ["--depth=1", "--width=32", "--heads=2", "--length=32", "--batch=16", "--megabytes=0.2"]
UNIFORM = np.log(256)  # nats per byte of a model that knows nothing


def run_gpt(*flags: str) -> float:
    return train_gpt.main(["train_gpt", *SMALL_GPT, *flags])


@pytest.mark.parametrize("mesh", ["pipe=2,data=2,model=2", "data=2,model=2", "data=4", "model=2"])
def test_train_gpt_learns_on_each_mesh(mesh, capsys):
    loss = run_gpt(f"--mesh={mesh}", "--steps=40", "--sample=0")
    # 3.5 nats is about what the frequencies of single bytes give; guessing gives 5.55.
    assert loss < 4.0 < UNIFORM
    out = capsys.readouterr().out
    assert "None" not in out.splitlines()
    assert f"held-out loss: {loss:.3f}" in out
    assert "tokens/s" in out


def test_train_gpt_does_not_depend_on_the_mesh():
    losses = [
        run_gpt(f"--mesh={mesh}", "--steps=6", "--sample=0")
        for mesh in ("data=1", "data=2,model=2", "pipe=2")
    ]
    losses.append(run_gpt("--mesh=data=2,model=2", "--sequence", "--steps=6", "--sample=0"))
    assert losses == pytest.approx([losses[0]] * 4, rel=2e-4)


def test_train_gpt_refuses_a_sequence_without_an_axis_to_cut_it():
    with pytest.raises(SystemExit, match="Add it to --mesh. Received: data=4"):
        run_gpt("--mesh=data=4", "--sequence")


def test_train_gpt_writes_text(capsys):
    run_gpt("--steps=2", "--sample=40")
    samples = capsys.readouterr().out.split("tokens/s\n")[-1]
    assert samples.strip().startswith("def ")


def test_generate_is_repeatable_and_slides_past_the_window():
    class Follows:
        """Always continues with the next byte of the alphabet."""

        input_shape = (None, 4)

        def predict_on_batch(self, window):
            return 100.0 * np.eye(256)[(window + 1) % 256]

    text = train_gpt.generate(Follows(), [b"ab", b"m"], count=6, seed=1)
    assert text == [b"abcdefgh", b"mnopqrs"]


def test_text_is_split_by_file_and_the_same_every_time():
    corpus, again = text_data.load(0.3), text_data.load(0.3)
    assert len(corpus.train) > len(corpus.held_out) > 0
    np.testing.assert_array_equal(corpus.train, again.train)
    assert corpus.held_out.tobytes() not in corpus.train.tobytes()


def test_targets_are_the_next_bytes():
    x, y = text_data.windows(np.arange(50, dtype=np.uint8), 7, 5, np.random.default_rng(0))
    assert x.shape == y.shape == (7, 5)
    np.testing.assert_array_equal(x + 1, y)


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match=r"needs a text of at least 11.*Received: text of 5 bytes"):
        text_data.windows(np.zeros(5, np.uint8), 1, 10, np.random.default_rng(0))


CLICKS = ["--rows=128", "--rows=64", "--rows=16", "--batch=64", "--epochs=1"]


def test_click_through_learns(capsys):
    (auc,) = click_through.main(["click_through", *CLICKS, "--examples=12000"])
    assert auc > 0.6
    out = capsys.readouterr().out
    assert "None" not in out.splitlines()
    assert "auc:" in out, "the progress bar shows the metric"
    assert "table_0: rows" in out, "the deal is shown"
    assert f"{auc:.4f}" in out


@pytest.mark.long
def test_click_through_learns_alike_wherever_tables_are():
    plain, *others = click_through.main(
        ["click_through", *CLICKS, "--examples=4000", "--tables=all"]
    )
    assert others == pytest.approx([plain] * 6, abs=1e-3)


def test_wide_and_deep_on_the_host_trains_as_plain_keras(capsys):
    sizes = ["--rows=64", "--rows=16", "--buckets=500", "--batch=64", "--examples=2000"]
    losses = [
        wide_and_deep.main(["wide_and_deep", *sizes, f"--tables={tables}", "--mesh=data=2"])
        for tables in ("plain", "host")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] < np.log(2)
    out = capsys.readouterr().out
    assert "rows of tables on the host" in out
    assert "wide/crosses/embeddings" in out and "deep/column_1/embeddings" in out


def test_clicks_use_the_rows_of_each_table():
    clicks = click_data.make(2000, (32, 8), numbers=3, seed=0)
    assert clicks.categories.max(axis=0).tolist() == [31, 7]
    assert 0.2 < clicks.clicked.mean() < 0.8


@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2"])
def test_digits_conv_learns(mesh, capsys):
    flags = [f"--mesh={mesh}", "--epochs=4", "--filters=8"]
    assert digits_conv.main(["digits_conv", *flags]) > 0.85
    out = capsys.readouterr().out
    assert "None" not in out.splitlines()
    assert ("model" in mesh) == bool(re.search(r"conv_2/kernel\s+shape[^;]*; layout.*'model'", out))


def test_custom_loop_leaves_steps_out(capsys):
    assert custom_loop.main(["custom_loop", "--steps=60"]) < 0.75
    left_out = re.search(r"(\d+) steps left out", capsys.readouterr().out)
    assert left_out is not None and 0 < int(left_out[1]) < 30


def test_hybrid_matmul_gathers_exactly_once(capsys):
    loss = hybrid_matmul.main(["hybrid_matmul", "--epochs=2"])
    assert loss < np.log(10)
    (gather,) = printed_gathers(capsys.readouterr().out)
    config = kdist.ParallelConfig(mesh=kdist.mesh(model=4), layout_map={})
    inspection = kdist.inspect(kdist.parallelize(small_hybrid(), config), batch_size=32)
    gathers = [c for c in inspection.collectives if c.kind == "all-gather"]
    (between,) = [c for c in gathers if c.phase == "forward"]
    assert (between.layer, between.axis, between.shape) == ("relu_1", ("model",), (32, 16))
    assert [between.layer, between.phase, between.kind] == gather[:3]


def test_hybrid_matmul_learns_in_two_stages(capsys):
    loss = hybrid_matmul.main(["hybrid_matmul", "--stages=2", "--epochs=2"])
    assert loss < 1.0 < np.log(10)
    out = capsys.readouterr().out
    assert "stage 1: columns ... logits" in out
    assert "has no effect" not in out
    (gather,) = printed_gathers(out)
    assert gather[1:3] == ["forward", "all-gather"]


def printed_gathers(out: str) -> list[list[str]]:
    """Rows of the printed report, before training, that are gathers of the forward pass."""
    rows = [line.split() for line in out.split("Epoch 1/")[0].splitlines()]
    return [row for row in rows if "all-gather" in row and "forward" in row]


def small_gpt() -> keras.Model:
    return gpt_model.build(gpt_model.GPTSizes(256, 16, 32, depth=1, heads=4))


def small_hybrid() -> keras.Model:
    return hybrid_matmul.build(hidden=16)


# Losses stay right when all work runs on one device, so these read what was executed.
@pytest.mark.parametrize(
    ("build", "axes", "layouts"),
    [
        (small_gpt, {"data": 4}, {}),
        (small_gpt, {"data": 2, "model": 2}, gpt_model.layout_map()),
        (small_hybrid, {"model": 4}, {}),
    ],
    ids=["gpt, data 4", "gpt, data 2 x model 2", "hybrid, model 4"],
)
def test_every_device_of_the_mesh_computes(build, axes, layouts):
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts)
    model = kdist.parallelize(build(), config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    x = np.zeros((8, *model.input_shape[1:]), model.inputs[0].dtype)
    y = np.zeros((8, *model.output_shape[1:-1]), np.int32)
    found = compute_devices.compute_devices(lambda: model.train_on_batch(x, y))
    assert found == set(range(4))


@pytest.mark.parametrize("text", ["data", "data=", "=2", "data=two", "data=2;model=2"])
def test_a_mesh_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="axis=size"):
        example_flags.parse_mesh(text)


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        train_gpt.main(["train_gpt", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "nats per byte" in out
    assert "--mesh" in out


def test_unknown_flags_are_refused():
    with pytest.raises(SystemExit, match="meshes"):
        digits_conv.main(["digits_conv", "--meshes=data=4"])


def test_comm_fusion_prints_ids_and_collectives(capsys):
    comm_fusion.main(["comm_fusion", "--steps=2"])
    model = comm_fusion.build_model()
    ids = comm_fusion.ids_of(model)
    assert list(ids.values()) == [0] * 4 + [1] * 4 + [2] * 4
    out = capsys.readouterr().out
    assert "block_2/dense" in out and "comm_collectives: 12" in out
