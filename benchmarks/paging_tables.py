"""Format the results of bench_paging.py as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import MIB, ratio_text, table


def limit(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    cases = r["cases"]
    speed = [[*_name(case), *_streaming(case), r["asked_of_bound"]] for case in cases]
    return "\n\n".join(
        [
            table(["", "limit, MiB", *_STREAMING, "asked"], speed),
            table(["", "limit, MiB", *_MEMORY], [[*_name(case), *_memory(case)] for case in cases]),
            table(["", "limit, MiB", *_PAGING], [[*_name(case), *_paging(case["median"])] for case in cases]),
            *_failures(cases),
        ]
    )


def predicted(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    rows = [
        [
            row["model"],
            f"{row['budget_bytes'] / MIB:,.0f}",
            f"{row['paged_bytes'] / MIB:,.0f}",
            f"{1 / row['predicted_s']:.3g}",
            f"{1 / row['measured_s']:.3g}",
            f"{row['predicted_s'] / row['measured_s']:.2f}",
        ]
        for row in r["placements"]
    ]
    columns = ["", "budget, MiB", "on disk, MiB", "predicted tokens/s", "measured tokens/s", "measured / predicted"]
    median = f"Median error of the tokens per second: {100 * r['median_error']:.0f} %; asked: {r['asked_of_error']}"
    return f"{table(columns, rows)}\n\n{median}."


def mmap(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines, memory = [], []
    for row in r["cases"]:
        paged, mapped = row["paged"], row["mapped"]
        ratio = ratio_text(row, 2) if "ratio" in row else "-"
        lines.append(
            [
                *_name(paged),
                f"{paged['model_bytes'] / MIB:,.0f}",
                f"{paged['streamed_bytes'] / MIB:,.0f}",
                _ms(paged["median"], "decode_s"),
                _megabytes(paged["median"], "kernel_bytes_per_token"),
                _ms(mapped["median"], "decode_s"),
                _megabytes(mapped["median"], "kernel_bytes_per_token"),
                ratio,
                row["asked"],
                f"{paged['of_bound']:.3f}" if "of_bound" in paged else "-",
            ]
        )
        memory += [[f"{first['model']}, {side}", _name(first)[1], *_memory(first)] for side, first in _sides(row)]
    header = ["", "limit, MiB", "model, MiB", "streamed, MiB", "paged, ms/token", "read, MB", "mapped, ms/token"]
    header += ["read, MB", "mapped / paged", "asked", "paged, of the disk bound"]
    failures = _failures([first for row in r["cases"] for _, first in _sides(row)])
    return "\n\n".join([table(header, lines), table(["", "limit, MiB", *_MEMORY], memory), *failures])


def keeps_up(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines, paging = [], []
    for case in r["cases"]:
        figure, ratio = case["figure"], case["compared"]
        lines.append(
            [
                case["words"],
                f"{case['budget_bytes'] / MIB:,.0f}",
                f"{case['streamed_share']:.1%}",
                _ms(case["median"]["resident"], figure),
                _ms(case["median"]["paged"], figure),
                ratio_text(ratio),
                r["asked"],
                f"{case['needed_gbps']:.2f}",
                f"{case['disk_gbps']:.2f}",
            ]
        )
        paging.append([case["words"], *_paging(case["median"]["paged"])])
    header = ["", "budget, MiB", "streamed", "resident, ms", "paged, ms", "paged / resident", "asked", "GB/s needed"]
    header.append("the disk's")
    return f"{r['rounds']} rounds.\n\n" + table(header, lines) + "\n\n" + table(["", *_PAGING], paging)


_STREAMING = (
    "ms/token (worst mean)",
    "prefill, ms",
    "streamed, MB/token",
    "read, MB/token",
    "GB/s",
    "the disk's GB/s",
    "of the disk bound",
)
_MEMORY = ("most in use, MiB", "of the limit", "peak RSS, MiB", "said before, MiB", "at the limit", "killed", "load, s")
_PAGING = ("read, MB", "disk, GB/s", "stall, ms", "hidden, ms", "hit rate")


def _name(case: Mapping[str, Any]) -> list[str]:
    return [case["model"], f"{case['limit_bytes'] / MIB:,.0f}"]


def _sides(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(side, row[side]) for side in ("paged", "mapped")]


def experts(result: Mapping[str, Any]) -> str:
    lines = []
    for case in result["cases"]:
        paged, alone = case["median"], case["resident"]
        disk_ms = paged["bytes_per_token"] / case["disk_gbps"] / 1e6
        lines.append(
            [
                case["skew"],
                f"{paged.get('hit_rate', 1.0):.1%}",
                _megabytes(paged, "bytes_per_token"),
                f"{disk_ms:,.1f} ({case['disk_gbps']:.2f} GB/s)",
                f"{alone['decode_s'] * 1e3:,.1f} ({case['best_resident'] * 1e3:,.1f})",
                f"{paged['decode_s'] * 1e3:,.1f} ({case['best'] * 1e3:,.1f})",
                f"{paged['stall_ms']:,.1f}",
                f"{alone['decode_s'] / paged['decode_s']:.2f}",
                f"{case['steal_s']:.2f}",
            ]
        )
    header = ["routers", "hits", "MB/token", "the disk's ms", "resident, ms (best)", "paged, ms (best)", "waited, ms"]
    return table([*header, "resident / paged", "steal, s"], lines)


def _streaming(case: Mapping[str, Any]) -> list[str]:
    median = case["median"]
    if not median:
        return ["-"] * len(_STREAMING)
    bound = "-"
    if "of_bound" in case:
        bound = f"{case['of_bound']:.3f} ({case['of_bound_least']:.3f} to {case['of_bound_most']:.3f})"
    worst = max(item["run"]["mean_s"] for item in case["rounds"])
    return [
        f"{median['decode_s'] * 1e3:,.1f} ({worst * 1e3:,.1f})",
        _ms(median, "prefill_s"),
        f"{case['streamed_bytes'] / 1e6:,.0f}",
        _megabytes(median, "kernel_bytes_per_token"),
        f"{case['achieved_gbps']:.2f}" if "achieved_gbps" in case else "-",
        f"{case['disk_gbps']:.2f} ({case['disk_setting']})",
        bound,
    ]


def _memory(case: Mapping[str, Any]) -> list[str]:
    group, median, said = case.get("group"), case["median"], case["memory"]
    loads = [item["loaded"]["load_s"] for item in case["rounds"] if "loaded" in item]
    return [
        f"{group['max_usage_bytes'] / MIB:,.1f}" if group else "-",
        f"{group['max_usage_bytes'] / case['limit_bytes']:.1%}" if group else "-",
        f"{median['peak_rss_bytes'] / MIB:,.1f}" if median else "-",
        f"{said['total_bytes'] / MIB:,.1f}" if said else "-",
        f"{group['failcnt']:,}" if group and group["failcnt"] else "-",
        f"{case['killed']} of {len(case['rounds'])}",
        f"{max(loads):.1f}" if loads else "-",
    ]


def _paging(result: Mapping[str, float] | None) -> list[str]:
    def number(key: str, text: str) -> str:
        return text.format(result[key]) if result and key in result else "-"

    return [
        _megabytes(result, "bytes_per_token"),
        number("disk_gbps", "{:.2f}"),
        number("stall_ms", "{:,.1f}"),
        number("hidden_ms", "{:,.1f}"),
        number("hit_rate", "{:.1%}"),
    ]


def _failures(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{case['model']} in {_name(case)[1]} MiB: {text}." for case in cases for text in case["failed"]]


def _ms(result: Mapping[str, float] | None, key: str) -> str:
    return f"{result[key] * 1e3:,.1f}" if result else "-"


def _megabytes(result: Mapping[str, float] | None, key: str) -> str:
    return f"{result[key] / 1e6:,.0f}" if result and key in result else "-"
