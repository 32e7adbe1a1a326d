"""Times of the encoder of pictures and sounds: one sample, encoded on this device and on each worker.

The projector's weights are zero on workers, as layers' are in a survey: nothing but its header crosses the network.
Times are those that this device waits, with the way of the sample there and of its embeddings back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from devices.probe import default_threads
from devices.remembered import Remembered, key_of
from edge.cluster.encoder_worker import EncoderFiles, LoadedEncoder
from edge.cluster.fleet import Fleet
from edge.errors import EdgeError
from edge.media.encoder import MediaEncoder, RawMedia
from edge.media.projector import identity
from edge.media.sample import sample_for
from edge.profiling.survey import own_profile
from edge.tasks import SILENT, Steps
from partition.plan.plan import LOCAL

_ENOUGH_S, _MOST_TIMES = 2.0, 3  # a sample is encoded again until both hold
_REMEMBERED = "encoders"
_HERE = "this device"


@dataclass(frozen=True)
class EncoderTime:
    """Time of a device to encode the sample: the fastest of several."""

    device: str  # as in a plan
    name: str  # for people
    encode_s: float
    transfer_s: float  # the sample there, its embeddings back, and handing over; of this device, too
    rows: int  # that the sample becomes

    @property
    def total_s(self) -> float:
        """Seconds until the embeddings are on this device."""
        return self.encode_s + self.transfer_s


@dataclass(frozen=True)
class EncoderTimes:
    """Times of all devices that can encode, this one first."""

    devices: tuple[EncoderTime, ...]
    sample: str  # what was encoded, for people
    notes: tuple[str, ...] = ()  # workers that cannot, and why


def encoder_times(
    files: EncoderFiles,
    addresses: Sequence[str],
    *,
    insecure: bool = False,
    threads: int | None = None,
    fresh: bool = False,
    steps: Steps = SILENT,
) -> EncoderTimes:
    """Time this device, and then the workers at `addresses`, one by one. Figures are remembered for a day.
    insecure: also workers that do not encrypt. threads: of this device. fresh: measure again. steps: shows progress.

    A worker that cannot be reached, or cannot encode, is left out, with a note. MediaError, ModelFileError.
    """
    (data, described), threads = sample_for(files.projector), threads or default_threads()
    parts = [identity(files.projector).hex(), files.text_model.architecture, described]
    own, memory = own_profile("", threads), Remembered(_REMEMBERED)

    def known(key: str) -> EncoderTime | None:
        return None if fresh else _read(memory, key)

    def measured(key: str, encode: Callable[[bytes], RawMedia]) -> EncoderTime:
        best = _measured(lambda: encode(data))
        memory.put(key, {"encode_s": best.encode_s, "transfer_s": best.transfer_s, "rows": best.rows})
        return best

    def here() -> EncoderTime:
        key = key_of(parts, own)
        if (remembered := known(key)) is not None:
            return remembered
        with MediaEncoder(files.text_model.path, files.projector.path, threads=threads) as encoder:
            return measured(key, encoder.encode_raw)

    def there(address: str) -> EncoderTime:
        with LoadedEncoder(Fleet([address], insecure=insecure), steps.say) as loaded:
            key = key_of([*parts, address], own, loaded.profile)
            if (best := known(key)) is None:
                loaded.load(files, SILENT, blank=True)
                best = measured(key, loaded.encode)
            return replace(best, device=address, name=loaded.name)

    n, notes = len(addresses) + 1, []
    with steps.step("Measuring the encoder", n, "devices") as show:
        times = [here()]
        for number, address in enumerate(addresses, 1):  # not at once: they may be one machine
            show(number, n)
            try:
                times.append(there(address))
            except EdgeError as error:
                notes.append(f"pictures are not encoded on {address}: {error}")
    return EncoderTimes(tuple(times), described, tuple(notes))


def _measured(encode: Callable[[], RawMedia]) -> EncoderTime:
    best: EncoderTime | None = None
    began = time.perf_counter()
    for _ in range(_MOST_TIMES):
        start = time.perf_counter()
        answer, _rest = encode()
        took_s = time.perf_counter() - start
        encode_s = min(took_s, float(answer["encode_s"]))
        rows = sum(chunk["shape"][0] for chunk in answer["chunks"] if "shape" in chunk)
        if best is None or took_s < best.total_s:
            best = EncoderTime(LOCAL, _HERE, encode_s, took_s - encode_s, rows)
        if time.perf_counter() - began > _ENOUGH_S:
            break
    assert best is not None
    return best


def _read(memory: Remembered, key: str) -> EncoderTime | None:
    remembered = memory.get(key)
    try:
        values = remembered[0] if remembered else {}
        return EncoderTime(LOCAL, _HERE, float(values["encode_s"]), float(values["transfer_s"]), int(values["rows"]))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
