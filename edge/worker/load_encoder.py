"""Load an image and audio projector in an engine process, for a text model on another device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from edge.errors import EdgeError, NotEnoughMemory
from edge.media.encoder import MediaEncoder
from edge.media.projector import open_projector
from edge.parallel.engine_kinds import own_kind
from edge.weights.elastic.share import SHARE
from edge.worker.limits import ResourceLimits
from edge.worker.loaded import LoadedPart, only_other
from edge.worker.media_queries import follow
from partition.model.file import ModelFile
from partition.slices.recipe import MAX_BYTES
from quant.text import bytes_text
from transport import edge_pb2 as pb
from transport.collective import Group

WORK_BYTES = 384 << 20  # memory in addition to the weights: the process, decoded media, and compute buffers


class EncoderPart(LoadedPart):
    """Projector that encodes images and audio for rank 0."""

    def __init__(self, encoder: MediaEncoder, need: int) -> None:
        """need: memory that the projector takes, in bytes."""
        self._encoder, self._need = encoder, need

    def describe(self) -> pb.Loaded:
        return pb.Loaded(memory_bytes=self._need)

    def run(self, _: pb.Run, group: Group) -> None:
        """Answer rank 0's requests until their end. Raises EdgeError in a larger group, and errors of the link."""
        only_other(group, "an encoder works")
        follow(self._encoder, group.links[0])

    def time(self, request: pb.Time) -> pb.Timed:
        raise EdgeError("an encoder cannot be timed by itself")

    def close(self) -> None:
        self._encoder.close()


def load(request: pb.Load, limits: ResourceLimits, folder: Path, progress: Callable[[float], None]) -> EncoderPart:
    """Load a projector.

    folder: folder of this engine process, for the text model's file with a hole instead of weights.
    Raises NotEnoughMemory, MediaError or ModelFileError.
    """
    own_kind().check_encodes()
    projector = open_projector(Path(request.path))
    need = projector.size_bytes + WORK_BYTES
    if request.memory_limit_bytes and need > request.memory_limit_bytes:
        raise NotEnoughMemory(
            f"the projector needs {bytes_text(need)}, this worker has {bytes_text(request.memory_limit_bytes)} left of"
            " its limit; encode on another device"
        )
    SHARE.request(need, need)
    text, n_bytes = folder / "text-model.gguf", request.encoder.text_model_bytes
    if n_bytes > MAX_BYTES:
        raise EdgeError(f"the text model has {n_bytes} bytes; the maximum is {MAX_BYTES}")
    shutil.copyfile(request.encoder.text_model_path, text)
    os.truncate(text, n_bytes)
    ModelFile.open(text)  # checks it
    progress(0.5)
    return EncoderPart(MediaEncoder(text, projector.path, threads=limits.threads, use_gpu=limits.gpu_layers != 0), need)
