"""Engine for a model, or one stage of it, on ONNX Runtime: arrays in, arrays out."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from devices.probe import default_threads
from edge.closing import Closing
from edge.errors import EngineError, Interrupted
from edge.onnx.file import load, parsed
from edge.onnx.runtime import open_session, refusals, runtime
from edge.onnx.samples import TYPES, Array, Feeds, Input, Output, as_array, declared_shape, inputs_of, outputs_of
from edge.onnx.signature import fit, open_sizes, shape_of, with_dims
from quant.errors import ModelFileError

_BAD_NODE = re.compile(r"Bad node spec for node\. Name: (.*) OpType: (\S+)")
_NO_MEMORY = "Failed to allocate memory"

_Shapes = tuple["tuple[int, ...] | None", ...]  # of the outputs; None if known only after the run


class OnnxEngine(Closing):
    """A loaded ONNX model.

    `run` may be called from several threads at once. Python's lock is free while it computes.
    """

    def __init__(
        self,
        model: Path | bytes,
        threads: int | None = None,
        provider: str | None = None,
        *,
        dims: Mapping[str, int] | None = None,
        buffers: int = 0,
        outputs: Collection[str] = (),
    ) -> None:
        """Load the file `model`, or the bytes of such a file, with all its weights.

        threads: one per physical core where None. provider: such as "cuda"; where None, the best of this build that
        takes the model. What it lacks runs on the CPU. dims: sizes for dimensions that the model leaves open, by name
        or as "input[axis]", which are fixed from then on. buffers: sets of memory for outputs, used in turn: what `run`
        gives is valid until the run that comes so many later begins, and at most so many run at once. 0: every run
        makes new arrays, which the caller may keep. outputs: names of those to compute; empty: all that can be read.

        OSError where the file cannot be read; ModelFileError for what is no valid ONNX model, has inputs that are no
        tensors of numbers, or no output that can be read as an array; EngineError for a provider that is not there and
        for an operator that ONNX Runtime does not know, with its node.
        """
        self.path = model if isinstance(model, Path) else None
        self.threads = threads or default_threads()
        name = self.path.name if self.path else "the model"
        graph, self.files = _checked(model)  # self.files: the model's file, and those with weights beside it
        shapeless = {
            tensor.name for tensor in (*graph.input, *graph.output) if not tensor.type.tensor_type.HasField("shape")
        }
        sizes = open_sizes([Input(tensor.name, "", declared_shape(tensor)) for tensor in graph.input], dims or {})
        named = {dim.dim_param for tensor in graph.input for dim in tensor.type.tensor_type.shape.dim}
        overrides = {key: size for key, size in sizes.items() if key in named}
        nodes = {f"{n.domain}:{n.op_type}": n.name or n.output[0] for n in reversed(graph.node)}
        del graph  # frees one of two copies of the weights
        source = model if isinstance(model, bytes) else str(model)
        session, self.provider, self.fell_back_from = open_session(
            source, name, self.threads, provider, overrides, nodes
        )
        # ONNX Runtime has no override for these.
        unnamed = {key: size for key, size in sizes.items() if key not in named}
        self.inputs: tuple[Input, ...] = with_dims(inputs_of(session, shapeless), unnamed)
        self.outputs: tuple[Output, ...] = outputs_of(session, shapeless, outputs)
        self._names = [tensor.name for tensor in self.outputs]
        self._only_numbers = all(tensor.type in TYPES for tensor in self.outputs)
        self._session: Any = session
        self._options = self._new_options()
        self._buffers = _Buffers(self.outputs, buffers)
        self._shapes_hold = True

    def run(self, feeds: Mapping[str, Array]) -> Feeds:
        """Return the outputs by name, for an array of the right type and shape under the name of each input.

        Arrays are used where they lie, also read-only ones; those that are not contiguous are copied. They must not
        change meanwhile. How long outputs are valid: see `buffers`, which counts for those whose shape the model
        declares; the others are the caller's. SamplesError, which says need and have, for inputs that do not fit;
        EngineError, which names the node, where ONNX Runtime fails; NotEnoughMemory; Interrupted after `stop`.
        """
        session, options = self._session, self._options
        if session is None:
            raise EngineError("this engine is closed; open the model again to run it")
        dims = fit(self.inputs, feeds)
        if not self._only_numbers:
            return self._compute_any(session, options, dict(feeds))
        arrays = {tensor.name: np.require(feeds[tensor.name], requirements=("C", "A")) for tensor in self.inputs}
        shapes = tuple(shape_of(tensor, dims) if self._shapes_hold else None for tensor in self.outputs)
        try:
            return self._compute(session, options, arrays, shapes)
        except EngineError:
            if not any(shapes):
                raise
            # Declared shapes were not checked. Where a careless export has wrong ones, a run without buffers works.
            outputs = self._compute(session, options, arrays, (None,) * len(shapes))
            self._shapes_hold = False
            return outputs

    def stop(self) -> None:
        """Make a run in another thread raise Interrupted at its next node, and all runs after it."""
        self._options.terminate = True

    def resume(self) -> None:
        """Allow runs again after `stop`. A run that `stop` is ending ends all the same."""
        self._options = self._new_options()

    def close(self) -> None:
        """Free the model once runs in other threads have ended. Outputs that the caller has stay valid."""
        self._session = None

    @staticmethod
    def _new_options() -> Any:
        options = runtime().RunOptions()
        options.log_severity_level = 4  # nothing
        # The default, no CUDA graph to replay. Unset, looking for it takes longer than a small model.
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _compute_any(self, session: Any, options: Any, feeds: Feeds) -> Feeds:
        """Run a model with outputs of text or of maps, which ONNX Runtime puts into no memory of ours."""
        with refusals(f"run {self.path.name if self.path else 'the model'}"):
            try:
                values = session.run(self._names, feeds, options)
            except Exception as exc:  # of no class that says why
                if options.terminate:
                    raise Interrupted("the run was stopped") from exc
                raise
        return {name: as_array(value) for name, value in zip(self._names, values, strict=True)}

    def _compute(self, session: Any, options: Any, arrays: Feeds, shapes: _Shapes) -> Feeds:
        """Run, with outputs in our own memory if their shapes are known before."""
        with refusals(f"run {self.path.name if self.path else 'the model'}"):
            buffers = self._buffers.take(shapes)
            binding = session.io_binding()
            for name, array in arrays.items():
                binding.bind_cpu_input(name, array)
            for name, output in zip(self._names, buffers, strict=True):
                if output is None:
                    binding.bind_output(name, "cpu")
                else:
                    binding.bind_output(name, "cpu", 0, output.dtype, output.shape, output.ctypes.data)
            try:
                session.run_with_iobinding(binding, options)
            except Exception as exc:  # of no class that says why
                if options.terminate:
                    raise Interrupted("the run was stopped") from exc
                if _NO_MEMORY in str(exc):
                    raise MemoryError from exc
                raise
            if options.terminate:  # too late to end it early
                raise Interrupted("the run was stopped")
            values = binding.get_outputs() if None in shapes else buffers
            return {
                name: value.numpy() if output is None else output
                for name, output, value in zip(self._names, buffers, values, strict=True)
            }


class _Buffers:
    """Memory for outputs: sets of arrays used in turn, or new arrays for each run."""

    def __init__(self, outputs: tuple[Output, ...], sets: int) -> None:
        self._types, self._sets = [output.dtype for output in outputs if output.type in TYPES], sets
        self._shapes: _Shapes = ()
        self._sets_in_turn: deque[tuple[Array | None, ...]] = deque()
        self._lock = threading.Lock()

    def take(self, shapes: _Shapes) -> tuple[Array | None, ...]:
        """Return an array for each output; None if its shape is None."""
        if not self._sets:
            return self._new(shapes)
        with self._lock:
            if shapes != self._shapes:
                self._shapes = shapes
                self._sets_in_turn.clear()
            arrays = self._new(shapes) if len(self._sets_in_turn) < self._sets else self._sets_in_turn.popleft()
            self._sets_in_turn.append(arrays)
            return arrays

    def _new(self, shapes: _Shapes) -> tuple[Array | None, ...]:
        return tuple(
            None if shape is None else np.empty(shape, dtype) for dtype, shape in zip(self._types, shapes, strict=True)
        )


def _checked(model: Path | bytes) -> tuple[Any, frozenset[Path]]:
    """Return the model's GraphProto, valid as far as can be seen without ONNX Runtime, and the files it lies in."""
    try:
        if isinstance(model, bytes):
            return parsed(model).graph, frozenset()
        file = load(model)
        return file.model.graph, file.data_files | {model}
    except ModelFileError as exc:
        if bad_node := _BAD_NODE.search(str(exc.__cause__)):
            raise ModelFileError(f"{exc} (node {bad_node[1]!r}, {bad_node[2]})") from exc
        raise
