"""The figures of bench_transport.py as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transport.choice import ALGORITHMS

LARGE = 128 << 10  # bytes, from where bandwidth counts


def roundtrip(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for row in r["compared"]:
        cells = [row["words"], f"{r['median_s'][row['side']] * 1e6:.1f}"]
        if row["beside"]:
            asked = f"{row['asked']:g}" if row["asked"] else ""
            cells += [row["beside"], f"{row['ratio']:.2f}", f"{row['ratio_of_rounds']:.2f}", asked]
        lines.append(cells)
    return f"8 KiB, two processes, loopback; {r['rounds']} rounds of {r['operations']}.\n\n" + table(
        ["", "median, us", "beside", "ratio", "median of the rounds' ratios", "asked, at most"], lines
    )


def delay(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [
            row["algorithm"],
            f"{row['delay_ms']:g}",
            f"{row['median_s'] * 1e3:.2f}",
            f"{row['expected']} d",
            f"{row['floor_s'] * 1e3:.2f}",
            f"{row['delays']:.2f} d",
            f"{row['delays'] / row['expected'] - 1:+.1%}",
            f"{row['at_0_s'] * 1e3:.2f}",
            f"{row['delays_above_0'] / row['expected'] - 1:+.1%}",
        ]
        for row in r["rows"]
    ]
    slopes = ", ".join(f"{algorithm} {slope:.2f} d" for algorithm, slope in r["slopes"].items())
    header = ["", "d, ms", "measured, ms", "asked", "floor, ms", "less the floor", "off (asked: 10 %)"]
    return (
        f"4-byte allreduce, {r['ranks']} ranks on shaped links over TCP; {r['rounds']} rounds of {r['operations']}. "
        "The floor is what a straight line through all d says for d = 0; beside it what d = 0 itself takes.\n\n"
        + table([*header, "at d = 0, ms", "off, less that"], lines)
        + (f"\n\nSlopes: {slopes}." if slopes else "")
    )


def crossover(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for row in r["rows"]:
        took, said = row["median_s"], row["predicted_s"]
        cells = [f"{row['delay_ms']:g}", *(f"{took[a] * 1e3:.1f} ({said[a] * 1e3:.1f})" for a in ALGORITHMS)]
        cells += [f"{took['auto'] * 1e3:.1f}", row["picked"], row["best_of_three"], f"{row['auto_by_best']:.2f}"]
        cells += ["ring" if took["ring"] < took["star"] else "star"]
        lines.append(cells)
    header = ["d, ms", *ALGORITHMS, "auto", "it picked", "best of star, mesh, ring", "auto beside it (asked: 1.1)"]
    return (
        f"32 KiB, {r['ranks']} ranks, each device 100 Mbit/s; {r['rounds']} rounds of {r['operations']}. Milliseconds, "
        "in brackets what the formula says. Asked: ring before star at 1 ms, star before ring from 5 ms on.\n\n"
        + table([*header, "of star and ring"], lines)
    )


def matrix(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    loopback = r["loopback_bytes_per_s"]
    texts = [
        f"Microseconds. From 128 KiB on, GB/s beside them: all bytes that cross links in one direction, by the time. "
        f"A bare TCP socket on loopback sends {loopback / 1e9:.2f} GB/s here. Shaped: TCP, 1 ms one way, 1 Gbit/s a "
        f"device. {r['rounds']} rounds; `-`: would take more than {r['most_cell_s']:g} s."
    ]
    for part in r["parts"]:
        echo, n = part["what"] == "round trip", part["ranks"]
        lines = []
        for i, size in enumerate(r["sizes"]):
            cells = [_size(size)]
            for side, medians in part["median_s"].items():
                # A mesh sends everything to everybody; the others bring N-1 tensors there and N-1 back.
                sent = 2 * size if echo else (n if side == "mesh" else 2) * (n - 1) * size
                cells.append(_cell_text(medians[i], sent if size >= LARGE else 0))
            lines.append(cells)
        title = "Round trip, 2 ranks" if echo else f"Allreduce, {n} ranks, {part['link']}"
        texts += [f"**{title}**", table(["", *part["median_s"]], lines)]
    return "\n\n".join(texts)


def _cell_text(took: float | None, sent: int) -> str:
    if took is None:
        return "-"
    return f"{took * 1e6:,.0f}" + (f" ({sent / took / 1e9:.2f})" if sent else "")


def _size(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" if n >= 1 << 10 else f"{n} B"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is words, the others figures."""
    padded = [[*line, *[""] * (len(header) - len(line))] for line in lines]
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *padded]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
