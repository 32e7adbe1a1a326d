"""Format the results of bench_serve.py as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import ratio_text, table


def throughput(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for case in r["cases"]:
        baseline = {(row["beside"], row["figure"]): row for row in case["compared"]}
        for side, median in case["median"].items():
            best = case["best"][side]
            cells = [f"{case['streams']}: {side}"]
            for key in ("tokens_per_s", "decode_per_s"):
                cells.append(f"{median[key]:.1f} ({best[key]:.1f})")
                row = baseline.get((side, key))
                cells.append(ratio_text(row) if row else "")
            row = baseline.get((side, "first_s"))
            lines.append([*cells, f"{median['first_s']:.3f}", ratio_text(row) if row else ""])
    header = ["streams: side", "tokens/s, best", "edge serve beside it", "decoding alone, best", "edge serve beside it"]
    return (
        f"{r['prompt']} tokens of prompt and {r['tokens']} of answer each, {r['rounds']} rounds; the limit by"
        f" {r['limit_by']}.\n\n" + table([*header, "first token, s", "edge serve beside it"], lines) + _left_out(r)
    )


def stall(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for side, median in r["median"].items():
        keys = ("calm_gap_s", "gap_s", "calm_first_p99_s", "first_p99_s", "long_first_s")
        lines.append([side, *(f"{median[key]:.3f}" for key in keys), f"{median['requests']:.0f}"])
    header = ["", "longest gap before, s", "beside it", "first token, p99, before", "beside it", "its own first token"]
    return (
        f"{r['streams']} clients with {r['prompt']} and {r['tokens']} tokens a request; a prompt of {r['long']} tokens"
        f" comes. Medians of {r['rounds']} rounds.\n\n" + table([*header, "requests then"], lines) + _left_out(r)
    )


def targets(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for side, median in r["median"].items():
        keys = ("gap_p50_s", "gap_p95_s", "gap_p99_s", "long_first_s", "first_s")
        within = f"{100 * median['within']:.1f} %"
        lines.append([side, within, *(f"{median[key]:.3f}" for key in keys), f"{median['tokens_per_s']:.1f}"])
    header = ["", "gaps within", "gap, median, s", "p95", "p99", "first token of a long prompt, s", "of others"]
    return (
        f"{r['streams']} clients with {r['prompt']} and {r['tokens']} tokens a request, and one with prompts of"
        f" {r['long']}, for {r['seconds']:g} s; the target of gaps is {r['target_ms']:g} ms. Medians of {r['rounds']}"
        " rounds.\n\n" + table([*header, "tokens/s"], lines)
    )


def prefix(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for side, median in r["median"].items():
        cells = [side]
        for name in ("first", "second", "restarted"):
            cells.append(f"{median[f'{name}_s']:.3f} ({median[f'{name}_cached']:.0f})")
        lines.append([*cells, f"{median['start_s']:.2f}"])
    header = ["", "first, s (cached tokens)", "second", "after a restart", "the start itself, s"]
    return (
        f"{r['shared']} tokens that are shared and {r['own']} that are not. Seconds to the first token, medians of"
        f" {r['rounds']} rounds.\n\n" + table(header, lines) + _left_out(r)
    )


def survive(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for name in ("quiet", "disturbed"):
        row = r[name]
        paused = row["paused_s"]
        cells = [name, str(row["answers"]), str(row["lost"]), str(row["wrong"])]
        lines.append([*cells, f"{paused['median']:.2f} ({paused['most']:.2f})" if paused else ""])
    header = ["", "answers", "lost", "not as alone", "longest wait after a kill, s: median (most)"]
    said = [f"lost: {why}" for why in r["disturbed"]["lost_because"]]
    said += [f"wrong: {item}" for row in (r["quiet"], r["disturbed"]) for item in row["wrong_are"]]
    return "\n".join(
        [
            f"{r['streams']} streams for {r['minutes']:g} minutes over two workers, {r['kills']} kills.\n",
            table(header, lines),
            *(["", *said] if said else []),
        ]
    )


def soak(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [[name, str(n), str(r["ended"].get(name, 0))] for name, n in r["begun"].items()]
    lines.append(["all", str(sum(r["begun"].values())), str(sum(r["ended"].values()))])
    rss = ", ".join(f"{words} {n / (1 << 20):.1f} MiB" for words, n in r["rss_bytes"].items())
    return "\n".join(
        [
            f"{r['minutes']:g} minutes; {r['processes']} processes, which hold {rss}.\n",
            table(["", "begun", "ended as they should"], lines),
            *(["", *r["wrong_are"]] if r["wrong_are"] else []),
        ]
    )


def _left_out(r: Mapping[str, Any]) -> str:
    return "".join(f"\n\nLeft out: {name}: {why}." for name, why in r["left_out"].items())
