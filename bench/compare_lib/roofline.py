"""A roofline picture, as an SVG that needs nothing else and follows the reader's light or dark scheme."""
import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 24, 56
COLOURS = ["#3b82f6", "#e07b39", "#1f9e89", "#d1495b", "#8b6fd6", "#a38a1f", "#c65fa5", "#6b8e23"]
ROOFS = {"f32_gops": "f32", "bf16_gops": "bf16", "int8_gops": "int8"}

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.back { fill: #fff } .grid { stroke: #e4e4e7; fill: none } .roof { stroke: #333; stroke-width: 1.6; fill: none }
.band { fill: #333; opacity: .1 } .path { fill: none; stroke-width: 1.2; opacity: .4 } .mark { stroke: #fff; stroke-width: 1 }
.key { fill: #71717a }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #16181d } .grid { stroke: #2c2f36 } .roof { stroke: #ddd } .band { fill: #ddd; opacity: .13 }
.mark { stroke: #16181d } .key { fill: #a1a1aa }
}"""


@dataclass
class Point:
    scheme: str
    kind: str  # "decode, 4 rows", or "prompt of 512"
    rows: int  # 0: a prompt
    intensity: float  # operations per byte of weights
    gops: float
    share: float  # of the limit that its own run measured


def points_of(lines):
    """Of every line its decoding, and of every scheme the prompt of its line with the fewest sequences."""
    points = []
    for line in lines:
        rows = line["batch"]
        points.append(Point(line["scheme"], f"decode, {rows} row{'s' if rows > 1 else ''}", rows,
                            line["step_gop"] / line["step_gb"], line["tg_tps"] / rows * line["step_gop"],
                            line["tg_share_of_limit"]))
    for scheme in dict.fromkeys(line["scheme"] for line in lines):
        line = min((line for line in lines if line["scheme"] == scheme), key=lambda line: line["batch"])
        points.append(Point(scheme, f"prompt of {line['prompt']}", 0, line["pass_gop"] / line["pass_gb"],
                            line["pp_share_of_limit"] * line["peak_gops"], line["pp_share_of_limit"]))
    return points


class Scale:
    """A logarithmic axis from `low` to `high` between two places of the picture."""

    def __init__(self, low, high, start, end):
        self.low, self.high, self.start, self.end = low, high, start, end
        self.unit = (end - start) / math.log10(high / low)  # length of a decade

    def __call__(self, value):
        return self.start + math.log10(value / self.low) * self.unit

    def ticks(self):
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]


def text(x, y, content, anchor="start", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def mark(rows, x, y, colour, steps):
    """A shape for each number of rows: circle, square, triangle, … and a diamond for prompts."""
    size = 5.0
    corners = {"square": [(-1, -1), (1, -1), (1, 1), (-1, 1)], "triangle": [(0, -1.25), (1.2, 0.9), (-1.2, 0.9)],
               "down": [(0, 1.25), (1.2, -0.9), (-1.2, -0.9)], "diamond": [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)]}
    names = ["circle", "square", "triangle", "down"]
    shape = "diamond" if rows == 0 else names[min(steps.index(rows), len(names) - 1)]
    fill = f'fill="{colour}"' if colour else 'class="key"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {fill}'
    places = " ".join(f"{x + size * 0.9 * dx:.1f},{y + size * 0.9 * dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon points="{places}" {fill}'


def axes(x, y):
    parts = []
    for tick in x.ticks():
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "operations per byte of weights", "middle"))
    parts.append(text(18, HEIGHT / 2, "Gop/s", "middle", f' transform="rotate(-90 18 {HEIGHT / 2})"'))
    return parts


def roofs(lines, x, y):
    """The slope as a band over the bandwidths of all runs, and a flat roof for each kind of arithmetic."""
    slow, fast = (f(line["read_gbps"] for line in lines) for f in (min, max))
    peaks = {name: max(line.get(key, 0) for line in lines) for key, name in ROOFS.items()}
    top = max(peaks.values())
    band = [(x.low, slow * x.low), (top / slow, top), (top / fast, top), (x.low, fast * x.low)]
    parts = ['<polygon class="band" points="' + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in band) + '"/>']
    start = max(x.low, y.low / fast)
    parts.append(f'<path class="roof" d="M{x(start):.1f} {y(start * fast):.1f}L{x(top / fast):.1f} {y(top):.1f}"/>')
    for name, peak in peaks.items():
        if peak > 0:
            parts.append(f'<path class="roof" d="M{x(peak / fast):.1f} {y(peak):.1f}H{WIDTH - RIGHT}"/>')
            parts.append(text(WIDTH - RIGHT - 4, y(peak) - 6, f"{name} {peak:.0f} Gop/s", "end"))
    speed = f"read {fast:.0f} GB/s" if fast < 1.02 * slow else f"read {slow:.0f} to {fast:.0f} GB/s"
    at = math.sqrt(start * top / fast)
    angle = -math.degrees(math.atan2(-y.unit, x.unit))
    place = f"{x(at):.1f} {y(at * fast):.1f}"
    parts.append('<text text-anchor="middle" '
                 f'transform="translate({place}) rotate({angle:.1f}) translate(0 -8)">{speed}</text>')
    return parts


def legend(schemes, points, steps):
    """Below the roofs, where intensity is high and rates are low, no engine has anything to show."""
    kinds = {point.rows: point.kind for point in sorted(points, key=lambda point: point.rows or math.inf)}
    line_height, bottom = 19, HEIGHT - BOTTOM - 16
    parts = []
    columns = ((WIDTH - RIGHT - 130, [(name, rows, None) for rows, name in kinds.items()]),
               (WIDTH - RIGHT - 270, [(name, None, colour) for name, colour in schemes.items()]))
    for column, entries in columns:
        for i, (name, rows, colour) in enumerate(entries):
            at = bottom - line_height * (len(entries) - 1 - i)
            if rows is None:
                parts.append(f'<path d="M{column - 8} {at - 4}h16" stroke="{colour}" stroke-width="4"/>')
            else:
                parts.append(mark(rows, column, at - 4, None, steps) + "/>")
            parts.append(text(column + 16, at, name))
    return parts


def draw(lines):
    """The picture of lines of `switchyard bench --json`, each with "scheme". Errors: KeyError, ValueError."""
    points = points_of(lines)
    if not points:
        raise ValueError("no line")
    schemes = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(point.scheme for point in points))}
    steps = sorted({point.rows for point in points if point.rows})
    top = max(line.get(key, 0) for line in lines for key in ROOFS)
    x = Scale(min(p.intensity for p in points) / 1.6, max(p.intensity for p in points) * 2.5, LEFT, WIDTH - RIGHT)
    y = Scale(min(p.gops for p in points) / 2.5, max([top] + [p.gops for p in points]) * 1.6, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>',
             f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
             f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
             f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
             *axes(x, y), '<g clip-path="url(#plot)">', *roofs(lines, x, y)]
    for name, colour in schemes.items():
        own = sorted((point for point in points if point.scheme == name), key=lambda point: point.intensity)
        places = " ".join(f"{x(point.intensity):.1f},{y(point.gops):.1f}" for point in own)
        parts.append(f'<polyline class="path" points="{places}" stroke="{colour}"/>')
    for point in points:
        hint = (f"{point.scheme}, {point.kind}: {point.intensity:.3g} operations a byte, {point.gops:.0f} Gop/s, "
                f"{100 * point.share:.0f} % of its limit")
        shape = mark(point.rows, x(point.intensity), y(point.gops), schemes[point.scheme], steps)
        tag = shape[1:shape.index(" ")]
        parts.append(f'<g class="mark">{shape}><title>{escape(hint)}</title></{tag}></g>')
    parts += ["</g>", *legend(schemes, points, steps), "</svg>"]
    return "\n".join(parts) + "\n"
