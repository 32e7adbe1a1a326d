"""Where pictures are encoded, by known times."""

import pytest

from edge.planning.encoder_place import by_preference, place_json, place_text
from edge.survey.encoder_times import EncoderTime, EncoderTimes
from partition.plan.plan import LOCAL


def times(here_s: float, **workers: tuple[float, float]) -> EncoderTimes:
    """Times of this device, and of workers: seconds of encoding, and of the way."""
    devices = [EncoderTime(f"{name}:7070", name, *seconds, 9) for name, seconds in workers.items()]
    return EncoderTimes((EncoderTime(LOCAL, "this device", here_s, 0.0, 9), *devices), "a picture of 32 x 32")


@pytest.mark.parametrize(
    ("known", "order"),
    [
        (times(1.0), ["local"]),
        (times(1.0, weak=(2.0, 0.1), strong=(0.2, 0.1)), ["strong:7070", "local"]),
        (times(1.0, near=(0.3, 0.1), far=(0.1, 0.5)), ["near:7070", "far:7070", "local"]),
        (times(1.0, little=(0.8, 0.05)), ["local"]),  # faster, and not clearly
        (times(1.0, slow_link=(0.1, 2.0)), ["local"]),
    ],
)
def test_a_worker_must_be_clearly_faster_with_the_way_there(known: EncoderTimes, order: list[str]) -> None:
    assert [time.device for time in by_preference(known)] == order


def test_the_place_in_words_and_as_values() -> None:
    known = times(1.0, strong=(0.2, 0.1))
    assert place_text(known, known.devices[1]) == (
        "strong encodes pictures and sounds: a picture of 32 x 32 takes 300 ms (100 ms of it on the way; 1,000 ms on"
        " this device), and becomes 9 tokens"
    )
    assert place_text(known, known.devices[0]).endswith("32 x 32 takes 1,000 ms, and becomes 9 tokens")
    values = place_json(known, known.devices[1], 0.75)
    assert (values["address"], values["rows"], values["first_token_s"]) == ("strong:7070", 9, 0.75)
    assert values["total_s"] == pytest.approx(0.3)
    assert [device["encode_s"] for device in values["devices"]] == [1.0, 0.2]
