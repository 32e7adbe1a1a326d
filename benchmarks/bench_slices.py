"""Sending a slice to a worker compared with the bandwidth of the link, alternating in one run.

    python benchmarks/bench_slices.py [--megabytes 600] [--rounds 3] [--wires loopback,1000] [--json]

A wire is loopback, or a bandwidth in Mbit/s. With a bandwidth, the two devices are network namespaces joined by a
virtual cable of that speed (root and iproute2) and members of one cluster, and everything is encrypted. The link's
bandwidth is what `edge link` measures between two workers over gRPC, which carries slices, and over TCP; the disk's
bandwidth is that of writing a file. Each round sends new bytes; then it loads the same slice again, and it continues a
transfer that was interrupted at a random point.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import EDGE, Section, bench, parser_of, table
from benchmarks.lent_device import worker

RUN_S = 900.0


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--within":  # inside a namespace, beside the source's worker
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
        return
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--wires", default="loopback,1000")
    parser.add_argument("--seconds", type=float, default=2.0, help="for one measurement of the link")
    bench(parser, Section(wires, text))


def wires(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each wire."""
    if args.tiny:
        args.megabytes, args.rounds, args.seconds, args.wires = 8, 1, 0.2, "loopback"
    sizes = {"megabytes": args.megabytes, "rounds": args.rounds, "seconds": args.seconds}
    results = {
        wire: loopback(sizes, folder) if wire == "loopback" else wired(float(wire), sizes, folder)
        for wire in args.wires.split(",")
    }
    return {**sizes, "wires": results}


def measure(source: str, target: str, megabytes: int, rounds: int, seconds: float) -> dict[str, Any]:
    """From the device of the worker `source`, which we are on, to the worker `target`. Rates in bytes/s."""
    from edge.cluster.connect import reach
    from edge.cluster.diagnose import measure_link
    from edge.models.digests import Digests
    from partition.slices.recipe import whole

    n_bytes = megabytes * 1_000_000
    rates: dict[str, list[float]] = {"grpc": [], "tcp": [], "disk": [], "slice": []}
    rng = random.Random()
    with tempfile.TemporaryDirectory() as folder, reach(source) as a, reach(target) as b:
        a.describe(), b.describe()
        model = Path(folder) / "model.gguf"
        with model.open("wb") as file:
            for _ in range(megabytes):
                file.write(rng.randbytes(1_000_000))

        def renewed() -> str:
            """Other bytes, so another slice: its digest."""
            with model.open("r+b") as file:
                file.write(rng.randbytes(64))
            return Digests(Path(folder)).model_digest(model)

        for _ in range(rounds):
            for kind in ("grpc", "tcp"):
                result = measure_link(a, b, seconds, kind)
                rates[kind].append(result.profile.bandwidth_ab_gbps * 1e9 / 8)
            rates["disk"].append(n_bytes / bare_write(Path(folder) / "bare", n_bytes))
            digest = renewed()
            began = time.perf_counter()
            assert b.send_slice(whole(digest, n_bytes), model, digest) == n_bytes
            rates["slice"].append(n_bytes / (time.perf_counter() - began))
        began = time.perf_counter()
        again = b.send_slice(whole(digest, n_bytes), model, digest)
        again_s = time.perf_counter() - began

        digest, cut_at = renewed(), rng.uniform(0.1, 0.9)
        with reach(target) as broken, contextlib.suppress(ConnectionAbortedError):
            broken.send_slice(whole(digest, n_bytes), model, digest, _Cut(cut_at * n_bytes))
        rest = b.send_slice(whole(digest, n_bytes), model, digest)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {
        "bytes_per_s": medians,
        "of_grpc": medians["slice"] / medians["grpc"],
        "of_tcp": medians["slice"] / medians["tcp"],
        "of_disk": medians["slice"] / medians["disk"],
        "rounds": rates,
        "second_load_bytes": again,
        "second_load_s": again_s,
        "cut_at_bytes": int(cut_at * n_bytes),
        "sent_after_cut_bytes": rest,
    }


def bare_write(path: Path, n_bytes: int) -> float:
    """Seconds to write so many bytes to a new file and have them on the disk, with nothing else to do."""
    chunk = bytes(1 << 20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(0, n_bytes, len(chunk)):
            file.write(chunk)
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


class _Cut:
    """A progress display that pulls the plug."""

    def __init__(self, at: float) -> None:
        self._at = at

    def __call__(self, done: float, total: float) -> None:
        if done >= self._at:
            raise ConnectionAbortedError("cut, as planned")


# --- two devices ---


def loopback(sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two workers of this machine."""
    with worker(folder / "source", threads=None) as (source, _), worker(folder / "target", threads=None) as (target, _):
        return measure(source, target, **sizes)


def wired(mbit: float, sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two members of a cluster in network namespaces, a cable of `mbit` between them."""
    from tests.support.namespaces import two_hosts

    with two_hosts(mbit) as (first, two):
        envs = {name: _folders(folder / f"{name}-{mbit:g}") for name in ("owner", "source", "target")}
        first.run([*EDGE, "cluster", "init"], envs["owner"]).check_returncode()
        addresses = []
        for host, name in ((first, "source"), (two, "target")):
            token = first.run([*EDGE, "cluster", "invite", name], envs["owner"]).stdout.strip()
            command = [*EDGE, "worker", "--listen", f"{host.address}:0", "--join", token, "--no-announce"]
            process = host.start(command, envs[name])
            addresses.append(_address(process))
        target = {"source": addresses[0], "target": addresses[1], **sizes}
        command = [sys.executable, __file__, "--within", json.dumps(target)]
        done = first.run(command, envs["owner"], timeout=RUN_S)
        if done.returncode:
            raise SystemExit(done.stderr)
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def _folders(base: Path) -> dict[str, str]:
    return {f"XDG_{kind.upper()}_HOME": str(base / kind) for kind in ("config", "cache", "state")}


def _address(process: subprocess.Popen[str]) -> str:
    """Where a worker listens, from its log; its later lines are read and dropped, so that its pipe never fills."""
    log = process.stderr
    assert log is not None
    for line in iter(log.readline, ""):
        if " listening " in line:
            threading.Thread(target=log.read, daemon=True).start()
            return next(word for word in line.split() if word.startswith("address=")).removeprefix("address=")
    raise SystemExit(f"the worker ended with {process.wait()}")


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for wire, result in r["wires"].items():
        rates = [f"{result['bytes_per_s'][kind] / 1e6:,.0f} MB/s" for kind in ("grpc", "tcp", "disk", "slice")]
        parts = [f"{result[key]:.2f}" for key in ("of_grpc", "of_tcp", "of_disk")]
        again = f"{result['second_load_bytes']} B, {result['second_load_s'] * 1e3:.0f} ms"
        cut = [f"{result[key] / 1e6:,.0f} MB" for key in ("cut_at_bytes", "sent_after_cut_bytes")]
        lines.append([wire if wire == "loopback" else f"{wire} Mbit/s", *rates, *parts, again, *cut])
    header = ["wire", "link, gRPC", "link, TCP", "disk", "slice", "of gRPC", "of TCP", "of disk", "again", "cut at"]
    return f"{r['megabytes']} MB slice.\n\n" + table([*header, "then sent"], lines)


if __name__ == "__main__":
    main()
