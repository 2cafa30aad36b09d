"""Trains a byte-level GPT on Python's standard library, over a mesh of logical CPU devices.

    python examples/train_gpt.py                           # pipe=2,data=2,model=2: 8 devices
    python examples/train_gpt.py --mesh data=2,model=2

prints what a step will do, trains with Keras's own progress bar, then shows the loss on files that
training never saw and text that the model writes. The loss is in nats per byte: 5.55 is knowing
nothing.
"""

import sys
import time
from collections.abc import Sequence

import kdist

import keras
import numpy as np
from absl import flags

import example_flags
import gpt_model
import text_data


class TokensPerSecond(keras.callbacks.Callback):
    """Shows the speed in the progress bar.

    Args:
        tokens_per_step: tokens of a global batch.
        warmup: steps to leave out at the start: the first one compiles.
    """

    def __init__(self, tokens_per_step: int, warmup: int = 1):
        super().__init__()
        self.tokens_per_step = tokens_per_step
        self.warmup = warmup
        self.speed = 0.0
        self._steps = 0
        self._start = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Adds `tokens/s`, the average since the warm-up, to the logs of the progress bar."""
        self._steps += 1
        if self._steps == self.warmup:
            self._start = time.perf_counter()
        if self._steps > self.warmup and logs is not None:
            done = (self._steps - self.warmup) * self.tokens_per_step
            self.speed = done / (time.perf_counter() - self._start)
            logs["tokens/s"] = self.speed


def generate(
    model: keras.Model, prompts: Sequence[bytes], count: int, seed: int = 0
) -> list[bytes]:
    """Continues texts, one byte at a time, each drawn from the model's ten likeliest.

    Every call sees a window of the model's full length. Attention is causal, so what lies to the
    right of the last known byte does not matter.

    Args:
        model: maps int32 `(batch, length)` to logits `(batch, length, 256)`.
        prompts: texts to continue, none empty.
        count: bytes to add to each.
        seed: of the draws.

    Returns:
        The prompts with what the model wrote.
    """
    rng = np.random.default_rng(seed)
    length = model.input_shape[1]
    texts = [bytearray(prompt) for prompt in prompts]
    rows = np.arange(len(texts))
    for _ in range(count):
        window = np.zeros((len(texts), length), np.int32)
        for row, text in enumerate(texts):
            tail = text[-length:]
            window[row, : len(tail)] = np.frombuffer(tail, np.uint8)
        last = np.array([min(len(text), length) - 1 for text in texts])
        logits = np.asarray(model.predict_on_batch(window))[rows, last].astype(np.float64)
        likeliest = np.argpartition(logits, -10, axis=-1)[:, -10:]
        scores = np.take_along_axis(logits, likeliest, axis=-1) + rng.gumbel(size=likeliest.shape)
        for row, text in enumerate(texts):
            text.append(int(likeliest[row, scores[row].argmax()]))
    return [bytes(text) for text in texts]


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("mesh", "pipe=2,data=2,model=2", "axes and their sizes", flag_values=values)
    flags.DEFINE_bool(
        "sequence",
        False,
        "cut over the axis model what is between cut layers too, along the sequence",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "micro_batches",
        2,
        "micro-batches of a replica's part of a batch, on a mesh with pipe",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer("depth", 2, "blocks", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("width", 128, "features of a token", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("heads", 4, "attention heads", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("length", 64, "bytes in a window", lower_bound=2, flag_values=values)
    flags.DEFINE_integer(
        "batch", 32, "windows in a global batch", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("steps", 500, "training steps", lower_bound=1, flag_values=values)
    flags.DEFINE_float(
        "learning_rate", 4e-3, "highest learning rate of the schedule", flag_values=values
    )
    flags.DEFINE_string(
        "dtype", "float32", "Keras dtype policy, such as mixed_bfloat16", flag_values=values
    )
    flags.DEFINE_float("megabytes", 4.0, "text to read", flag_values=values)
    flags.DEFINE_integer(
        "sample", 120, "bytes to write at the end", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "seed of weights, windows and samples", flag_values=values)
    return values


def _compile(model: keras.Model, steps: int, learning_rate: float) -> None:
    warmup = max(1, steps // 15)
    schedule = keras.optimizers.schedules.CosineDecay(
        learning_rate * 0.1,
        decay_steps=max(1, steps - warmup),
        alpha=0.05,
        warmup_target=learning_rate,
        warmup_steps=warmup,
    )
    model.compile(
        optimizer=keras.optimizers.Adam(schedule, beta_2=0.95),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def main(argv: Sequence[str]) -> float:
    """Runs the example; returns the held-out loss in nats per byte."""
    args = example_flags.parse(_flags(), argv, __doc__)
    axes = example_flags.parse_mesh(args.mesh)
    if args.sequence and "model" not in axes:
        sys.exit(f"--sequence cuts over the axis model. Add it to --mesh. Received: {args.mesh}")
    example_flags.start()
    keras.utils.set_random_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    corpus = text_data.load(args.megabytes)
    print(f"{corpus.files} files: {len(corpus.train):,} bytes, {len(corpus.held_out):,} held out")
    train = text_data.windows(corpus.train, args.steps * args.batch, args.length, rng)
    held_out = text_data.windows(corpus.held_out, 8 * args.batch, args.length, rng)

    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=gpt_model.layout_map() if "model" in axes else {},
        sequence_parallel=args.sequence,
        pipeline=kdist.PipelineConfig(micro_batches=args.micro_batches) if "pipe" in axes else None,
    )
    sizes = gpt_model.GPTSizes(256, args.length, args.width, args.depth, args.heads)
    model = kdist.parallelize(gpt_model.build(sizes, args.dtype), config)
    _compile(model, args.steps, args.learning_rate)
    model.plan().summary()

    speed = TokensPerSecond(args.batch * args.length)
    model.fit(*train, batch_size=args.batch, shuffle=False, callbacks=[speed])
    loss = float(model.evaluate(*held_out, batch_size=args.batch, verbose=0))
    print(f"\nheld-out loss: {loss:.3f} nats per byte, at {speed.speed:,.0f} tokens/s\n")
    if args.sample:
        prompts = [b"def ", b"class ", b"import ", b"    return "]
        for text in generate(model, prompts, args.sample, args.seed)[:2]:
            print(f"{text.decode('utf-8', 'replace')}\n{'-' * 40}")
    return loss


if __name__ == "__main__":
    main(sys.argv)
