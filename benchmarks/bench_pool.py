"""Groups of home devices out of a pool that comes and goes: what a request costs, and how often it fails over.

    python benchmarks/bench_pool.py [--devices 1000 10000] [--hours 12] [--json [FILE]] [--tiny]

Everything is simulated (benchmarks/pool.py): sessions, links and speeds by published figures, groups of as many devices
as a model of 20 GB needs, a request every five minutes of each owner. Members come from the owner's region or from
anywhere, their slices from the owner or from a mirror, and a spare member with the whole model may stand by.
docs/large-pools.md has the figures' sources, and what they say.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Section, bench, parser_of, table
from benchmarks.pool import ASKS_S, HOUR_S, MIRROR, OWNER, Group, Plans, Pool, Setting

MODEL, TYPE = "qwen3-32b", "q4_k_m"
PROMPT, TOKENS = 128, 128
SAMPLE, REQUESTS = 40, 20  # groups, and requests of each, that are simulated token by token
SETTINGS = ((False, OWNER, False), (True, OWNER, False), (True, MIRROR, False), (True, MIRROR, True))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1000, 10_000], metavar="N", help="of the pool")
    parser.add_argument("--hours", type=float, default=12.0, metavar="H", help="that are simulated (default: 12)")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All pools in all settings."""
    plans = plans_of_model()
    devices, hours = ([80], 6.0) if args.tiny else (args.devices, args.hours)
    settings = [Setting(n, *how, hours) for n in devices for how in (SETTINGS[-1:] if args.tiny else SETTINGS)]
    return {"model": f"{MODEL} {TYPE}", "rows": [measured(setting, plans) for setting in settings]}


def plans_of_model() -> Plans:
    """Plans of the model, of which nothing is downloaded."""
    from edge.advice.candidates import candidates
    from edge.models.catalog import catalog
    from edge.planning.arrange import work_of
    from partition.predict.presets import PartSizes

    [model] = [model for model in catalog() if model.name == MODEL]
    with candidates([model], [TYPE]) as [first]:
        work = work_of(first.file, context=PROMPT + TOKENS, prompt=PROMPT, depth=PROMPT + TOKENS // 2)
        return Plans(work, PartSizes.from_file(first.file), first.shape.weight_bytes)


def measured(setting: Setting, plans: Plans) -> dict[str, Any]:
    """Simulate one setting."""
    began = time.perf_counter()
    pool = Pool(setting, plans, TOKENS)
    pool.run()
    serving = [group for group in pool.groups if group.down_since_s > pool.now]
    seconds, met = [took for took, _ in pool.requests], [failovers for _, failovers in pool.requests]
    n = max(1, len(pool.requests))
    return {
        "devices": setting.devices,
        "setting": setting.describe(),
        "groups": len(pool.start_s),
        "members": mean([len(group.members) for group in serving]),
        "start_s": percentiles(pool.start_s),
        "serves": pool.up_s / max(1e-9, pool.group_s),
        "requests": len(pool.requests),
        "request_s": percentiles(seconds),
        "device_s": pool.device_s / n,
        "failovers": pool.failovers,
        "failovers_an_hour": pool.failovers * HOUR_S / max(1e-9, pool.group_s),
        "failover_s": percentiles(pool.failover_s),
        "met": sum(n > 0 for n in met) / n,
        "sent_bytes": pool.sent_bytes / n,
        **token_times(serving),
        "pairs": setting.devices * (setting.devices - 1) // 2,
        "took_s": time.perf_counter() - began,
    }


def token_times(groups: Sequence[Group]) -> dict[str, Any]:
    """Tokens of some groups by the simulator of plans: of each the 90th percentile of requests."""
    from partition.simulate.arrivals import poisson
    from partition.simulate.simulate import simulate

    arrivals = poisson(1 / ASKS_S, REQUESTS, PROMPT, TOKENS, 0)
    results = [simulate(group.predicted, arrivals) for group in groups[:SAMPLE] if group.predicted is not None]
    return {
        "token_s": percentiles([result.tpot_s.p90 for result in results if result.tpot_s]),
        "ttft_s": percentiles([result.ttft_s.p90 for result in results if result.ttft_s]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 90th percentile; None of nothing."""
    if len(values) < 2:
        return None if not values else {"p50": values[0], "p90": values[0]}
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"p50": tenths[4], "p90": tenths[8]}


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return statistics.fmean(values) if values else 0.0


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""

    def both(values: dict[str, float] | None, unit: float = 1.0, digits: int = 0) -> str:
        return "-" if values is None else f"{values['p50'] / unit:.{digits}f} / {values['p90'] / unit:.{digits}f}"

    header = [
        "devices: setting", "groups", "devices each", "until it serves, min", "token, s", "first token, s",
        "request, s", "device-seconds a request", "failovers an hour of a group", "a failover, s",
        "requests that met one", "group serves", "GB sent a request", "took, s",
    ]  # fmt: skip
    lines = [
        [
            f"{row['devices']:,}: {row['setting']}",
            str(row["groups"]),
            f"{row['members']:.1f}",
            both(row["start_s"], 60),
            both(row["token_s"], digits=2),
            both(row["ttft_s"], digits=1),
            both(row["request_s"]),
            f"{row['device_s']:.0f}",
            f"{row['failovers_an_hour']:.2f}",
            both(row["failover_s"]),
            f"{100 * row['met']:.1f} %",
            f"{100 * row['serves']:.0f} %",
            f"{row['sent_bytes'] / 1e9:.2f}",
            f"{row['took_s']:.0f}",
        ]
        for row in r["rows"]
    ]
    return f"{r['model']}; medians / 90th percentiles.\n\n{table(header, lines)}"


if __name__ == "__main__":
    main()
