"""An ONNX network with one interface for one device and for several."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
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
    def over(cls, path: Path, start: Callable[[ExitStack], Flow]) -> OnnxModel:
        """Return a model that `start` loads. `start` puts what must be closed on the stack."""
        model = cls(path)
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
