"""Colors of instructions in charts, by kind and chunk."""

COLORS = {
    "forward": ("#4C78A8", "#9DBBDB"),
    "backward": ("#E08A3C", "#F5C48F"),
    "backward_input": ("#E08A3C", "#F5C48F"),
    "backward_weight": ("#59915B", "#A9D0A6"),
    "communication": ("#8C8C8C", "#8C8C8C"),
    "idle": ("#EEF0F2", "#EEF0F2"),
}
"""Color of the first and of the last chunk, by kind."""


def shade(kind: str, chunk: int, chunks: int) -> str:
    """Fill color as #RRGGBB: later chunks are lighter."""
    dark, light = (_rgb(color) for color in COLORS[kind])
    t = chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(a + (b - a) * t):02X}" for a, b in zip(dark, light))


def text_color(kind: str, chunk: int, chunks: int) -> str:
    """White or near black, whichever reads better on `shade`."""
    # Relative luminance of WCAG 2; 0.2 is where white and near black contrast alike.
    parts = [value / 255 for value in _rgb(shade(kind, chunk, chunks))]
    red, green, blue = (((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return "#FFFFFF" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else "#1F2328"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
