"""The owner's process of bench_pictures.py: plans, encodes pictures there and here, and prints times."""

from __future__ import annotations

import io
import json
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge.cluster.encoder_worker import EncoderFiles
from edge.cluster.fleet import by_device, device
from edge.deployment.deploy import deploy
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.media.encoder import Media, MediaEncoder
from edge.media.media import EmbeddingRows
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange, work_options
from edge.planning.encoder_place import encoder_device, encoder_places
from edge.profiling.cluster import Cluster
from edge.tasks import SILENT
from partition.model.file import ModelFile
from partition.predict.predict import predict
from tests.support.measuring import measure_briefly

TEXT = 24  # tokens behind the picture


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings["tiny"]:
        measure_briefly(pytest.MonkeyPatch())
    print(json.dumps(run(Path(settings["model"]), Path(settings["projector"]), settings["worker"], settings["rounds"])))


def run(path: Path, projector: Path, worker: str, rounds: int) -> dict[str, Any]:
    """Predicted and measured seconds of a picture on both devices, and of the first token."""
    file = ModelFile.open(path)
    files = EncoderFiles.open(file, projector)
    pictures = pictures_of(files.projector.metadata["clip.vision.image_size"])
    best = encoder_places("auto", files, [worker], insecure=True, threads=1)[0]
    place = best.chosen
    options = EngineOptions(threads=1, context=place.rows + 4 * TEXT)
    with Cluster([worker], insecure=True) as cluster:
        work = replace(work_options(file, options, "tcp", "f32"), prompt_tokens=place.rows + TEXT)
        planner = arrange(file, cluster, work).planner
        assert planner is not None
        plan = by_device(planner.front(("ttft",))[0][0].plan)
        speeds = {device(speed.device): speed for speed in planner.speeds}
        ttft_s = predict(plan, planner.work, speeds, planner.links).ttft_s
        assert ttft_s is not None
        with (
            deploy(PlanChoice(path, plan, "ttft"), cluster, options) as model,
            encoder_device("auto", files, [worker], insecure=True, threads=1, steps=SILENT) as encoding,
            MediaEncoder(path, projector, device=encoding) as encoder,
        ):
            each = [answered(model.engine, encoder, next(pictures)) for _ in range(rounds + 1)][1:]
            alone = [first_token_s(model.engine, random_tokens(model.engine, place.rows + TEXT)) for _ in each]
    with MediaEncoder(path, projector) as here:
        here_s = [encoded(here, next(pictures))[1] for _ in range(rounds + 1)][1:]
    encode_s, first_s = (statistics.median(column) for column in zip(*each, strict=True))
    seconds = {
        f"a picture on {place.name}": {"predicted": place.total_s, "measured": encode_s},
        "a picture on the owner": {"predicted": best.times.devices[0].total_s, "measured": statistics.median(here_s)},
        "as much text": {"predicted": ttft_s, "measured": statistics.median(alone)},
        "first token": {"predicted": ttft_s + place.total_s, "measured": first_s},
    }
    return {"seconds": seconds, "encoder": place.name, "layers": [len(stage.layers) for stage in plan.stages]}


def pictures_of(side: Any) -> Iterator[bytes]:
    """Yield square pictures of noise, each another. side: points."""
    for seed in range(1000):
        data = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(data, "PNG")
        yield data.getvalue()


def encoded(encoder: MediaEncoder, data: bytes) -> tuple[Media, float]:
    """Return what a picture becomes, and the seconds that took."""
    began = time.perf_counter()
    media = encoder.encode(data)
    return media, time.perf_counter() - began


def answered(engine: TextEngine, encoder: MediaEncoder, data: bytes) -> tuple[float, float]:
    """Return the seconds to the embeddings of a picture, and to the first token behind them and some text."""
    media, encode_s = encoded(encoder, data)
    return encode_s, encode_s + first_token_s(engine, [*media.tokens, *random_tokens(engine, TEXT)], media.rows)


def random_tokens(engine: TextEngine, n: int) -> list[int]:
    """Return so many tokens, others each time."""
    return np.random.default_rng().integers(3, engine.model.n_vocab, n).tolist()


def first_token_s(engine: TextEngine, prompt: list[int], media: Sequence[EmbeddingRows] = ()) -> float:
    """Return the seconds from a prompt to the first token behind it."""
    began = time.perf_counter()
    request = Request(prompt, 1, ends=False, media=media, namespace=secrets.token_hex(8))
    with Scheduler(engine) as scheduler:
        scheduler.add(request)
        while not any(event.token_id is not None for event in scheduler.step()):
            pass
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
