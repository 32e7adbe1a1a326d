"""Time the image and audio encoder: one sample, encoded on this device and on each worker.

Workers load the projector with zero weights, as profiling does for layers, so only its header crosses the network.
Times are measured on this device. They include sending the sample and receiving its embeddings.
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

_ENOUGH_S, _MOST_TIMES = 2.0, 3  # encoding is repeated until one of these limits is reached
_REMEMBERED = "encoders"
_HERE = "this device"


@dataclass(frozen=True)
class EncoderTime:
    """Fastest of several encodings of the sample on one device."""

    device: str  # address as in a plan
    name: str  # name for display
    encode_s: float
    transfer_s: float  # sending the sample, receiving its embeddings, and overhead; also set for this device
    rows: int  # number of embedding rows of the sample

    @property
    def total_s(self) -> float:
        """Seconds until the embeddings are on this device."""
        return self.encode_s + self.transfer_s


@dataclass(frozen=True)
class EncoderTimes:
    """Times of all devices that can encode, this device first."""

    devices: tuple[EncoderTime, ...]
    sample: str  # description of the sample
    notes: tuple[str, ...] = ()  # a sentence for each worker that cannot encode


def encoder_times(
    files: EncoderFiles,
    addresses: Sequence[str],
    *,
    insecure: bool = False,
    threads: int | None = None,
    fresh: bool = False,
    steps: Steps = SILENT,
) -> EncoderTimes:
    """Time the encoder on this device, and then on each worker in turn. Times are cached for a day.

    addresses: addresses of the workers.
    insecure: allow workers without encryption.
    threads: threads of this device.
    fresh: ignore cached times.
    steps: shows progress.
    A worker that cannot be reached or cannot encode is left out, with a note. Raises MediaError or ModelFileError if
    this device cannot encode.
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
        for number, address in enumerate(addresses, 1):  # one after the other, because they may be on one machine
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
