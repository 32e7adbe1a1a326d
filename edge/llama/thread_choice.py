"""Default number of threads of an engine, from the size of the model and the cores that are free.

After every product all threads wait for the slowest one. Where something else has its core, they wait for that, too,
and a token takes many times as long as with the threads that have a core of their own.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence

from devices.busy import OthersLoad
from partition.model.model import ModelShape, decode_bytes
from partition.predict.hysteresis import THREADS, clearly_better
from quant.gguf.file import GgufFile

# Of a product's weights for each thread: some 20 us of reading. Meeting the others takes 1 to 5 us on a quiet machine.
_WORTH_BYTES = 256 << 10
_LEAST_STEPS = 8  # tokens that tell how long one takes
_FAR = 2.0  # times the usual time of a token; more may be the fault of who waits for whom
_MOST_WAIT = 64  # answers between two trials


def worth_threads(file: GgufFile, shape: ModelShape) -> int:
    """Return the number of threads that have enough to do in each of a token's products, at least 1."""
    products = [
        tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and name != "token_embd.weight"
    ]
    return max(1, round(decode_bytes(file, shape) / max(1, len(products)) / _WORTH_BYTES))


class ThreadChoice:
    """Adaptive number of threads, by the times of answers. The current number stays unless another is clearly
    faster."""

    def __init__(self, most: int, *, cores: int | None = None, load: Callable[[], float] | None = None) -> None:
        """most: threads, where nothing else runs. cores: that may be used, with hyperthreads. load: cores that others
        have used since it was asked last."""
        self.most = self.threads = most
        self._cores = cores or _usable()
        self._load = load or OthersLoad().cores
        self._fastest_s: dict[int, float] = {}  # by threads: the median token of the fastest answer
        self._before: tuple[int, float] | None = None  # during a trial: the threads there were, and their median
        self._wait, self._next_wait = 0, 1  # answers until another trial may begin

    def begin(self) -> int:
        """The threads to begin with, by what others used since this was made."""
        self.threads = self._free(self._load())
        return self.threads

    def answered(self, step_s: Sequence[float]) -> int:
        """Return the threads for the next answer. step_s: seconds of each token of the last one."""
        others = self._load()
        if self.most == 1 or len(step_s) < _LEAST_STEPS:
            return self.threads
        now, took_s = self.threads, statistics.median(step_s)
        usual_s = self._fastest_s.get(now, took_s)
        self._fastest_s[now] = min(usual_s, took_s)
        if self._before is not None:
            (before, before_s), self._before = self._before, None
            if not clearly_better(took_s, before_s, by=THREADS):
                self.threads, self._wait = before, self._next_wait
                self._next_wait = min(2 * self._next_wait, _MOST_WAIT)
            else:
                self._next_wait = 1
        elif self._wait:
            self._wait -= 1
        else:
            target = self._free(others)
            if took_s > _FAR * usual_s:
                target = min(target, max(1, now // 2))
            if target != now:
                self._before, self.threads = (now, took_s), target
        return self.threads

    def _free(self, others: float) -> int:
        return max(1, min(self.most, math.floor(self._cores - others + 0.5)))


def _usable() -> int:
    """Processors that this process may run on, with hyperthreads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
