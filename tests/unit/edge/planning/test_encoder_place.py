"""Test the choice of the device that encodes pictures, with given times."""

from functools import partial

import pytest

from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.planning.arrange import work_of
from edge.planning.encoder_place import EncoderPlace, by_preference, place_json, place_text
from edge.planning.llm_space import LlmSpace
from edge.planning.spaces import with_encoder
from edge.profiling.encoder_times import EncoderTime, EncoderTimes
from edge.profiling.profile import ClusterProfile
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from tests.support.planning import FAST, MIB, MS, device, linked

ENCODER = 32 * MIB


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


# --- memory beside the model ---


def planned_beside(here: float, strong: float) -> tuple[LlmSpace, dict[str, int]]:
    """Plan for devices with so many MiB, of which the worker encodes five times as fast; the plans, and the bytes of
    the best one on each device."""
    file, name = ModelFile.open(MODEL_PATH), "strong:7070"
    memory = ((LOCAL, 10 * MS, here), (name, 1 * MS, strong))
    speeds = tuple(device(total, layer_s, memory_bytes=round(mib * MIB)) for total, layer_s, mib in memory)
    known = ClusterProfile(speeds, linked([LOCAL, name], FAST), ())
    encoders = times(1.0, strong=(0.2, 0.0))
    places = [EncoderPlace(time.device, time.name, ENCODER, encoders) for time in by_preference(encoders)]
    work = work_of(file, EngineOptions(context=512))
    space = with_encoder(partial(LlmSpace, file, "", work, known), places)
    return space, dict(space.best("latency", {})[0].predicted.memory_bytes)


def test_a_device_that_encodes_has_less_memory_for_layers() -> None:
    space, need = planned_beside(200, 200)
    assert space.encoder is not None
    assert space.encoder.chosen.name == "strong"
    assert need["strong:7070"] > ENCODER  # all of the model, and the encoder
    model = need["strong:7070"] - ENCODER
    space, need = planned_beside(200, (ENCODER + model) / MIB - 1)
    assert space.encoder.chosen.name == "strong"
    assert ENCODER < need["strong:7070"] < ENCODER + model  # some layers are here
    assert need[LOCAL] > 0


def test_where_both_do_not_fit_another_device_encodes_or_it_is_refused() -> None:
    space, _ = planned_beside(200, 20)
    assert space.encoder is not None
    assert space.encoder.chosen.device == LOCAL
    for here, strong, words in (
        (20, 20, r"strong has 20\.0 MiB; this"),
        (33, 3, "strong has .* on this device: .* need"),
    ):
        with pytest.raises(PlanError, match=f"32.0 MiB, do not fit together .{words}"):
            planned_beside(here, strong)
    with pytest.raises(PlanError) as alone:
        planned_beside(1, 1)
    assert "encoder" not in str(alone.value)
