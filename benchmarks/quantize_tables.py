"""Format the results of bench_quantize.py as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import MIB, table


def fit(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    parts = [f"{r['model']}, {r['minutes']:g} minutes, {r['threads']} threads; KL in nats a token, on text held out."]
    for which, model in r["models"].items():
        lines = [
            [
                f"{row['size_of']}, {row['size_bytes']:,}",
                f"{row['kl']:.5f}",
                *(_type(row, how) for how in ("with", "without")),
                f"{row['kl'] / min(row.get('kl_with', math.inf), row.get('kl_without', math.inf)):.2f}",
                f"{row['expected']:.5f}",
                f"{row['measured']:.5f}",
                f"{row['exact']}",
                f"{row['took_s']:.0f}",
            ]
            for row in model["rows"]
        ]
        header = ["size of", "fitted", "best type with a matrix", "without", "fitted / best"]
        header += ["calibration text: expected", "measured", "tensors without loss", "s"]
        types = [[t["type"], t["how"], f"{t['size_bytes']:,}", f"{t['perplexity']:.3f}", f"{t['kl']:.5f}"]
                 for t in model["types"]]  # fmt: skip
        parts.append(f"{which}: {model['tokens']:,} tokens scored, perplexity {model['perplexity']:.3f} in F16.")
        parts += [table(header, lines), table(["", "matrix", "bytes", "perplexity", "KL"], types)]
    return "\n\n".join(parts)


def _type(row: Mapping[str, Any], how: str) -> str:
    return f"{row[how]}, {row[f'kl_{how}']:.5f}" if how in row else "-"


def memory(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    disk = r["disk"]
    lines = []
    for row in r["rows"]:
        group = row.get("group", {})
        cells = [row["what"], row["how"]]
        if "failed" in row:
            lines.append([*cells, row["failed"]])
            continue
        bound = row["source_bytes"] / disk.get("read_gbps", float("inf")) / 1e9
        bound += row["target_bytes"] / disk["write_gbps"] / 1e9
        lines.append(
            [
                *cells,
                *(_mib(group.get(key)) for key in ("max_usage_bytes", "anonymous_bytes")),
                f"{row['seconds']:.1f}",
                f"{row['source_bytes'] / row['seconds'] / 1e6:,.0f}",
                f"{row['target_bytes'] / row['seconds'] / 1e6:,.0f}",
                f"{bound:.1f}",
            ]
        )
    header = ["", "how", "most in the group, MiB", "most anonymous, MiB", "s"]
    header += ["read, MB/s", "written, MB/s", "s of the disk alone"]
    rates = ", ".join(f"{name.removesuffix('_gbps')} {rate:.2f} GB/s" for name, rate in disk.items())
    return f"Limit {_mib(r['limit_bytes'])} MiB; the disk alone: {rates}.\n\n" + table(header, lines)


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / MIB:,.0f}"
