"""An ONNX network with one interface for one device and for several."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge.arguments import checked, named
from edge.closing import Closing
from edge.errors import EngineError
from edge.llm.pieces import Pieces
from edge.models.paths import PathLike
from edge.onnx.images import Scaling
from edge.onnx.predictions import Predictions, predictions
from edge.units import as_bytes

if TYPE_CHECKING:
    from edge.onnx.bench import Flow

Array = NDArray[np.generic]


class OnnxModel(Closing):
    """A network in ONNX. `open()` loads it, `close()` unloads it; it is also a context manager.

    `edge.deploy_onnx` returns one whose stages run on several devices.
    """

    @checked
    def __init__(
        self,
        path: PathLike,
        *,
        threads: int | None = None,
        provider: str | None = None,
        dims: Mapping[str, int] | None = None,
        memory: int | str | None = None,
    ) -> None:
        """threads: None: one per physical core.
        provider: of ONNX Runtime, such as "cuda"; None: the best one available.
        dims: sizes of the network's open dimensions.
        memory: maximum of the whole process, in bytes or as a text such as "200MiB"; weights that do not fit are read
        from disk in every run. Open dimensions have size 1 in its plan unless `dims` has them.
        """
        self.path = Path(path)
        self._threads, self._provider, self._dims = threads, provider, dict(dims or {})
        self._memory = named("memory", as_bytes, memory)
        if self._memory is not None and provider not in (None, "cpu"):
            raise EngineError(f"memory goes with the provider cpu alone, not with {provider!r}; leave one out")
        self._flow: Flow | None = None
        self._stack = ExitStack()
        self._start: Callable[[ExitStack], Flow] = self._here

    def __repr__(self) -> str:
        return f"<edge.OnnxModel {self.path.name}, {'closed' if self._flow is None else 'open'}>"

    @classmethod
    def over(cls, path: Path, start: Callable[[ExitStack], Flow], dims: Mapping[str, int]) -> OnnxModel:
        """Return a model that `start` loads. `start` puts what must be closed on the stack."""
        model = cls(path, dims=dims)
        model._start = start
        return model

    def open(self) -> OnnxModel:
        """Load the network. Raises ModelFileError if the file is invalid, EngineError if ONNX Runtime refuses it."""
        if self._flow is None:
            self._flow = self._start(self._stack)
        return self

    @checked
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name for one input: an array for each of the network's inputs. Raises EngineError if
        they do not fit."""
        return next(self.map([feeds], in_flight=1))

    @checked
    def map(self, feeds: Iterable[Mapping[str, Array]], *, in_flight: int = 4) -> Pieces[dict[str, Array]]:
        """Return the outputs of many inputs, in order. in_flight: number of inputs in progress on several devices."""
        return Pieces(self._outputs(feeds, in_flight))

    @checked
    def predict(
        self,
        picture: PathLike,
        *,
        labels: Sequence[str] = (),
        top: int = 5,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        scale: float | None = None,
        output: PathLike | None = None,
    ) -> Predictions:
        """Return the classes, boxes or areas that the network sees in a picture.

        labels: names of the classes; empty: those of the network's metadata.
        top: number of classes, if the network has classes for the whole picture.
        mean, std, scale: a pixel becomes (pixel / scale - mean) / std, with one number or one for each channel. If all
        are None, the metadata give them, or else they are ImageNet's; otherwise None means 0, 1 and 255.
        output: a .png, .jpg or .webp file, which gets the picture with the predictions drawn on it.

        Raises OSError if a file cannot be read or written, SamplesError if it is not a picture or does not fit the
        network, and TextError if the network's outputs contain none of these.
        """
        from edge.onnx.inputs import read
        from edge.onnx.lean import load_lean
        from edge.onnx.metadata import metadata_of
        from edge.onnx.model import declared_inputs
        from edge.onnx.paged import LARGE
        from edge.onnx.signature import with_dims
        from edge.pictures.drawing import check_suffix, draw

        if output is not None:
            check_suffix(Path(output))
        if scale == 0 or not all(std or (1,)):
            raise EngineError("std and scale need numbers other than 0")
        is_default = mean is None and std is None and scale is None
        scaling = None if is_default else Scaling(scale or 255.0, tuple(mean or (0.0,)), tuple(std or (1.0,)))
        file = load_lean(self.path, LARGE).file
        metadata = metadata_of(file.model)
        inputs = read(with_dims(declared_inputs(file), self._dims), [str(picture)], scaling, metadata)
        if not inputs.pictures:
            raise EngineError(f"{picture} has arrays; predict takes a picture, and run takes arrays")
        [its_picture] = inputs.pictures.values()
        its_predictions = predictions(self.run(inputs.feeds), its_picture, metadata, labels, top)
        if output is not None:
            draw(its_picture, its_predictions, Path(output))
        return its_predictions

    def _outputs(self, feeds: Iterable[Mapping[str, Array]], in_flight: int) -> Generator[dict[str, Array], None, None]:
        if self._flow is None:
            raise EngineError(f"{self.path.name} is not loaded: call open(), or use it in a with block")
        for result in self._flow(feeds, in_flight):
            yield dict(result.outputs)

    def close(self) -> None:
        """Unload the network."""
        self._flow = None
        self._stack.close()

    def __enter__(self) -> OnnxModel:
        return self.open()

    def _here(self, stack: ExitStack) -> Flow:
        from edge.onnx.bench import sequential
        from edge.onnx.engine import OnnxEngine

        if self._memory is not None:
            from edge.onnx.lean import load_lean
            from edge.onnx.paged import LARGE, PagedNetwork

            network = PagedNetwork(load_lean(self.path, LARGE), self._memory, self._threads, dims=self._dims)
            return sequential(stack.enter_context(network).run)
        engine = OnnxEngine(self.path, self._threads, self._provider, dims=self._dims)
        return sequential(stack.enter_context(engine).run)
