"""Image and audio encoder on a worker, with the projector in its own engine process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edge.cluster.helper_worker import HelperDevice, LoadedHelper
from edge.cluster.preflight import check_memory
from edge.errors import EngineError
from edge.llama.llama import Model
from edge.media.encoder import WAIT_S, EncoderEnded, RawMedia
from edge.media.projector import open_projector
from edge.models.local_slices import OwnSlices
from edge.tasks import SILENT, AggregateProgress, Steps
from edge.worker.load_encoder import WORK_BYTES
from edge.worker.media_queries import RemoteEncoder
from partition.model.file import ModelFile, ModelLike
from partition.slices.recipe import Copy, Literal, Recipe, Zeros, whole
from quant.gguf.file import GgufFile
from transport import edge_pb2 as pb


@dataclass(frozen=True)
class EncoderFiles:
    """Projector and its text model."""

    projector: GgufFile
    text_model: ModelFile

    @classmethod
    def open(cls, text_model: ModelLike, projector: Path) -> EncoderFiles:
        """Open both files. Raises ModelFileError or MediaError."""
        return cls(open_projector(projector), ModelFile.open(text_model))

    @property
    def held_bytes(self) -> int:
        """Memory in bytes that encoding takes on a device."""
        return self.projector.size_bytes + WORK_BYTES

    def blank_recipe(self, digest: str) -> Recipe:
        """Return the recipe of the projector with zero weights, which a device creates locally for timing."""
        n_bytes = self.projector.header_bytes(self.projector.path)
        with self.projector.path.open("rb") as file:
            head = Literal(file.read(n_bytes))
        return Recipe(digest, self.projector.size_bytes, (head, Zeros(self.projector.size_bytes - n_bytes)))


class LoadedEncoder(LoadedHelper):
    """Projector in an engine process of a worker. Call `close()` when done."""

    answer_s = WAIT_S

    def load(self, files: EncoderFiles, steps: Steps, *, blank: bool = False) -> None:
        """Load the projector. Raises the errors of `EncoderDevice`.

        blank: use zero weights.
        steps: shows the progress.
        """
        projector, text, own = files.projector, files.text_model, OwnSlices()
        if len(text.paths) > 1 or len(projector.paths) > 1:
            raise EngineError(f"{text.path.name}: a worker can encode only for a model in one file; join its parts")
        check_memory(self._fleet, [(self._address, {"projector": files.held_bytes})], "encode on another device")
        model = Model(text.path, allocate=False)
        width, n_vocab = model.n_embd_inp, model.n_vocab
        model.close()
        digest, text_digest = own.model_digest(projector.path), own.model_digest(text.path)
        recipe = files.blank_recipe(digest) if blank else whole(digest, projector.size_bytes)
        # Only the header of the text model is sent, with its sizes and vocabulary but without weights.
        head = Recipe(text_digest, text.size_bytes, (Copy(0, text.header_bytes(text.path)),))
        slices = ((recipe, projector.path), (head, text.path))
        with steps.step(f"Loading {projector.path.name} on {self.name}") as show:
            total = AggregateProgress(show, recipe.n_bytes + head.n_bytes, self._closing.check)
            names = []
            for part, path in slices:
                names.append(own.digest(part, path))
                with total.part(part.n_bytes, f"sending {path.name}") as sent:
                    self._worker.send_slice(part, path, names[-1], sent)
            encoder = pb.Encoder(text_model=names[1], text_model_bytes=text.size_bytes)
            with total.part(0, "loading"):
                self._start(pb.Load(slice=names[0], encoder=encoder), lambda _: self._closing.check())
        self._encoder = RemoteEncoder(self.link, width, n_vocab)
        self._closing.then(partial(self._end_quietly, self._encoder.end))

    def encode(self, data: bytes) -> RawMedia:
        """Encode a file, as `RemoteEncoder.encode` does."""
        with self._waiting():
            return self._encoder.encode(data, WAIT_S)


class EncoderDevice(HelperDevice[LoadedEncoder]):
    """Worker that encodes images and audio. Context manager; or call `close()` when done."""

    loads = LoadedEncoder
    lost_text, back_text = "encodes no more, and this device does", "encodes again"

    def __init__(self, address: str, files: EncoderFiles, *, insecure: bool = False, steps: Steps = SILENT) -> None:
        """Load the projector on the worker at `address`. For insecure and steps see `HelperDevice`.

        Raises NotEnoughMemory, NoRoom, WorkerError or a TransportError if that fails.
        """
        self._files = files
        super().__init__(address, insecure=insecure, steps=steps)

    def encode(self, data: bytes) -> RawMedia | None:
        """Encode a file, as `EncodingDevice.encode` does."""
        try:
            return self._ask(lambda loaded: loaded.encode(data))
        # The worker may lack memory that this device has. A file that crashes both costs only one error.
        except EncoderEnded as error:
            self._steps.say(f"{self.name} could not encode a picture or sound, and this device does: {error}")
            return None

    def _load(self, loaded: LoadedEncoder, steps: Steps) -> None:
        loaded.load(self._files, steps)
