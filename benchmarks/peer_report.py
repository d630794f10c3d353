"""PEERS.md and the bar chart, from what `peers.py` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

Cell = dict[str, Any]
"""`figures` (ms a step), `first` (s), `rates` (rows/s), `said`, or the `problem`."""

COLOURS = {"mirrax": "#1f6feb", "JAX": "#8b949e", "TensorFlow": "#f0883e"}
COLOURS |= {"PyTorch": "#da3633", "Keras": "#a371f7"}


def write_report(
    found: dict[str, dict[str, Cell]], facts: dict[str, Any], folder: Path
) -> None:
    """Writes PEERS.md and peers.svg."""
    folder.mkdir(exist_ok=True)
    lines = [
        "# mirrax beside its peers",
        "",
        "Written by `make bench-peers`"
        + (" with QUICK=1, so short and noisy" if facts["quick"] else "")
        + ".",
        "",
        f"{facts['date']}, {facts['machine']}. mirrax's side: {_versions(facts['versions'])}. "
        f"The peers': {_versions(facts['peers'])}.",
        "",
        "Each step is a whole one: the next batch from the library's own input, forward, backward, reduction, SGD with",
        "momentum, and the loss of the global batch. Medians of interleaved rounds, with the quartiles; the first step",
        "includes compiling. Peers are written as their documentation recommends, with the settings that make them faster.",
        "PyTorch's replicas are two processes everywhere.",
    ]
    for title, cells in found.items():
        lines += ["", f"## {title}", ""]
        if title == "faults":
            lines += ["| what | peer | what happened |", "|---|---|---|"]
            for key, cell in cells.items():
                fault, peer = key.split(": ", 1)
                lines.append(f"| {fault} | {peer} | {cell['said']} |")
            continue
        is_input = any("rates" in cell for cell in cells.values())
        unit = "rows/s" if is_input else "ms a step"
        ratio = "mirrax is faster by" if is_input else "/ mirrax"
        lines += [
            f"| | {unit} | quartiles | {ratio} | first step, s |",
            "|---|---|---|---|---|",
        ]
        lines += [
            _row(name, cell, cells.get("mirrax", {})) for name, cell in cells.items()
        ]
    (folder / "PEERS.md").write_text("\n".join(lines) + "\n")
    (folder / "peers.svg").write_text(_chart(found))


def _versions(versions: dict[str, str]) -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    )


def _row(name: str, cell: Cell, ours: Cell) -> str:
    figures = cell.get("figures") or cell.get("rates")
    first = f"{cell['first']:.2f}" if "first" in cell else ""
    if cell.get("problem") or not figures:
        return f"| {name} | {cell.get('problem', 'not measured')} | | | {first} |"
    low, median, high = np.percentile(figures, [25, 50, 75])
    form = "{:,.0f}" if "rates" in cell else "{:.3g}"
    values = [form.format(v) for v in (median, low, high)]
    own, against = ours.get("figures") or ours.get("rates"), ""
    if own and name != "mirrax":
        ratio = np.median(own) / median if "rates" in cell else median / np.median(own)
        against = f"{ratio:.2f}"
    return (
        f"| {name} | {values[0]} | {values[1]} to {values[2]} | {against} | {first} |"
    )


def _chart(found: dict[str, dict[str, Cell]]) -> str:
    """Times over mirrax's, one group of bars for each loop: shorter is faster."""
    bars: list[str] = []
    y, left, scale, most = 46, 250, 130, 4.0
    for title, cells in found.items():
        ours = cells.get("mirrax", {}).get("figures")
        if not ours:
            continue
        bars.append(_text(10, y, title, "bold"))
        y += 8
        for name, cell in cells.items():
            if not cell.get("figures") or cell.get("problem"):
                continue
            ratio = float(np.median(cell["figures"]) / np.median(ours))
            width = min(ratio, most) * scale
            colour = next((c for k, c in COLOURS.items() if name.startswith(k)), "#777")
            bars.append(_text(left - 8, y + 12, name, anchor="end"))
            bars.append(
                f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="12" fill="{colour}"/>'
            )
            shown = f"{np.median(cell['figures']):.3g} ms" + (
                " (cut)" if ratio > most else ""
            )
            bars.append(_text(left + width + 6, y + 12, shown))
            y += 17
        y += 24
    head = _text(
        10,
        20,
        "Whole training step, ms; bars are relative to mirrax, shorter is faster",
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y}" '
        f'font-family="sans-serif" font-size="12"><rect width="900" height="{y}" fill="white"/>'
        + head
        + "".join(bars)
        + "</svg>\n"
    )


def _text(
    x: float, y: float, text: str, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
