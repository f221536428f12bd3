"""Draw small SVG pictures for the report, as text: no library, no randomness, so the same input gives the same bytes.

Colours and fonts come from the page's style sheet (classes `s0`..`s7` for systems, `part0`.. for stacked parts),
which is how one picture serves a light page, a dark page and paper. Every system also has its own marker shape,
so nothing depends on colour alone. Every picture carries its numbers as a text alternative.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax import saxutils

from draftsmith.errors import printable

NUM_COLOURS = 8


@dataclass(frozen=True)
class Series:
    """One line: values[i] belongs to the i-th x label; None leaves a gap. index chooses colour and marker. spreads: the ends of an
    interval around each point, None for one without."""

    label: str
    index: int
    values: tuple[float | None, ...]
    marked: int | None = None  # the position of a ring around one point, e.g. the best K
    spreads: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: its parts from left to right, as (name, class, value), None for what was not measured; a plain bar has one.
    spread: the ends of a whisker."""

    parts: tuple[tuple[str, str, float | None], ...]
    spread: tuple[float, float] | None = None

    @property
    def value(self) -> float:
        """The sum of the parts."""
        return sum(value or 0.0 for *_, value in self.parts)


def line_panel(
    title: str,
    x_labels: Sequence[str],
    series: Sequence[Series],
    *,
    x_title: str,
    show: Callable[[float], str],
    y_range: tuple[float, float],
) -> str:
    """Draw a line per series over the x labels, of which as many are drawn as have room. y_range: shared by panels that are to be
    compared."""
    width, height, left, right, top, bottom = 300, 200, 38, 12, 30, 38
    # About four steps of 1, 2, 2.5 or 5, with rounded ends that hold the range.
    span = max(y_range[1] - y_range[0], 1e-6)
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= 5)
    first, last = math.floor(y_range[0] / step + 1e-9), math.ceil(y_range[1] / step - 1e-9)
    low, high, ticks = first * step, last * step, [i * step for i in range(first, last + 1)]

    def x(i: int) -> float:
        return left + (width - left - right) * ((i + 0.5) / max(len(x_labels), 1))

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - low) / (high - low))

    parts = [_text(left, 16, title, "title")]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{_n(y(tick))}" y2="{_n(y(tick))}"/>')
        # Without idle zeros: 1.50× becomes 1.5×.
        label = re.sub(r"(\.\d*?)0+(?!\d)", r"\1", show(tick)).replace(".×", "×").rstrip(".")
        parts.append(_text(left - 6, y(tick) + 4, label, "tick", "end"))
    most = 6 if max(map(len, x_labels), default=0) > 2 else 16
    every = -(-len(x_labels) // most) or 1
    for i in range((len(x_labels) - 1) % every, len(x_labels), every):
        parts.append(_text(x(i), height - bottom + 16, x_labels[i], "tick", "middle"))
    parts.append(_text((left + width - right) / 2, height - 6, x_title, "tick", "middle"))
    parts += [_line(one, x, y, x_labels, show) for one in series]
    alternative = "; ".join(f"{one.label}: " + ", ".join(_spoken(v, show) for v in one.values) for one in series)
    return _svg(width, height, f"{title}, by {x_title} {', '.join(x_labels)}. {alternative}", parts)


def _line(
    series: Series, x: Callable[[int], float], y: Callable[[float], float], labels: Sequence[str], show: Callable
) -> str:
    path, pen = [], "M"
    for i, value in enumerate(series.values):
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{_n(x(i))} {_n(y(value))}")
        pen = "L"
    intervals = [
        f'<path class="interval" d="M{_n(x(i))} {_n(y(ends[0]))}V{_n(y(ends[1]))}"/>'
        for i, ends in enumerate(series.spreads)
        if ends is not None
    ]
    points = [
        f"<g>{marker(series.index, x(i), y(value))}<title>{_escape(f'{series.label}, {labels[i]}: {show(value)}')}</title></g>"
        for i, value in enumerate(series.values)
        if value is not None
    ]
    ring = ""
    if series.marked is not None and series.values[series.marked] is not None:
        ring = f'<circle class="ring" cx="{_n(x(series.marked))}" cy="{_n(y(series.values[series.marked] or 0.0))}" r="8"/>'
    drawn = "".join((f'<path class="line" d="{" ".join(path)}"/>', *intervals, *points, ring))
    return f'<g class="s{series.index % NUM_COLOURS}">{drawn}</g>'


def bars_panel(
    title: str,
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    show: Callable[[float], str],
    high: float = 0.0,
    reference: tuple[float, str] | None = None,
) -> str:
    """Draw groups of horizontal bars from 0, each with its sum. high: the least end of the axis, shared by panels; reference: a dashed
    line with a name."""
    width, left, right, bar, gap, top = 400, 92, 56, 13, 10, 30
    ends = [end for _, bars in groups for one in bars for end in (one.value, *(one.spread or ()))]
    high = max([*ends, high, reference[0] if reference else 0.0, 1e-9]) * 1.02

    def x(value: float) -> float:
        return left + (width - left - right) * value / high

    parts, y, alternative = [_text(0, 16, title, "title")], float(top), []
    for name, bars in groups:
        short = name if len(name) <= 13 else f"{name[:6]}…{name[-6:]}"  # names often differ in their ends
        parts.append(_text(left - 8, y + bar * len(bars) / 2 + 4, short, "label", "end", tooltip=name))
        for one in bars:
            parts += _bar(name, one, x, y, bar, show)
            spoken = ", ".join(f"{part}: {_spoken(value, show)}" for part, _, value in one.parts)
            alternative.append(f"{name}, {spoken}")
            y += bar
        y += gap
    if reference:
        at = _n(x(reference[0]))
        parts.insert(0, f'<line class="reference" x1="{at}" x2="{at}" y1="{top - 4}" y2="{_n(y - gap + 4)}"/>')
        parts.append(_text(x(reference[0]), y + 6, reference[1], "tick", "middle"))
        y += 14
    return _svg(width, y, f"{title}. {'; '.join(alternative)}", parts)


def _bar(group: str, one: Bar, x: Callable[[float], float], y: float, height: int, show: Callable) -> Iterator[str]:
    start = 0.0
    for name, kind, value in one.parts:
        if value is None:
            yield _text(x(0.0) + 4, y + height - 3, "not measured", "tick")
            return
        size = f'x="{_n(x(start))}" y="{_n(y)}" width="{_n(max(x(value) - x(0.0), 0.0))}" height="{height - 2}"'
        yield f'<rect class="{kind}" {size}><title>{_escape(f"{group}, {name}: {show(value)}")}</title></rect>'
        start += value
    end, middle = x(start), y + height / 2 - 0.5
    if one.spread:
        low, high = _n(x(one.spread[0])), _n(x(one.spread[1]))
        yield f'<path class="whisker" d="M{low} {_n(middle)}H{high}M{low} {_n(middle - 3)}v6M{high} {_n(middle - 3)}v6"/>'
        end = max(end, x(one.spread[1]))
    yield _text(end + 5, y + height - 3, show(start), "value")


def marker(index: int, x: float, y: float) -> str:
    """Return the marker of a system: circle, square, triangle, diamond, then the same hollow."""
    hollow = " hollow" if index % NUM_COLOURS >= 4 else ""
    if index % 4 == 0:
        return f'<circle class="marker{hollow}" cx="{_n(x)}" cy="{_n(y)}" r="3.6"/>'
    shape = {1: "m-3.2-3.2h6.4v6.4h-6.4z", 2: "m0-4.4l4.2 7.4h-8.4z", 3: "m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z"}[index % 4]
    return f'<path class="marker{hollow}" d="M{_n(x)} {_n(y)}{shape}"/>'


def swatch(index: int) -> str:
    """Return a legend's mark of a system: a piece of its line with its marker."""
    body = f'<path class="line" d="M1 7H25"/>{marker(index, 13, 7)}'
    return f'<svg class="swatch s{index % NUM_COLOURS}" viewBox="0 0 26 14" aria-hidden="true">{body}</svg>'


def part_swatch(index: int) -> str:
    """Return a legend's mark of a stacked part."""
    return f'<svg class="swatch" viewBox="0 0 26 14" aria-hidden="true"><rect class="part{index}" width="26" height="14"/></svg>'


def _svg(width: float, height: float, alternative: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {_n(width)} {_n(height)}"'
    return f'<svg class="plot" {size} role="img" aria-label={saxutils.quoteattr(printable(alternative))}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", tooltip: str = "") -> str:
    title = f"<title>{_escape(tooltip)}</title>" if tooltip and tooltip != text else ""
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{_escape(text)}{title}</text>'


def _spoken(value: float | None, show: Callable[[float], str]) -> str:
    return "not measured" if value is None else show(value)


def _n(value: float) -> str:
    """A coordinate with at most one decimal, so that files are small and equal on every machine."""
    return f"{value:.1f}".removesuffix(".0")


def _escape(text: str) -> str:
    """Return text, some of it foreign, as it stands in SVG."""
    return saxutils.escape(printable(text))
