"""Rates of this device's processor: reading memory, and multiplying. Speeds are estimated from them before any
measurement.

`python -m devices.processes.rates THREADS` measures them in about 0.1 s. A process of its own frees the memory
afterwards, and keeps numpy out of a worker's daemon.

Rates are computed from processor time, so other programs that share the cores hardly change them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from devices.machine_cores import instruction_sets
from devices.processes.interpreter import module_command
from devices.profile import DeviceProfile
from devices.remembered import KEPT_AGE_S, Remembered, key_of

TIMEOUT_S = 20.0  # for the process that measures; a slow board needs seconds to import numpy
MOST_RATE = 1e15  # larger rates are mistakes
_REMEMBERED = "rates"  # name of the file with measured rates
_READ_BYTES = 48 << 20  # bytes that all threads read; more than most caches hold
_SIDE = 128  # rows and columns of multiplied matrices
_PIECE_S = 0.004  # processor seconds of one sample
_PIECES = 8  # samples; the best counts
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "MKL_NUM_THREADS")  # a call of numpy uses one thread
# Rate with quantized weights relative to 32-bit floats, by the best instruction set for products of bytes.
_QUANTIZED = {"i8mm": 2.5, "avx512_vnni": 2.0, "avx_vnni": 2.0, "dotprod": 1.5, "avx2": 0.75}


_BYTE_PRODUCTS = frozenset(("i8mm", "avx512_vnni", "avx_vnni", "dotprod"))
# Bytes of weights that are decoded for each operation of the arithmetic rate. Without instructions that multiply bytes
# and add the products, decoding is bound by arithmetic. This rate and that of AVX2 are fitted to five files of 4 to 8
# bits a weight on AVX2 cores.
_DECODED_BYTES = 0.14


@dataclass(frozen=True)
class Rates:
    """Rates of all threads of a device together."""

    memory_bytes_per_s: float  # weights that can be read and multiplied while decoding
    flops: float  # operations per second with quantized weights; a multiply-add is two operations


def known_rates(profile: DeviceProfile) -> Rates | None:
    """Return the remembered rates of this device, or None if there are none."""
    remembered = Remembered(_REMEMBERED).get(_key(profile), KEPT_AGE_S)
    return None if remembered is None else read_rates(remembered[0])


def own_rates(profile: DeviceProfile) -> Rates | None:
    """Return the rates of this device, and measure them if none are remembered. None if measuring fails.

    profile: description of this device.
    """
    rates = known_rates(profile)
    if rates is None and (rates := measured_apart(profile.threads)) is not None:
        cores = min(1.0, profile.cpu_quota / profile.threads) if profile.cpu_quota else 1.0
        sets = instruction_sets()
        quantized = next((factor for name, factor in _QUANTIZED.items() if name in sets), 1.0)
        memory, flops = rates.memory_bytes_per_s, quantized * rates.flops
        if _BYTE_PRODUCTS.isdisjoint(sets):
            memory = min(memory, _DECODED_BYTES * flops)
        rates = Rates(cores * memory, cores * flops)
        Remembered(_REMEMBERED).put(_key(profile), [rates.memory_bytes_per_s, rates.flops])
    return rates


def _key(profile: DeviceProfile) -> str:
    return key_of(["rates of weights"], profile)


def read_rates(values: Any) -> Rates | None:
    """Return the rates in a list of two numbers, or None if the values are not valid."""
    try:
        memory, flops = map(float, values)
    except (TypeError, ValueError):
        return None
    return Rates(memory, flops) if 0 < memory < MOST_RATE and 0 < flops < MOST_RATE else None


def measured_apart(threads: int) -> Rates | None:
    """Measure the rates in a process of its own. Return None if it fails or takes longer than TIMEOUT_S."""
    command = module_command("devices.processes.rates", str(threads))
    own = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL, env=own
        )
        return read_rates(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def measure(threads: int) -> Rates:
    """Measure the rates of this many threads with 32-bit floats, without regard to a CPU quota."""
    import numpy as np

    def rate(amount: float, work: Callable[[], object]) -> float:
        """Return the best rate of this thread. amount: bytes or operations of one call of `work`."""
        work()  # memory is allocated, and caches are filled
        best = 0.0
        for _ in range(_PIECES):
            began, calls = time.thread_time(), 0
            while (took_s := time.thread_time() - began) < _PIECE_S:
                work()
                calls += 1
            best = max(best, amount * calls / took_s)
        return best

    def read() -> float:
        part = np.ones(_READ_BYTES // 4 // threads, np.float32)
        return rate(part.nbytes, lambda: np.dot(part, part))

    def multiply() -> float:
        a = np.ones((_SIDE, _SIDE), np.float32)
        result = np.empty_like(a)
        return rate(2.0 * _SIDE**3, lambda: np.dot(a, a, out=result))

    with ThreadPoolExecutor(threads) as pool:
        memory = sum(pool.map(lambda _: read(), range(threads)))
        return Rates(memory, sum(pool.map(lambda _: multiply(), range(threads))))


if __name__ == "__main__":
    rates = measure(int(sys.argv[1]))
    print(json.dumps([rates.memory_bytes_per_s, rates.flops]))
