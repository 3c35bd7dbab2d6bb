"""Occupancy over time as an SVG, written by hand: of each run a panel with the congested queue and the spillway."""

from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 860, 190, 76, 24, 64, 56
QUEUE_COLOUR, SPILL_COLOUR, GRID, INK = "#2f6db3", "#d9822b", "#dddddd", "#222222"
POINTS_MAX = 2000  # of a curve


def ticks(most, wanted=5):
    """Round numbers from 0 to at least `most`."""
    step, factor = 1.0, 0
    raw = most / wanted or 1
    while step > raw:
        step /= 10
    while step * 10 <= raw:
        step *= 10
    factor = next(f for f in (1, 2, 5, 10) if step * f >= raw)
    step *= factor
    count = 0
    while count * step < most:
        count += 1
    return [step * n for n in range(max(count, 1) + 1)]


def text(x, y, words, size=12, anchor="start", colour=INK, more=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{more}>'
            f"{escape(words)}</text>")


def line(x1, y1, x2, y2, colour=GRID, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def curve(samples, column, x_of, y_of, colour):
    stride = -(-len(samples) // POINTS_MAX) or 1
    points = " ".join(f"{x_of(s[0]):.1f},{y_of(s[column] / 1000):.1f}" for s in samples[::stride])
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def panel(top, run, times, amounts, limit_kb):
    width, bottom = WIDTH - LEFT - RIGHT, top + PANEL

    def x_of(seconds):
        return LEFT + width * seconds / times[-1]

    def y_of(kilobytes):
        return bottom - PANEL * kilobytes / amounts[-1]
    out = [text(LEFT, top - 8, run["title"], 13, more=' font-weight="bold"')]
    for amount in amounts:
        out += [line(LEFT, y_of(amount), WIDTH - RIGHT, y_of(amount)),
                text(LEFT - 6, y_of(amount) + 4, f"{amount:g}", 11, "end")]
    for seconds in times:
        out += [line(x_of(seconds), bottom, x_of(seconds), bottom + 4, INK),
                text(x_of(seconds), bottom + 17, f"{seconds:g}", 11, "middle")]
    out += [line(LEFT, bottom, WIDTH - RIGHT, bottom, INK), line(LEFT, top, LEFT, bottom, INK),
            line(LEFT, y_of(limit_kb), WIDTH - RIGHT, y_of(limit_kb), QUEUE_COLOUR, ' stroke-dasharray="4 4"'),
            text(20, top + PANEL / 2, "kB", 12, "middle"),
            curve(run["samples"], 2, x_of, y_of, SPILL_COLOUR), curve(run["samples"], 1, x_of, y_of, QUEUE_COLOUR)]
    return out


def draw(title, runs, limit_bytes):
    """The SVG's text. runs: dicts with title and samples, which are (seconds, bytes in the queue, bytes in the
    spillway). All panels share both axes."""
    samples = [s for run in runs for s in run["samples"]] or [(0, 0, 0)]
    times = ticks(max(max(s[0] for s in samples), 0.1), 8)
    amounts = ticks(max(max(max(s[1], s[2]) for s in samples), limit_bytes) / 1000)
    height = TOP + len(runs) * (PANEL + GAP) + 6
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
           'font-family="sans-serif">', f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           text(LEFT, 22, title, 14, more=' font-weight="bold"')]
    x = WIDTH - RIGHT - 330
    for colour, words, dash in ((QUEUE_COLOUR, "queue", ""), (QUEUE_COLOUR, "its limit", ' stroke-dasharray="4 4"'),
                                (SPILL_COLOUR, "in the spillway", "")):
        out += [line(x, 40, x + 24, 40, colour, ' stroke-width="2"' + dash), text(x + 30, 44, words)]
        x += 110
    for n, run in enumerate(runs):
        out += panel(TOP + 10 + n * (PANEL + GAP), run, times, amounts, limit_bytes / 1000)
    out += [text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 8, "time since the transfer began (s)", 12, "middle"),
            "</svg>"]
    return "\n".join(out) + "\n"
