"""Links and allreduces beside what the machine, gRPC and the formulas allow. Ranks are processes, links are sockets.

    python benchmarks/bench_transport.py [--only roundtrip|delay|crossover|matrix|allreduce] [--json [FILE]] [--tiny]

| section   | question                                                                                                |
| roundtrip | what does a link add to a bare echo, and an allreduce of two ranks to that?                             |
| delay     | do star, mesh and ring take 2, 1 and 2(N-1) one-way delays?                                             |
| crossover | which allreduce is fastest at which delay, does `auto` pick well, and do the formulas hold?             |
| matrix    | what does everything take, from 4 bytes to 16 MiB, on all links?                                        |

`allreduce` is delay and crossover together. Sides that are compared alternate in short rounds, so that a machine that
drifts does so for all; figures are medians over the rounds of their medians. Without FILE, --json prints only JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import transport_tables
from ranks import Ranks
from report import environment, run_section, write_json

from devices.trust.authority import Authority
from transport.choice import ALGORITHMS, seconds

SCRIPT = Path(__file__).with_name("transport_rank.py")
SECTIONS = ("roundtrip", "delay", "crossover", "matrix")
MESSAGE = 8 << 10  # bytes: one row of 2,048 floats
DELAYS_MS = (1, 2, 5, 10)
CROSSOVER_BYTES, CROSSOVER_BANDWIDTH, CROSSOVER_MS = 32 << 10, 12.5e6, (1, 2, 2.7, 3, 5, 10)
MATRIX_BYTES = (4, 32, 256, 2 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 16 << 20)
MATRIX_SHAPE = (1e-3, 125e6)  # one way, bytes/s
CELL_S, MOST_CELL_S = 0.1, 3.0  # of a cell of the matrix in one round: about, and at most; else it is left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*SECTIONS, "allreduce"))
    parser.add_argument("--rounds", type=int, help="of each section, instead of its own number")
    parser.add_argument("--ranks", type=int, help="of delay and crossover (default: 8), and the most of matrix")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    args = parser.parse_args()
    args.ranks = args.ranks or (3 if args.tiny else 8)
    wanted = {None: SECTIONS, "allreduce": ("delay", "crossover")}.get(args.only, (args.only,))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the ranks, as Ctrl-C does
    result: dict[str, Any] = dict(environment())
    with tempfile.TemporaryDirectory() as folder:
        Authority.create(Path(folder) / "authority", "bench", Path(folder) / "credentials")
        for name in wanted:
            run = partial(globals()[name], Path(folder), args)
            result[name] = run_section(name, run, getattr(transport_tables, name), args.json)
    write_json(result, args.json)


# --- starting and comparing ---


@contextmanager
def group(folder: Path, n: int, connections: Mapping[str, float | None]) -> Iterator[Ranks]:
    """`n` ranks, connected once for each kind. The value: how long TcpLinks poll; None is their default."""
    with Ranks(SCRIPT, n, [str(folder)]) as ranks:
        for kind, poll_s in {"control": 0.0, **connections}.items():
            made_of = "tcp" if kind == "control" else kind
            addresses = ranks.tell("listen", kind=made_of)
            ranks.tell("connect", name=kind, kind=made_of, addresses=addresses, poll_s=poll_s)
        yield ranks


def alternate(sides: Mapping[Any, Callable[[], list[float]]], rounds: int) -> dict[Any, list[float]]:
    """The median of each side in each round. Who goes first alternates; a first round is not counted."""
    found: dict[Any, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            median = statistics.median(sides[name]())
            if turn:
                found[name].append(median)
    return found


def trips(ranks: Ranks, name: str, n_bytes: int, n: int) -> list[float]:
    """Seconds of messages there and back."""
    times: list[float] = ranks.tell("trips", name=name, n_bytes=n_bytes, n=n, warm_up=min(n, 10))[1]
    return times


def costs(ranks: Ranks, name: str, algorithm: str, n_bytes: int, n: int) -> list[float]:
    """Seconds of allreduces: from the agreed start until the last rank has the sum.

    Not from one rank's own start, because a rank in the middle of a ring is done when it has passed the sum on, and not
    back to back, because ranks that are done early would begin the next one. And from a start at an agreed time: ranks
    come out of a barrier one after the other, and those that come early would have sent already when the last begins,
    so that one delay would seem shorter than it is. The wait for that start is not counted; clocks are the machine's.
    """
    answers = ranks.tell("allreduce", name=name, algorithm=algorithm, n_floats=n_bytes // 4, n=n)
    done = [a for a in answers if a]
    return [max(a["ended"][i] for a in done) - max(a["at"][i] for a in done) for i in range(n)]


def periods(ranks: Ranks, name: str, algorithm: str, n_bytes: int, n: int) -> list[float]:
    """Seconds of one allreduce in a row of them, as one figure: single ones swing, because ranks take turns waiting."""
    both = ranks.tell("back_to_back", name=name, algorithm=algorithm, n_floats=n_bytes // 4, n=n, warm_up=min(n, 10))
    return [(max(ended for _, ended in both) - max(began for began, _ in both)) / n]


# --- roundtrip ---

ROUNDTRIP_ROWS = (  # side, words, beside which, asked at most
    ("bare", "bare blocking TCP echo", None, None),
    ("bare together", "the same, both on one core", "bare", None),
    ("bare-polling", "bare polling TCP echo", "bare", None),
    ("tcp", "TcpLink", "bare", 1.1),
    ("tcp", "TcpLink", "bare-polling", None),
    ("tls", "TcpLink with TLS 1.3", "bare", None),
    ("unix", "TcpLink over a Unix socket", "bare", None),
    ("memory", "MemoryLink, two threads", "bare", None),
    ("bare-grpc", "bare gRPC stream echo", "bare", None),
    ("grpc", "GrpcLink", "bare-grpc", 1.15),
    ("mesh", "allreduce, mesh", "bare", 1.3),
    ("star", "allreduce, star", "bare", 1.3),
    ("mesh", "allreduce, mesh", "star", 1.0),
    ("mesh in a row", "mesh, one after the other", "bare", 1.3),
    ("star in a row", "star, one after the other", "bare", 1.3),
    ("mesh in a row", "mesh, one after the other", "star in a row", 1.0),
)


def roundtrip(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """8 KiB there and back between two processes on loopback."""
    rounds, n = (2, 5) if args.tiny else (args.rounds or 25, 200)
    kinds = ("bare", "bare-polling", "tcp", "tls", "unix", "bare-grpc", "grpc")
    with group(folder, 2, dict.fromkeys(kinds)) as ranks:

        def placed(place: str, measure: Callable[..., list[float]], *what: str) -> Callable[[], list[float]]:
            def run() -> list[float]:
                ranks.tell("pin", place=place)
                return measure(ranks, *what, MESSAGE, n)

            return run

        # Left alone, a bare echo takes a third of the time once the scheduler puts both processes on one core. Devices
        # share none, so neither do ranks here. gRPC has more threads than one a process, and goes where it wants.
        sides = {
            "bare together": placed("together", trips, "bare"),
            **{kind: placed("apart", trips, kind) for kind in kinds[:5]},
            **{kind: placed("free", trips, kind) for kind in (*kinds[5:], "memory")},
            **{how: placed("apart", costs, "tcp", how) for how in ("mesh", "star")},
            **{f"{how} in a row": placed("apart", periods, "tcp", how) for how in ("mesh", "star")},
        }
        found = alternate(sides, rounds)
    medians = {name: statistics.median(times) for name, times in found.items()}
    compared = []
    for side, words, beside, asked in ROUNDTRIP_ROWS:
        row: dict[str, Any] = {"side": side, "words": words, "beside": beside, "asked": asked}
        if beside:
            row["ratio"] = medians[side] / medians[beside]
            row["ratio_of_rounds"] = statistics.median(a / b for a, b in zip(found[side], found[beside], strict=True))
        compared.append(row)
    return {"rounds": rounds, "operations": n, "median_s": medians, "compared": compared, "rounds_s": found}


# --- delay ---


def delay(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """4 bytes: nothing but delays. Links do not poll: with more ranks than cores that keeps others from theirs.

    The floor is where a straight line through all delays meets d = 0; a slope other than asked shows all the same.
    """
    rounds, n, delays = (1, 2, DELAYS_MS[:1]) if args.tiny else (args.rounds or 9, 5, DELAYS_MS)
    rows: list[dict[str, Any]] = []
    slopes = {}
    with group(folder, args.ranks, {"shaped": 0.0}) as ranks:
        for algorithm in ALGORITHMS:

            def at(ms: float, algorithm: str = algorithm) -> Callable[[], list[float]]:
                def run() -> list[float]:
                    ranks.tell("shape", delay_s=ms / 1e3, bandwidth=None)
                    return costs(ranks, "shaped", algorithm, 4, n)

                return run

            found = alternate({ms: at(ms) for ms in (0, *delays)}, rounds)
            medians = {ms: statistics.median(times) for ms, times in found.items()}
            floor_s = medians[0]
            if len(delays) > 1:
                # What stays when the delays shrink away. The cost at d = 0 itself is more: there all ranks want the
                # cores in the same moment, and a delay hides a part of that.
                line = statistics.linear_regression(delays, [medians[ms] * 1e3 for ms in delays])
                slopes[algorithm] = line.slope
                floor_s = line.intercept / 1e3
            expected = round(seconds(algorithm, 4, 4, args.ranks, 1.0, float("inf")))  # delays
            rows += [
                {
                    "algorithm": algorithm,
                    "delay_ms": ms,
                    "at_0_s": medians[0],
                    "floor_s": floor_s,
                    "median_s": medians[ms],
                    "delays": (medians[ms] - floor_s) * 1e3 / ms,
                    "delays_above_0": (medians[ms] - medians[0]) * 1e3 / ms,
                    "expected": expected,
                    "rounds_s": found[ms],
                }
                for ms in delays
            ]
    return {"ranks": args.ranks, "rounds": rounds, "operations": n, "rows": rows, "slopes": slopes}


# --- crossover ---


def crossover(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Delay against bandwidth, all algorithms and `auto`, which goes by figures measured over the same links."""
    rounds, n, delays = (1, 1, CROSSOVER_MS[:1]) if args.tiny else (args.rounds or 7, 3, CROSSOVER_MS)
    rows = []
    with group(folder, args.ranks, {"shaped": 0.0}) as ranks:
        for ms in delays:
            ranks.tell("shape", delay_s=ms / 1e3, bandwidth=CROSSOVER_BANDWIDTH)
            figures = link_figures(ranks, 0.05 if args.tiny else 0.5)
            asked = [
                {"n_floats": CROSSOVER_BYTES // 4, "latency_s": latency_s, "bandwidth": bandwidth}
                for latency_s, bandwidth in figures
            ]
            agreed = ranks.tell_each("agree", asked)

            def run(algorithm: str) -> Callable[[], list[float]]:
                return lambda: costs(ranks, "shaped", algorithm, CROSSOVER_BYTES, n)

            found = alternate({a: run(a) for a in (*ALGORITHMS, "auto")}, rounds)
            medians = {name: statistics.median(times) for name, times in found.items()}
            best = min(("star", "mesh", "ring"), key=lambda a: medians[a])
            rows.append(
                {
                    "delay_ms": ms,
                    "median_s": medians,
                    "predicted_s": {
                        a: seconds(a, CROSSOVER_BYTES, CROSSOVER_BYTES, args.ranks, ms / 1e3, CROSSOVER_BANDWIDTH)
                        for a in ALGORITHMS
                    },
                    "measured_latency_s": max(latency_s for latency_s, _ in figures),
                    "measured_bandwidth": min(b for _, b in figures),
                    "picked": agreed[0]["picked"],
                    "why": agreed[0]["why"],
                    "best_of_three": best,
                    "auto_by_best": medians["auto"] / medians[best],
                    "rounds_s": found,
                }
            )
    return {"ranks": args.ranks, "rounds": rounds, "operations": n, "rows": rows}


def link_figures(ranks: Ranks, seconds_: float) -> list[tuple[float, float]]:
    """What neighbours measure over their shaped link, by rank; one pair after the other, undisturbed."""
    figures: list[tuple[float, float]] = [(0.0, 1e18)] * ranks.n
    for a in range(0, ranks.n - 1, 2):
        asked: list[dict[str, Any] | None] = [None] * ranks.n
        asked[a], asked[a + 1] = {"peer": a + 1, "seconds": seconds_}, {"peer": a, "seconds": seconds_}
        figures[a] = figures[a + 1] = tuple(ranks.tell_each("figures", asked)[a])
    return figures


# --- matrix ---


def matrix(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every link, size and algorithm; polling only where every rank has a core."""
    rounds, sizes = (1, MATRIX_BYTES[:7:3]) if args.tiny else (args.rounds or 3, MATRIX_BYTES)
    parts, loopback = [], 0.0
    for n_ranks in [n for n in (2, 4, 8) if n <= args.ranks]:
        poll_s = None if n_ranks <= (os.cpu_count() or 1) else 0.0
        kinds: dict[str, float | None] = {"tcp": poll_s, "tls": poll_s, "grpc": None, "shaped": 0.0}
        with group(folder, n_ranks, {**kinds, **({"bare": None} if n_ranks == 2 else {})}) as ranks:
            ranks.tell("shape", delay_s=MATRIX_SHAPE[0], bandwidth=MATRIX_SHAPE[1])
            if n_ranks == 2:
                n_bytes = (4 if args.tiny else 512) << 20
                times = [ranks.tell("blast", name="bare", n_bytes=n_bytes)[1] for _ in range(rounds + 1)]
                loopback = n_bytes / statistics.median(times[1:])
                kinds |= {"memory": None}
                echoes = Cells(lambda side, size, n: trips(ranks, side, size, n), rounds)
                parts.append({"what": "round trip", "ranks": 2, **echoes.run(("bare", *kinds), sizes)})
            for kind in kinds:
                sums = Cells(lambda side, size, n, kind=kind: costs(ranks, kind, side, size, n), rounds)
                parts.append({"what": "allreduce", "link": kind, "ranks": n_ranks, **sums.run(ALGORITHMS, sizes)})
    return {
        "rounds": rounds,
        "most_cell_s": MOST_CELL_S,
        "loopback_bytes_per_s": loopback,
        "sizes": sizes,
        "parts": parts,
    }


class Cells:
    """A table of sizes and sides, filled from small to large; what would take too long is left out."""

    def __init__(self, measure: Callable[[str, int, int], list[float]], rounds: int) -> None:
        """measure(side, bytes, n): the seconds of each of n operations."""
        self._measure, self._rounds = measure, rounds

    def run(self, sides: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
        """median_s: by side, then by size; None where it was left out."""
        medians: dict[str, list[float | None]] = {side: [] for side in sides}
        at_most = dict.fromkeys(sides, CELL_S / 50)  # seconds of one, guessed from the size before: in proportion
        for i, size in enumerate(sizes):
            running = {}
            for side in sides:
                if i and (last := medians[side][-1]) is not None:
                    at_most[side] = last * size / sizes[i - 1]
                if at_most[side] * 2 <= MOST_CELL_S:
                    running[side] = self._cell(side, size, min(50, max(2, int(CELL_S / at_most[side]))))
                else:
                    at_most[side] = float("inf")
            found = alternate(running, self._rounds)
            for side in sides:
                medians[side].append(statistics.median(found[side]) if side in found else None)
        return {"median_s": medians}

    def _cell(self, side: str, size: int, n: int) -> Callable[[], list[float]]:
        return lambda: self._measure(side, size, n)


if __name__ == "__main__":
    main()
