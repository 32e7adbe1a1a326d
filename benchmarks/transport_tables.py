"""Format the results of bench_transport.py as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import table

LARGE = 128 << 10  # bytes, from where bandwidth counts


def roundtrip(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for row in r["compared"]:
        cells = [row["words"], f"{r['median_s'][row['side']] * 1e6:.1f}"]
        if row["beside"]:
            target = f"{row['asked']:g}" if row["asked"] else ""
            cells += [row["beside"], f"{row['ratio']:.2f}", f"{row['ratio_of_rounds']:.2f}", target]
        lines.append(cells)
    return f"8 KiB, two processes, loopback; {r['rounds']} rounds of {r['operations']}.\n\n" + table(
        ["", "median, us", "beside", "ratio", "median of the rounds' ratios", "asked, at most"], lines
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
