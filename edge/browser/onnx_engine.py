"""Engine of an ONNX stage that a browser's page computes. The signature and all checks stay in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge.browser import onnx_runtime
from edge.browser.frames import MAX_FRAME
from edge.browser.page import PageConnection
from edge.errors import EngineError, NotEnoughMemory
from edge.onnx.file import load
from edge.onnx.model import declared_inputs, declared_outputs
from edge.onnx.samples import TYPES, Array, Feeds, shape_text
from edge.onnx.signature import fit, shape_of

_PROVIDERS = ("wasm", "cpu")  # a plan for all devices may name the processor
_RUNTIME_BYTES = 64 << 20  # ONNX Runtime and its buffers
_COPIES = 2  # copies of the stage during loading: the bytes read, and ONNX Runtime's own layout
_MIB = 1 << 20
_SILENT_S = 300.0  # longest run. ONNX Runtime gives no sign of life meanwhile. The owner waits as long for a step


class PageOnnxEngine:
    """An ONNX stage at a page. Same interface as `edge.onnx.stage.StageEngine`."""

    provider = _PROVIDERS[0]
    fell_back_from: tuple[str, ...] = ()

    def __init__(
        self,
        path: Path,
        threads: int,
        provider: str | None,
        folder: Path,
        memory_bytes: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Send the stage's file to the page, and let the page load it.

        folder: folder of the page.
        memory_bytes: memory of the page.

        Raises OSError and ModelFileError as OnnxEngine does, HubError if onnxruntime-web cannot be fetched,
        NotEnoughMemory if the page has too little memory, and EngineError if the page was lost or cannot load the
        stage.
        """
        if provider not in (None, *_PROVIDERS):
            raise EngineError(f"there is no provider {provider!r:.40} in a browser; there is {_PROVIDERS[0]}")
        file = load(path)
        self.files, self.threads = file.data_files | {path}, threads
        self.inputs, self.outputs = declared_inputs(file), declared_outputs(file)
        need = _COPIES * file.size_bytes + _RUNTIME_BYTES
        if need > memory_bytes:
            raise NotEnoughMemory(
                f"the stage needs {need / _MIB:,.0f} MiB in the browser, which has {memory_bytes / _MIB:,.0f}; give it"
                " fewer nodes"
            )
        onnx_runtime.fetch(progress)
        self._page = PageConnection(folder)
        try:
            self._page.on_progress = progress
            self._page.load_file(path, "onnx_load", threads=threads, silent_s=_SILENT_S)
            self._page.show("a stage of an ONNX model", "")
        except BaseException:
            self._page.close()
            raise

    def run(self, feeds: Mapping[str, Array]) -> Feeds:
        """Compute the stage at the page, and return its outputs by name.

        Raises SamplesError if an input does not fit, and EngineError if the page fails or was lost.
        """
        dims = fit(self.inputs, feeds)
        arrays = {input_.name: feeds[input_.name] for input_ in self.inputs}
        n_bytes = sum(array.nbytes for array in arrays.values())
        if n_bytes > MAX_FRAME // 2:
            raise EngineError(
                f"the inputs of a browser's stage have {n_bytes / _MIB:,.0f} MiB, at most {MAX_FRAME // 2 / _MIB:,.0f}"
                " can be sent; cut the model elsewhere"
            )
        header, payload = self._page.call(
            "onnx_run",
            b"".join(array.tobytes() for array in arrays.values()),
            inputs=[{"name": name, "type": array.dtype.name, "dims": array.shape} for name, array in arrays.items()],
            silent_s=_SILENT_S,
        )
        outputs = Feeds()
        for name, (type_, shape) in _described(header.get("outputs")).items():
            n = math.prod(shape) * np.dtype(type_).itemsize
            if n > len(payload):
                raise EngineError(f"the browser's page returned {len(payload)} bytes of {n} of output {name!r:.80}")
            outputs[name] = np.frombuffer(payload[:n], type_).reshape(shape).copy()
            payload = payload[n:]
        for output in self.outputs:
            array = outputs.get(output.name)
            expected = shape_of(output, dims)
            if array is None or array.dtype != output.dtype or (expected or array.shape) != array.shape:
                returned = "nothing" if array is None else f"{array.dtype.name} {list(array.shape)}"
                raise EngineError(
                    f"the browser's page returned {returned} for output {output.name!r:.80}, which is"
                    f" {output.dtype.name} {shape_text(output.shape)}; reload the page"
                )
        return outputs

    def stop(self) -> None:
        """Make a run in another thread, and later runs, raise EngineError."""
        self._page.close()

    def close(self) -> None:
        """End the connection. The page frees the stage."""
        self._page.close()


def _described(outputs: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of the outputs that a page describes, by name. Raises EngineError if one is not valid."""
    try:
        described = {str(output["name"]): (output["type"], tuple(output["dims"])) for output in outputs}
        if all(
            type_ in TYPES.values() and all(type(dim) is int and 0 <= dim <= MAX_FRAME for dim in shape)
            for type_, shape in described.values()
        ):
            return described
    except (KeyError, TypeError):
        pass
    raise EngineError("the browser's page describes its outputs wrongly; reload the page")
