"""The encoder of pictures and sounds of a configured model, on this device or on a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edge.api.config import EngineConfig
from edge.llm.interface import TextEngine
from edge.multimodal.encoder import MediaEncoder
from edge.tasks import Steps
from partition.plan.plan import LOCAL, Plan


@contextmanager
def media_encoder(config: EngineConfig, engine: TextEngine, steps: Steps) -> Iterator[MediaEncoder | None]:
    """Yield the encoder of pictures and sounds, until the end of the block. MediaError, ModelFileError; the errors
    of `encoder_device`."""
    if config.mmproj is None:
        yield None
        return
    path, mmproj, threads = Path(config.path), Path(config.mmproj), engine.threads
    with ExitStack() as stack:
        device = None
        workers = config.workers if config.plan is None else Plan.from_json(dict(config.plan)).devices
        workers = tuple(address for address in workers if address != LOCAL)
        if config.encoder not in ("auto", "here") or (config.encoder == "auto" and workers):
            from edge.helpers.encoding import EncoderFiles
            from edge.planning.encoder_place import encoder_device

            device = stack.enter_context(
                encoder_device(
                    config.encoder, EncoderFiles.open(path, mmproj), workers,
                    insecure=config.insecure, threads=threads, steps=steps,
                )
            )  # fmt: skip
        yield stack.enter_context(MediaEncoder(path, mmproj, threads=threads, device=device))
