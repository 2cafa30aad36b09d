"""Pictures are drawn with matplotlib (the extra `plot`), without pyplot."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float, as_text: str, **options: Any) -> Any:
    """An empty `matplotlib.figure.Figure`; no window opens, and no global state is touched.

    Args:
        width: Inches.
        height: Inches.
        as_text: What shows the same without matplotlib, for the error.
        **options: Further arguments of the figure.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"A picture needs matplotlib: pip install 'kdist[plot]'. As text: {as_text}."
        ) from error
    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure
