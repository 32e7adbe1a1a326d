"""Links and allreduces compared with the limits of the machine, of gRPC and of the formulas. Ranks are processes.

    python benchmarks/bench_transport.py [--only roundtrip|matrix] [--json [FILE]] [--tiny]

| section   | question                                                                                                |
| roundtrip | how much time does a link add to a bare echo, and an allreduce of two ranks to the link?                |
| matrix    | how long does each operation take, from 4 bytes to 16 MiB, on all links?                                |

The compared sides alternate in short rounds, so that changes of the machine's speed affect all of them. Figures are
medians over the rounds of each round's median. Without FILE, --json prints only JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import transport_tables
from benchmarks.harness import Section, alternate, bench, parser_of
from benchmarks.processes import Ranks
from devices.trust.authority import Authority
from transport.choice import ALGORITHMS

SCRIPT = Path(__file__).with_name("transport_rank.py")
MESSAGE = 8 << 10  # bytes: one row of 2,048 floats
MATRIX_BYTES = (4, 32, 256, 2 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 16 << 20)
MATRIX_SHAPE = (1e-3, 125e6)  # one way, bytes/s
CELL_S, MOST_CELL_S = 0.1, 3.0  # of a cell of the matrix in one round: about, and at most; else it is left out


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--ranks", type=int, help="the most of matrix (default: 8)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.ranks = args.ranks or (3 if args.tiny else 8)
    args.credentials = folder  # of all ranks, for TLS
    Authority.create(folder / "authority", "bench", folder / "credentials")
    return {}


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


def in_turn(sides: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """The median of each side in each round."""
    result = alternate({name: partial(_median, run) for name, run in sides.items()}, rounds)
    return {name: [item["s"] for item in rounds] for name, rounds in result.items()}


def _median(run: Callable[[], list[float]]) -> dict[str, float]:
    return {"s": statistics.median(run())}


def trips(ranks: Ranks, name: str, n_bytes: int, n: int) -> list[float]:
    """Seconds of messages there and back."""
    times: list[float] = ranks.tell("trips", name=name, n_bytes=n_bytes, n=n, warm_up=min(n, 10))[1]
    return times


def costs(ranks: Ranks, name: str, algorithm: str, n_bytes: int, n: int) -> list[float]:
    """Seconds of allreduces: from the agreed start until the last rank has the sum.

    Sums do not follow back to back, because a rank that is done early would begin the next one. All start at an agreed
    time: ranks come out of a barrier one after the other, and an early rank would have sent already when the last one
    begins. The wait for that start is not counted; clocks are the machine's.
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
    with group(args.credentials, 2, dict.fromkeys(kinds)) as ranks:

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
        result = in_turn(sides, rounds)
    medians = {name: statistics.median(times) for name, times in result.items()}
    compared = []
    for side, words, baseline, target in ROUNDTRIP_ROWS:
        row: dict[str, Any] = {"side": side, "words": words, "beside": baseline, "asked": target}
        if baseline:
            row["ratio"] = medians[side] / medians[baseline]
            row["ratio_of_rounds"] = statistics.median(
                a / b for a, b in zip(result[side], result[baseline], strict=True)
            )
        compared.append(row)
    return {"rounds": rounds, "operations": n, "median_s": medians, "compared": compared, "rounds_s": result}


# --- matrix ---


def matrix(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every link, size and algorithm; polling only where every rank has a core."""
    rounds, sizes = (1, MATRIX_BYTES[:7:3]) if args.tiny else (args.rounds or 3, MATRIX_BYTES)
    parts, loopback = [], 0.0
    for n_ranks in [n for n in (2, 4, 8) if n <= args.ranks]:
        poll_s = None if n_ranks <= (os.cpu_count() or 1) else 0.0
        kinds: dict[str, float | None] = {"tcp": poll_s, "tls": poll_s, "grpc": None, "shaped": 0.0}
        with group(args.credentials, n_ranks, {**kinds, **({"bare": None} if n_ranks == 2 else {})}) as ranks:
            ranks.tell("shape", delay_s=MATRIX_SHAPE[0], bandwidth=MATRIX_SHAPE[1])
            if n_ranks == 2:
                n_bytes = (4 if args.tiny else 512) << 20
                times = [ranks.tell("blast", name="bare", n_bytes=n_bytes)[1] for _ in range(rounds + 1)]
                loopback = n_bytes / statistics.median(times[1:])
                kinds |= {"memory": None}
                echoes = Cells(partial(trips, ranks), rounds)
                parts.append({"what": "round trip", "ranks": 2, **echoes.run(("bare", *kinds), sizes)})
            for kind in kinds:
                sums = Cells(partial(costs, ranks, kind), rounds)
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
            result = in_turn(running, self._rounds)
            for side in sides:
                medians[side].append(statistics.median(result[side]) if side in result else None)
        return {"median_s": medians}

    def _cell(self, side: str, size: int, n: int) -> Callable[[], list[float]]:
        return lambda: self._measure(side, size, n)


SECTIONS = {
    "roundtrip": Section(roundtrip, transport_tables.roundtrip),
    "matrix": Section(matrix, transport_tables.matrix),
}

if __name__ == "__main__":
    main()
