"""PEERS.md, the bar chart, and the figures in the README, from what `peers.py` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

Cell = dict[str, Any]
"""`figures` (ms a step), `first` (s), `rates` (rows/s), `said`, or the `problem`."""

Found = dict[str, dict[str, Cell]]
"""By the title of the table and the name of the peer."""

FAULTS = "faults"
# How the names of a family's ways begin; the best of them stands for it.
FAMILIES = {
    "mirrax": ("mirrax",),
    "JAX by hand": ("JAX", "NumPy"),
    "TensorFlow": ("TensorFlow",),
    "PyTorch DDP": ("PyTorch",),
    "Keras 3": ("Keras", "Grain"),
}
BEGIN, END = "<!-- make bench-peers writes this -->", "<!-- to here -->"


def write_report(found: Found, facts: dict[str, Any], folder: Path) -> None:
    """Writes PEERS.md and peers.svg."""
    folder.mkdir(exist_ok=True)
    lines = [
        "# mirrax beside its peers",
        "",
        "Written by `make bench-peers`"
        + (" with QUICK=1, so short and noisy" if facts["quick"] else "")
        + ".",
        "",
        f"{facts['date']}, {facts['machine']}, load {facts['load']:.1f} at the start. mirrax's side: {_versions(facts['versions'])}. "
        f"The peers': {_versions(facts['peers'])}.",
        "",
        "Each step is a whole one: the next batch from the library's own input, forward, backward, reduction, optimizer (SGD",
        "with momentum unless the title names another), and the loss of the global batch. Medians of interleaved rounds, with the",
        "quartiles; the first step includes compiling. Peers are written as their documentation recommends, with the settings",
        "that make them faster. PyTorch's replicas are two processes everywhere.",
        "",
        "## In short",
        "",
        "The best way of each library; details below.",
        "",
        BEGIN,
        *_summary(found),
        END,
    ]
    for title, cells in found.items():
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += _faults(cells) if title == FAULTS else _table(cells)
    (folder / "PEERS.md").write_text("\n".join(lines) + "\n")
    (folder / "peers.svg").write_text(_chart(found))


def update_readme(readme: Path, report: Path) -> None:
    """Puts the chart and the short table of PEERS.md into the README, at their place."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = report.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    folder = report.parent.name
    readme.write_text(
        f"{before}{BEGIN}\n![A whole training step, in ms]({folder}/peers.svg)\n\n{table}\n\n"
        f"Medians of one interleaved run on CPUs. [All of it, with faults]({folder}/PEERS.md).\n"
        f"{END}{after}"
    )


# Tables -------------------------------------------------------------------------------


def _table(cells: dict[str, Cell]) -> list[str]:
    is_input = any("rates" in cell for cell in cells.values())
    unit = "rows/s" if is_input else "ms a step"
    ratio = "mirrax is faster by" if is_input else "/ mirrax"
    head = [
        f"| | {unit} | quartiles | {ratio} | first step, s |",
        "|---|---|---|---|---|",
    ]
    ours = cells.get("mirrax", {})
    return head + [_row(name, cell, ours) for name, cell in cells.items()]


def _faults(cells: dict[str, Cell]) -> list[str]:
    lines = ["| what | peer | what happened |", "|---|---|---|"]
    for key, cell in cells.items():
        fault, peer = key.split(": ", 1)
        lines.append(f"| {fault} | {peer} | {_cell(cell.get('said', 'not tried'))} |")
    return lines


def _versions(versions: dict[str, str]) -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    )


def _row(name: str, cell: Cell, ours: Cell) -> str:
    figures = _figures(cell)
    first = f"{cell['first']:.2f}" if "first" in cell else ""
    if not figures:
        problem = _cell(cell.get("problem", "not measured"))
        return f"| {name} | {problem} | | | {first} |"
    low, median, high = np.percentile(figures, [25, 50, 75])
    values = [_shown(cell, value) for value in (median, low, high)]
    own, against = _figures(ours), ""
    if own and name != "mirrax":
        ratio = np.median(own) / median if "rates" in cell else median / np.median(own)
        against = f"{ratio:.2f}"
    return (
        f"| {name} | {values[0]} | {values[1]} to {values[2]} | {against} | {first} |"
    )


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def _figures(cell: Cell) -> list[float]:
    """What was measured, if all went well."""
    return [] if cell.get("problem") else cell.get("figures") or cell.get("rates") or []


def _shown(cell: Cell, value: float) -> str:
    return f"{value:,.0f}" if "rates" in cell else f"{value:.3g}"


def _best(cells: dict[str, Cell], family: str) -> tuple[str, Cell] | None:
    """The fastest way of a family, or one that failed; None if it has none here."""
    ways = [(n, c) for n, c in cells.items() if n.startswith(FAMILIES[family])]

    def slowness(way: tuple[str, Cell]) -> float:
        figures = _figures(way[1])
        if not figures:
            return float("inf")
        median = float(np.median(figures))
        return -median if "rates" in way[1] else median

    return min(ways, key=slowness, default=None)


def _summary(found: Found) -> list[str]:
    """The best of each library in each loop, as a table."""
    lines = [f"| ms a step | {' | '.join(FAMILIES)} |", "|---" * 6 + "|"]
    for title, cells in found.items():
        if title == FAULTS:
            continue
        is_input = any("rates" in cell for cell in cells.values())
        shown = []
        for family in FAMILIES:
            name, cell = _best(cells, family) or ("", {})
            figures = _figures(cell)
            text = _shown(cell, float(np.median(figures))) if figures else ""
            if name and not figures:
                text = "fails" if cell.get("problem") else "not measured"
            is_other = family != "mirrax" and not name.startswith(family.split()[0])
            shown.append(f"{name.split()[0]} {text}" if text and is_other else text)
        title = f"{title}: rows/s" if is_input else title
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return lines


# Chart --------------------------------------------------------------------------------

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .head { font-size: 14px; font-weight: 600 }
  .quiet { fill: #59636e } .ours { fill: #0969da } .peer { fill: #afb8c1 }
  .page { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .quiet { fill: #9198a1 } .ours { fill: #4493f8 }
    .peer { fill: #545d68 } .page { fill: #0d1117 }
  }
"""
WIDTH, LABEL, LONGEST, BAR = 440, 96, 190, 18


def _chart(found: Found) -> str:
    """Bars of each library's best, one group for each loop, in two columns."""
    groups = [
        (title, bars)
        for title, cells in found.items()
        if title != FAULTS and len(bars := _bars(cells)) > 1
    ]
    parts, heights = [], [64, 64]
    for k, (title, bars) in enumerate(groups):
        left, top = 20 + (k % 2) * WIDTH, heights[k % 2]
        parts.append(_text(left, top, title, "title"))
        longest = max(bars.values())
        for i, (family, ms) in enumerate(bars.items()):
            y, width = top + 8 + i * BAR, max(1.0, LONGEST * ms / longest)
            kind = "ours" if family == "mirrax" else "peer"
            parts.append(_text(left + LABEL - 8, y + 12, family, anchor="end"))
            parts.append(
                f'<rect class="{kind}" x="{left + LABEL}" y="{y + 1}" '
                f'width="{width:.1f}" height="{BAR - 5}" rx="2"/>'
            )
            words = f"{ms:.3g} ms"
            if family != "mirrax" and "mirrax" in bars:
                words += f" ({ms / bars['mirrax']:.2f}x)"
            parts.append(_text(left + LABEL + width + 6, y + 12, words, "quiet"))
        heights[k % 2] = top + 8 + len(bars) * BAR + 30
    height, width = max(heights) - 10, 2 * WIDTH + 20
    head = _text(20, 30, "A whole training step: shorter is faster", "head")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n'
        + "\n".join([head, *parts])
        + "\n</svg>\n"
    )


def _bars(cells: dict[str, Cell]) -> dict[str, float]:
    """Milliseconds of each library's best way."""
    found = {family: _best(cells, family) for family in FAMILIES}
    return {
        family: float(np.median(way[1]["figures"]))
        for family, way in found.items()
        if way is not None and _figures(way[1]) and "figures" in way[1]
    }


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
