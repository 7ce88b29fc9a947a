"""The stages of a run over time, as a picture that needs no script."""

from __future__ import annotations

from ttrain.reports import figures
from ttrain.reports.html import Markup, joined, tag
from ttrain.tracking import RunView

ROW, BAR, TEXT = 34, 9, 13  # pixels: of a stage, of its bar, of the line above it
LEAST = 0.4  # percent of the width: a bar that would else not be seen


def times(view: RunView) -> Markup:
    """A bar for each stage that this run built, from its begin to its end; nothing where none has both on record."""
    bars = [
        (name, max(0.0, stage.ended - stage.seconds - view.started), stage.seconds, stage.status)
        for name, stage in view.stages.items()
        if stage.ended and stage.seconds and not stage.cached
    ]
    if not bars:
        return Markup()
    whole = max(view.seconds or 0.0, *(begin + took for _, begin, took, _ in bars))
    parts = []
    for row, (name, begin, took, status) in enumerate(bars):
        y, share = ROW * row, max(LEAST, 100 * took / whole)
        colour = "failed" if status in ("failed", "crashed", "interrupted") else "bar"
        name_and_time = joined([name, " ", tag("tspan", figures.duration(took), class_="faint")])
        parts += [
            tag("text", name_and_time, x=0, y=y + TEXT),
            tag("rect", x=0, y=y + TEXT + 5, width="100%", height=BAR, rx=3, class_="whole"),
            tag(
                "rect",
                x=f"{100 * begin / whole:.2f}%",
                y=y + TEXT + 5,
                width=f"{share:.2f}%",
                height=BAR,
                rx=3,
                class_=colour,
            ),
        ]
    told = f"{len(bars)} stages over {figures.duration(whole)}"
    return tag("svg", joined(parts), class_="times", height=ROW * len(bars), role="img", aria_label=told)
