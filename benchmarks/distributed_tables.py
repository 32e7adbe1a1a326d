"""Format the results of bench_distributed.py as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import ratio_text, table

_FIGURES = {"decode_s": "decode", "prefill_tokens_per_s": "prefill", "tokens_per_s": "tokens/s"}


def speed(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    return "\n\n".join(
        [
            f"{r['prompt']} prompt tokens, {r['steps']} steps, {r['rounds']} rounds. While nothing is measured, all"
            f" processes together use {r['idle_cores']:.1%} of a core.",
            _speeds(r["median"]),
            _ratios(r["compared"]),
            _ranks(r["ranks"]),
            f"```\n{r['plan']}\n```",
        ]
    )


def unequal(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    texts = [f"{r['prompt']} prompt tokens, {r['steps']} steps, {r['rounds']} rounds."]
    for case in r["cases"]:
        ratios = {(row["side"], row["figure"]): row for row in case["compared"]}
        lines = []
        for side, result in case["median"].items():
            cells = [side, _held(case["parts"].get(side))]
            for key, text in (
                ("decode_s", f"{result['decode_s'] * 1e3:.1f}"),
                ("prefill_tokens_per_s", f"{result['prefill_tokens_per_s']:.1f}"),
            ):
                row = ratios.get((side, key))
                cells += [text, *([ratio_text(row), row["asked"]] if row else ["", ""])]
            lines.append(cells)
        header = ["", "rank 0's heads, FFN, vocabulary", "decode, ms", "of alone", "asked"]
        texts += [
            f"**{case['device']}, period {case['period_us'] / 1e3:g} ms** ({case['throttled_periods']} periods were"
            f" used up; idle {case['idle_cores']:.1%} of a core)",
            table([*header, "prefill, tokens/s", "of alone", "asked"], lines),
        ]
    return "\n\n".join(texts)


def pipeline(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    return "\n\n".join(
        [
            f"{r['requests']} requests of {r['prompt']} prompt tokens and {r['tokens']} more, {r['rounds']} rounds."
            f" While nothing is measured, all processes together use {r['idle_cores']:.1%} of a core.",
            table(["", "tokens/s"], [[side, f"{item['tokens_per_s']:.2f}"] for side, item in r["median"].items()]),
            _ratios(r["compared"]),
            _ranks(r["ranks"]),
            f"```\n{r['plan']}\n```",
        ]
    )


def load(r: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [part, f"{median_s:.3f}", f"{r['most_s'][part]:.3f}", f"{r['asked_s']:g}" if part == "in all" else ""]
        for part, median_s in r["median_s"].items()
    ]
    lines.append(["`edge chat -p hi`, the whole process", f"{r['chat_wall_s']:.3f}"])
    return f"{r['repeats']} repeats.\n\n" + table(["", "median, s", "most, s", "asked, less than"], lines)


def _speeds(medians: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        [side, f"{median['decode_s'] * 1e3:.2f}", f"{median['prefill_tokens_per_s']:.1f}"]
        for side, median in medians.items()
    ]
    return table(["", "decode, ms/token", "prefill, tokens/s"], lines)


def _ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [[row["side"], _FIGURES[row["figure"]], row["beside"], ratio_text(row), row["asked"]] for row in rows]
    return table(["", "", "beside", "ratio (any round)", "asked"], lines)


def _ranks(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Format the medians of the steps' times on each rank."""
    lines = []
    for side, ranks in result.items():
        for rank, kinds in enumerate(ranks):
            for kind, steps in kinds.items():
                times = [f"{steps[name]['median']:.2f}" for name in ("compute_ms", "communication_ms", "stall_ms")]
                kilobytes = [f"{steps[name]['median'] / 1e3:.1f}" for name in ("sent_bytes", "received_bytes")]
                lines.append([f"{side}, rank {rank}, {kind}", str(steps["steps"]), *times, *kilobytes])
    return table(
        ["", "steps", "compute, ms", "communication, ms", "of it or before it stall, ms", "kB sent", "kB received"],
        lines,
    )


def _held(parts: Sequence[Mapping[str, float]] | None) -> str:
    if parts is None:
        return "all"
    return ", ".join(f"{parts[0][name]:.0%}" for name in ("heads", "ff", "vocab") if name in parts[0])
