"""Observation of a whole network in a run on this device: shapes that cannot be inferred, and node times."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from devices.probe import available_memory
from edge.errors import EngineError, NotEnoughMemory
from edge.onnx.file import OnnxFile
from edge.onnx.runtime import refusals, runtime, session_options
from edge.onnx.samples import Feeds
from partition.model.onnx_graph import flat_nodes
from partition.model.onnx_shapes import type_name

_COPIES = 4  # copies of the weights during the run: two messages, one serialized, one in ONNX Runtime
_LEAST_RUNS, _RUNS, _MOST_S = 2, 6, 2.0  # timed runs; the fastest counts because the first is slow
_KERNEL, _BLOCKED = "_kernel_time", "_nchwc"  # suffixes of kernel names; "_nchwc" marks channels in blocks
_MARK = re.compile(r"@(\d+)@")  # mark in a node's name: its place in the model
_INNER = "@inner@"


class ObservedRun:
    """A network and an input that it is run with."""

    def __init__(self, file: OnnxFile, feeds: Feeds) -> None:
        self._file, self._feeds = file, feeds
        self.failed = ""  # reason why the network could not be run

    def shapes(self, names: Sequence[str]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return element type and shape of the named values, without values that are not tensors.

        If the network cannot be run here, return inputs only; `failed` has the reason.
        """
        import onnx

        inputs = {name: self._feeds[name] for name in names if name in self._feeds}
        shapes = {name: (array.dtype.name, array.shape) for name, array in inputs.items()}
        computed = [name for name in names if name not in inputs]
        if not computed:
            return shapes
        try:
            model = self._whole()
            outputs = {value.name for value in model.graph.output}
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed if name not in outputs)
            with refusals(f"run {self._file.path.name}"):
                session = self._session(model, session_options(None))
                inputs = {n: runtime().OrtValue.ortvalue_from_numpy(array) for n, array in self._feeds.items()}
                values = session.run_with_ort_values(computed, inputs)
        except (EngineError, NotEnoughMemory) as error:
            self.failed = str(error)
            return shapes
        for name, value in zip(computed, values, strict=True):
            kind = type_name(value.element_type()) if value.is_tensor() else None
            if kind is not None:
                shapes[name] = (kind, tuple(value.shape()))
        return shapes

    def node_seconds(self, places: Sequence[int], threads: int | None = None) -> list[float]:
        """Return the seconds of the nodes at these places of the model's list, by ONNX Runtime's own clock.

        The fastest of several runs counts. If ONNX Runtime fused several nodes into a kernel, one of them gets its
        time. Raises EngineError if the network does not run, and NotEnoughMemory if memory is insufficient.
        """
        model = self._whole()
        makers = {name: place for place, node in enumerate(model.graph.node) for name in node.output if name}
        for place, node in enumerate(model.graph.node):
            node.name = f"@{place}@"
            _mark_inner(node)
        with tempfile.TemporaryDirectory(prefix="edge-profile-") as folder:
            options = session_options(threads)
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "run")
            with refusals(f"run {self._file.path.name}"):
                session = self._session(model, options)
                ends_s = time.monotonic() + _MOST_S
                for i in range(_RUNS):
                    if i < _LEAST_RUNS or time.monotonic() < ends_s:
                        session.run(None, self._feeds)
                events = json.loads(Path(session.end_profiling()).read_text())
        seconds = kernel_seconds(events, makers)
        return [seconds.get(place, 0.0) for place in places]

    def _whole(self) -> Any:
        """Return a copy of the model with inlined functions. Raises NotEnoughMemory if its run would exceed the
        memory."""
        import onnx

        need, have = _COPIES * self._file.weight_bytes, available_memory()
        if need > have:
            raise NotEnoughMemory(
                f"to run {self._file.path.name} once needs about {need >> 20:,} MiB here, but {have >> 20:,} MiB are"
                " available"
            )
        model = onnx.ModelProto()
        if self._file.external:  # weights stay in their files
            model = onnx.load(str(self._file.path), load_external_data=False)
        else:
            model.CopyFrom(self._file.model)
        nodes = flat_nodes(model)
        if model.functions:
            model.ClearField("functions")
            model.graph.ClearField("node")
            model.graph.node.extend(nodes)
        return model

    def _session(self, model: Any, options: Any) -> Any:
        if self._file.external:
            folder = str(self._file.path.parent.resolve())
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return runtime().InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def kernel_seconds(events: Sequence[Mapping[str, Any]], makers: Mapping[str, int]) -> dict[int, float]:
    """Return the seconds by the place of a node, from the events of a profile. The minimum over all runs counts.

    Node names contain their places. ONNX Runtime names fused convolutions after a tensor; `makers` maps each tensor to
    the place of its node. A kernel that ONNX Runtime inserted counts for the next known node.
    """
    runs: dict[int, list[float]] = {}
    inserted = 0.0
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        name = str(event.get("name", ""))
        if event.get("cat") != "Node" or not name.endswith(_KERNEL) or _INNER in name:
            continue
        seconds = float(event["dur"]) / 1e6
        mark = _MARK.search(name)
        place = int(mark[1]) if mark else makers.get(name.removesuffix(_KERNEL).removesuffix(_BLOCKED))
        if place is None:
            inserted += seconds
            continue
        runs.setdefault(place, []).append(seconds + inserted)
        inserted = 0.0
    return {place: min(seconds) for place, seconds in runs.items()}


def _mark_inner(node: Any) -> None:
    """Mark the names of nodes in subgraphs. Their time is part of the node that contains the subgraph."""
    for attribute in node.attribute:
        for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            for i, inner in enumerate(graph.node):
                inner.name = f"{node.name}{_INNER}{i}"
                _mark_inner(inner)
