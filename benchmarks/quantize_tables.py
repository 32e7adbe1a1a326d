"""The figures of bench_quantize.py as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transport_tables import table

from edge.pictures.quality import Point, size_against_divergence

_DRAWN = ("q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0")
_MIB = 1 << 20


def head(r: Mapping[str, Any]) -> str:
    """What all sections have in common."""
    return f"{r['machine']}; {r['versions']}.\n\n```sh\n{r['command']}\n```\n"


def types(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    header = ["", "bytes", "perplexity", "mean KL", "99 % KL", "same top token"]
    header += [f"{word}, with matrix" for word in header[1:]]
    with_matrix = {row["name"]: row for row in r["with"]}
    lines = [["f16", f"{r['reference']['size_bytes']:,}", f"{r['reference']['perplexity']:.4f}"]]
    lines += [[row["name"], *_quality(row), *_quality(with_matrix[row["name"]])] for row in r["without"]]
    return f"{r['tokens']:,} tokens scored.\n\n" + table(header, lines)


def fit(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [
            row["choice"],
            f"{row['budget_bytes']:,}",
            f"{row['of_budget']:.2%}",
            f"{row['expected']:.5f}",
            f"{row['measured']:.5f}",
            f"{row['mean_divergence']:.5f}",
            *_beside(row, "with"),
            *_beside(row, "without"),
            f"{row['took_s']:.1f}",
        ]
        for row in r["rows"]
    ]
    header = ["types", "budget, bytes", "of it", "calibration text: expected", "measured", "held out"]
    for words in ("with", "without"):
        header += [f"best uniform, {words} matrix", "its KL", "fitted / it"]
    uniform = {name: {row["name"]: row for row in rows} for name, rows in r["uniform"].items()}
    others = []
    for name, row in uniform["with"].items():
        without = uniform["without"].get(name)
        figure = f"{without['mean_divergence']:.5f}" if without else "-"
        others.append([name, f"{row['size_bytes']:,}", f"{row['mean_divergence']:.5f}", figure])
    return "\n\n".join(
        [
            f"{r['tokens']:,} tokens scored; KL in nats a token.",
            table([*header, "s"], lines),
            table(["", "bytes", "mean KL, with matrix", "without"], others),
            *_slow(r["rows"]),
        ]
    )


def trained(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    parts = [f"{r['model']}, {r['minutes']:g} minutes, {r['threads']} threads; KL in nats a token, on text held out."]
    for which, one in r["models"].items():
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
            for row in one["rows"]
        ]
        header = ["size of", "fitted", "best type with a matrix", "without", "fitted / best"]
        header += ["calibration text: expected", "measured", "tensors without loss", "s"]
        types = [[t["type"], t["how"], f"{t['size_bytes']:,}", f"{t['perplexity']:.3f}", f"{t['kl']:.5f}"]
                 for t in one["types"]]  # fmt: skip
        parts.append(f"{which}: {one['tokens']:,} tokens scored, perplexity {one['perplexity']:.3f} in F16.")
        parts += [table(header, lines), table(["", "matrix", "bytes", "perplexity", "KL"], types)]
    return "\n\n".join(parts)


def _type(row: Mapping[str, Any], how: str) -> str:
    return f"{row[how]}, {row[f'kl_{how}']:.5f}" if how in row else "-"


def draw_fit(r: Mapping[str, Any], path: Path) -> None:
    """Fitted files beside the usual types, as a picture."""
    usual = [one for one in r["uniform"]["with"] if one["name"] in _DRAWN]
    fitted = [(f"{row['budget_bytes'] / 1e6:.1f} MB", row) for row in r["rows"] if row["choice"] == "default"]
    points = [Point(one["name"], one["size_bytes"], one["mean_divergence"], uniform=True) for one in usual]
    points += [Point(f"--size {name}", row["size_bytes"], row["mean_divergence"]) for name, row in fitted]
    size_against_divergence(points, None, path, reference="the bundled model in F16")


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


def kernels(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    single = [
        [one["type"], f"{one['decode']:.1f}", f"{one['prefill']:.1f}", "repacked" if one["repacked"] else ""]
        for one in r["types"]
    ]
    lines = [
        [
            row["mix"],
            f"{row['size_bytes'] / _MIB:,.0f}",
            f"{1e3 * row['kernels_s']:.2f}",
            f"{1e3 * row['decode_s']:.2f}",
            f"{row['decode_s'] / row['kernels_s']:.2f}",
            f"{1e3 * row['kernels_prefill_s']:.2f}",
            f"{1e3 * row['prefill_s']:.2f}",
            f"{row['prefill_s'] / row['kernels_prefill_s']:.2f}",
        ]
        for row in r["rows"]
    ]
    header = ["", "MiB", "decode: kernels say, ms", "measured", "ratio"]
    header += ["prefill: kernels say, ms/token", "measured", "ratio"]
    words = [
        f"{kind}: {len(r[key])} of {r['pairs']} pairs in another order{': ' if r[key] else ''}{', '.join(r[key])}."
        for kind, key in (("Decode", "decode_swapped"), ("Prefill", "prefill_swapped"))
    ]
    return "\n\n".join(
        [
            f"{r['threads']} threads, {r['rounds']} rounds.",
            table(["", "decode, 1e9 weights/s", "prefill", "layout"], single),
            table(header, lines),
            *words,
        ]
    )


def _quality(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['size_bytes']:,}",
        f"{row['perplexity']:.4f}",
        f"{row['mean_divergence']:.5f}",
        f"{row['divergence_99']:.4f}",
        f"{row['top_1_agreement']:.2%}",
    ]


def _beside(row: Mapping[str, Any], kind: str) -> list[str]:
    best = row.get(kind)
    return [best["name"], f"{best['mean_divergence']:.5f}", f"{row[f'of_{kind}']:.3f}"] if best else ["none", "", ""]


def _slow(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for types that were chosen and are slow here."""
    slow = {small: large for row in rows for small, large in row["slow"].items()}
    words = ", ".join(f"{small} ({large} is faster)" for small, large in slow.items())
    return [f"Chosen by default, though slower here than a larger one: {words}."] if slow else []


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / _MIB:,.0f}"
