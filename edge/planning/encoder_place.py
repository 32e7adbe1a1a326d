"""Choose the place of the image and audio encoder: this device, unless a worker is clearly faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edge.cluster.encoder_worker import EncoderDevice, EncoderFiles
from edge.cluster.fleet import device
from edge.errors import EdgeError
from edge.profiling.encoder_times import EncoderTime, EncoderTimes, encoder_times
from edge.tasks import Steps
from partition.plan.plan import LOCAL
from partition.predict.hysteresis import ENCODER, clearly_better
from partition.predict.speeds import DeviceSpeed
from quant.text import counted, seconds_text

AUTO, HERE = "auto", "here"
NOT_TIMED = EncoderTimes((), "")  # used if the user named the device


def by_preference(times: EncoderTimes) -> list[EncoderTime]:
    """Return the candidate devices, best first: workers that are clearly faster than this device, then this device."""
    here, *workers = times.devices
    faster = [time for time in workers if clearly_better(time.total_s, here.total_s, by=ENCODER)]
    return [*sorted(faster, key=lambda time: time.total_s), here]


@dataclass(frozen=True)
class EncoderPlace:
    """Device of the encoder."""

    device: str  # address as in a plan
    name: str  # display name
    held_bytes: int  # memory of the encoder on that device
    times: EncoderTimes = NOT_TIMED  # encoding times of all devices

    def with_encoder(self, speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
        """Return the speeds with the encoder's memory added to its device."""
        return [
            replace(speed, runtime_bytes=speed.runtime_bytes + self.held_bytes)
            if device(speed.device) == self.device
            else speed
            for speed in speeds
        ]

    @property
    def moved_bytes(self) -> int:
        """Bytes of this device's memory that encoding takes after the encoder's device is lost."""
        return 0 if self.device == LOCAL else self.held_bytes

    def held_after_loss(self, all_speeds: Sequence[DeviceSpeed], left: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
        """Return the remaining devices. If the encoder's device is lost, this device needs the encoder's memory.

        all_speeds: result of `with_encoder`.
        """
        names = [[device(speed.device) for speed in speeds] for speeds in (all_speeds, left)]
        is_lost = self.device in names[0] and self.device not in names[1]
        return replace(self, device=LOCAL).with_encoder(left) if is_lost else [*left]

    @property
    def chosen(self) -> EncoderTime:
        """Time of the encoder's device, if devices were timed."""
        return next(time for time in self.times.devices if time.device == self.device)


def encoder_places(
    place: str, files: EncoderFiles, workers: Sequence[str], *, timed: bool = True, **how: Any
) -> list[EncoderPlace]:
    """Return the possible places of the encoder, best first.

    place, workers: see `encoder_device`.
    how: options of `encoder_times`.
    timed: False: do not time a device that the user named.
    Raises EdgeError if `place` is the address of a device that cannot encode, and the errors of `encoder_times`.
    """
    address = LOCAL if place == HERE else device(place)
    if place != AUTO and not timed:
        return [EncoderPlace(address, "this device" if place == HERE else address, files.held_bytes)]
    addresses = [
        other for other in dict.fromkeys(map(device, workers if place == AUTO else [address])) if other != LOCAL
    ]
    times = encoder_times(files, addresses, **how)
    chosen = by_preference(times) if place == AUTO else [time for time in times.devices if time.device == address]
    if not chosen:
        raise EdgeError("; ".join(times.notes))
    return [EncoderPlace(time.device, time.name, files.held_bytes, times) for time in chosen]


@contextmanager
def encoder_device(
    place: str,
    files: EncoderFiles,
    workers: Sequence[str],
    *,
    insecure: bool = False,
    threads: int | None = None,
    steps: Steps,
) -> Iterator[EncoderDevice | None]:
    """Yield the worker that encodes, or None if this device encodes. The projector is loaded until the block ends.

    place: AUTO (the fastest of this device and `workers`), HERE, or the address of a worker.
    The other parameters are described in `encoder_times`. With AUTO, a worker that cannot load the projector is
    skipped, with a line in `steps`. Raises the errors of `encoder_times`, and those of `EncoderDevice` if
    `place` is an address.
    """
    loaded = partial(EncoderDevice, files=files, insecure=insecure, steps=steps)
    with ExitStack() as stack:
        if place != AUTO:
            yield None if place == HERE else stack.enter_context(loaded(place))
            return
        addresses = [address for address in dict.fromkeys(map(device, workers)) if address != LOCAL]
        if not addresses:
            yield None
            return
        times = encoder_times(files, addresses, insecure=insecure, threads=threads, steps=steps)
        for time in by_preference(times):
            if time.device == LOCAL:
                yield None
                return
            try:
                encoder = stack.enter_context(loaded(time.device))
            except EdgeError as error:
                steps.say(f"pictures are not encoded on {time.name}: {error}")
                continue
            steps.say(place_text(times, time))
            yield encoder
            return


def place_text(times: EncoderTimes, chosen: EncoderTime) -> str:
    """Return a sentence about the chosen place, with its time and that of this device."""
    words = f"{chosen.name} encodes pictures and sounds: {times.sample} takes {seconds_text(chosen.total_s)}"
    if chosen.device == LOCAL:
        return f"{words}, and becomes {counted(chosen.rows, 'token')}"
    way = f"{seconds_text(chosen.transfer_s)} of it on the way; {seconds_text(times.devices[0].total_s)} on this device"
    return f"{words} ({way}), and becomes {counted(chosen.rows, 'token')}"


def place_json(times: EncoderTimes, chosen: EncoderTime, first_token_s: float | None) -> dict[str, Any]:
    """Return the place and the times as plain values. first_token_s: TTFT of a prompt, including its image."""
    devices = [
        {"name": time.name, "address": time.device, "encode_s": time.encode_s, "transfer_s": time.transfer_s}
        for time in times.devices
    ]
    return {
        "device": chosen.name,
        "address": chosen.device,
        "sample": times.sample,
        "rows": chosen.rows,
        "total_s": chosen.total_s,
        "first_token_s": first_token_s,
        "devices": devices,
        "notes": list(times.notes),
    }
