"""`kdist.callbacks.PipelineTimeline`: what a pipeline really did, and when."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

LOG = "pipeline_bubble"


class PipelineTimeline(keras.callbacks.Callback):
    """Records the executed timeline of a pipeline's training steps.

    Per stage and micro-batch: forward, backward (or its halves), communication, idle. The bubble,
    the share of the stages' time in which they wait, goes into the logs of each epoch as
    `pipeline_bubble`, and is printed beside the formula's when training ends. Reading the clocks
    costs some microseconds per instruction.

    Args:
        paths: Files for the last recorded step: `.png` (needs the extra `plot`), `.json` (Chrome
            trace, for chrome://tracing or ui.perfetto.dev) or `.txt`; one or several.
        replica: The replica to look at.
        verbose: 0 prints nothing.

    Attributes:
        timeline: A `kdist.pipeline.Timeline` of the last step of the last epoch, in seconds.

    Raises:
        ValueError: When training starts, if the model is no pipeline, or has fewer replicas.

    Example:
        >>> model = kdist.PipelineModel(build_model(), stages=2, micro_batches=4)
        >>> model.compile("adam", "mse")
        >>> timeline = kdist.callbacks.PipelineTimeline("step.json")
        >>> model.fit(x, y, callbacks=[timeline])
        >>> print(timeline.chart())
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        replica: int = 0,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        self.paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self.replica = replica
        self.verbose = verbose
        self.timeline: Any = None
        self._recorder: Any = None

    def set_model(self, model: keras.Model) -> None:
        """Attaches to the model before its training function is made."""
        from kdist.api.attached import attached
        from kdist.runtime.recorder import TimelineRecorder

        super().set_model(model)
        parallel = attached(model)
        replicas = parallel.compute.data_size
        if parallel.config.pipeline is None or not 0 <= self.replica < replicas:
            raise ValueError(
                "PipelineTimeline is for a model trained as a pipeline (kdist.PipelineModel, or "
                f"ParallelConfig(pipeline=...)), and a replica below {replicas}. "
                f"Received: model={model.name!r}, replica={self.replica}"
            )
        self._recorder = parallel.recorder = TimelineRecorder()
        model.train_function = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the last step."""
        self.timeline = self._recorder.timeline(self.replica)
        if isinstance(logs, dict):
            logs[LOG] = float(self.timeline.bubble)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Prints and saves, and takes the clocks out of the step again."""
        from kdist.api.attached import attached

        attached(self.model).recorder = None
        self.model.train_function = None
        if self.timeline is None:
            return
        chart = self.chart()
        if self.verbose:
            print(f"{chart.title}: {chart.caption}")
        for path in self.paths:
            chart.save(path)

    def chart(self) -> Any:
        """The last recorded step as a `kdist.pipeline.Chart`: print it, or save it."""
        from kdist.pipeline.chart import Chart
        from kdist.pipeline.formulas import formula_of

        schedule, timeline = self._recorder.schedule, self.timeline
        title = f"{schedule.name} · {schedule.num_stages} stages"
        title += f" · {schedule.micro_batches} micro-batches · executed"
        caption = f"{float(timeline.total) * 1e3:.1f} ms · bubble {float(timeline.bubble):.1%}"
        formula = formula_of(schedule)
        if formula is not None:
            caption += f" (formula for equal stages {float(formula):.1%})"
        return Chart(timeline, title, caption, seconds=1.0)
