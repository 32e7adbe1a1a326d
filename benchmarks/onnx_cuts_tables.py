"""What bench_onnx_cuts.py measured, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = "| cut after | payload | stage 0 | stage 1 | links | expected | measured | ratio | one at a time | in flight |"


def table(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"{result['cpu_count']} cores, Python {result['python']}, {versions}"]
    for network, found in (*result.get("cuts", {}).items(), *result.get("gain", {}).items()):
        lines += ["", f"{network}, batch {found['batch']}, two devices of half a core", "", *_cuts(found)]
    if "delay" in result:
        lines += ["", *_delay(result["delay"])]
    if "thin" in result:
        found = result["thin"]
        mbps = 8e-6 * found["bytes_per_s"]
        lines += ["", f"mobilenet_v2, batch 8, {mbps:.3g} Mbit/s between the devices", "", *_cuts(found)]
        plain = result["cuts"]["mobilenet_v2"]
        lines.append(
            f"On loopback the best moves {plain['best_payload_bytes']:,} bytes, here {found['best_payload_bytes']:,}."
            f" Left out: cuts of more than {found['left_out_above_bytes']:,} bytes."
        )
    if "wire" in result:
        lines += ["", *_wire(result["wire"])]
    return "\n".join(lines)


def _cuts(found: Mapping[str, Any]) -> list[str]:
    lines = [_HEAD, "| --- " + "| ---: " * 9 + "|"]
    for row in found["rows"]:
        first, second, links = (f"{1e3 * s:.1f} ms" for s in (*row["stage_s"], max(row["transfer_s"])))
        lines.append(
            f"| {row['label']} | {row['payload_bytes']:,} | {first} | {second} | {links} |"
            f" {row['expected_per_s']:.2f}/s | {row['measured_per_s']:.2f}/s |"
            f" {row['measured_per_s'] / row['expected_per_s']:.2f} | {1 / row['latency_s']:.2f}/s |"
            f" {row['in_flight']:.0f} |"
        )
    of, gain = found["measured_of_expected"], found["pipelined_over_sequential"]
    lines += [
        "",
        f"Best measured after {found['best']}, expected after {found['best_expected']}, {found['apart']} cuts apart."
        f" Measured of expected: {of['best']:.3f} at the best ({of['least']:.3f} to {of['most']:.3f})."
        f" Pipelined over one at a time: {gain['best']:.2f} at the best, {gain['most']:.2f} at most.",
    ]
    return lines


def _delay(found: Mapping[str, Any]) -> list[str]:
    return [
        f"mobilenet_v2, batch 8, {1e3 * found['delay_s']:.0f} ms on each of {found['crossings']} ways",
        "",
        "| | latency | throughput | in flight |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {name} | {1e3 * found[name]['latency_s']:.1f} ms | {found[name]['measured_per_s']:.2f}/s |"
            f" {found[name]['in_flight']:.0f} |"
            for name in ("plain", "far")
        ),
        "",
        f"Latency grew by {found['latency_grew_by_delays']:.2f} delays; throughput is {found['throughput_ratio']:.3f}"
        " of that on loopback.",
    ]


def _wire(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{found['n_bytes']:,} bytes of floats from one process to another on loopback, medians of {found['repeats']}",
        "",
        "| processes | as | time | of a bare copy's speed |",
        "| --- | --- | ---: | ---: |",
        *(
            f"| {placed} | {name} | {1e6 * s:.0f} us | {one['of_bare_copy'].get(name, 1.0):.2f} |"
            for placed, one in found["placed"].items()
            for name, s in one["median_s"].items()
        ),
    ]
