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

_Shapes = tuple["tuple[int, ...] | None", ...]  # shapes of the outputs; None for a shape that only the run determines


class OnnxEngine(Closing):
    """A loaded ONNX model.

    Several threads may call `run` at the same time. Python's lock is released during the computation.
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
        alone: bool = True,
    ) -> None:
        """Load the file `model`, or the bytes of such a file, with all its weights.

        threads: number of threads; None: one per physical core
        provider: execution provider, such as "cuda"; None: the best one of this build that accepts the model. Operators
            that the provider does not support run on the CPU.
        dims: sizes of open dimensions, by name or as "input[axis]". These dimensions are fixed from then on.
        buffers: number of memory sets for outputs, used in turn. The outputs of a run stay valid until `buffers` later
            runs have begun, and at most this many runs may be concurrent. With 0 every run returns new arrays, which
            the caller may keep.
        outputs: names of the outputs to compute; empty: all readable outputs
        alone: see `open_session`

        Raises OSError if the file cannot be read. Raises ModelFileError if it is not a valid ONNX model, if an input is
        not a tensor of numbers, or if no output can be read as an array. Raises EngineError if the provider is not
        available, or if ONNX Runtime does not support an operator; the message names the node.
        """
        self.path = model if isinstance(model, Path) else None
        self.threads = threads or default_threads()
        name = self.path.name if self.path else "the model"
        graph, self.files = _checked(model)  # `files` has the model's file and its files of weights
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
            source, name, self.threads, provider, overrides, nodes, alone=alone
        )
        # ONNX Runtime has no override for unnamed dimensions.
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
        """Compute the model and return its outputs by name.

        feeds: an array of the declared type and shape for each input, by name. Contiguous arrays are used without a
            copy, also read-only ones. They must not change during the run.

        If the engine has buffers, outputs with a declared shape are valid as described for `buffers` in `__init__`. The
        caller may keep all other outputs. Raises SamplesError if an input does not fit, EngineError with the node's
        name if ONNX Runtime fails, NotEnoughMemory if memory runs out, and Interrupted after `stop`.
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
            # Declared shapes are unchecked. If a careless export declared wrong ones, a run without buffers succeeds.
            outputs = self._compute(session, options, arrays, (None,) * len(shapes))
            self._shapes_hold = False
            return outputs

    def stop(self) -> None:
        """Make a run in another thread raise Interrupted at its next node. Later runs raise it, too."""
        self._options.terminate = True

    def resume(self) -> None:
        """Allow runs again after `stop`. A run that is already being stopped still ends."""
        self._options = self._new_options()

    def close(self) -> None:
        """Free the model when runs in other threads have ended. Outputs that the caller holds stay valid."""
        self._session = None

    @staticmethod
    def _new_options() -> Any:
        options = runtime().RunOptions()
        options.log_severity_level = 4  # log nothing
        # -1 is the default: no CUDA graph to replay. If the entry is missing, its lookup takes longer than a small
        # model.
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _compute_any(self, session: Any, options: Any, feeds: Feeds) -> Feeds:
        """Run a model with outputs of text or of maps. ONNX Runtime cannot write these into preallocated memory."""
        with refusals(f"run {self.path.name if self.path else 'the model'}"):
            try:
                values = session.run(self._names, feeds, options)
            except Exception as exc:  # ONNX Runtime's exceptions do not share a class that gives the reason
                if options.terminate:
                    raise Interrupted("the run was stopped") from exc
                raise
        return {name: as_array(value) for name, value in zip(self._names, values, strict=True)}

    def _compute(self, session: Any, options: Any, arrays: Feeds, shapes: _Shapes) -> Feeds:
        """Run the model. Outputs whose shapes are known in advance are written into our own buffers."""
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
            except Exception as exc:  # ONNX Runtime's exceptions do not share a class that gives the reason
                if options.terminate:
                    raise Interrupted("the run was stopped") from exc
                if _NO_MEMORY in str(exc):
                    raise MemoryError from exc
                raise
            if options.terminate:  # the stop came too late to end the run early
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
    """Return the model's GraphProto and the files that hold the model, after the checks that need no ONNX Runtime."""
    try:
        if isinstance(model, bytes):
            return parsed(model).graph, frozenset()
        file = load(model)
        return file.model.graph, file.data_files | {model}
    except ModelFileError as exc:
        if bad_node := _BAD_NODE.search(str(exc.__cause__)):
            raise ModelFileError(f"{exc} (node {bad_node[1]!r}, {bad_node[2]})") from exc
        raise
