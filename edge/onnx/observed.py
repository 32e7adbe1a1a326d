"""A run of a whole network on this device, for what only a run tells: shapes that cannot be inferred, and what each
node takes."""

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
from edge.onnx.runtime import refusals, runtime
from edge.onnx.samples import Feeds
from partition.model.onnx_graph import flat_nodes
from partition.model.onnx_shapes import type_name

_COPIES = 4  # of the weights in memory meanwhile: two as messages, one written out, one as ONNX Runtime has it
_LEAST_RUNS, _RUNS, _MOST_S = 2, 6, 2.0  # to be timed; the least counts, as the first is slow
_KERNEL, _BLOCKED = "_kernel_time", "_nchwc"  # ends of kernels' names; the second: with channels in blocks
_MARK = re.compile(r"@(\d+)@")  # in the name of a node: its place in the model
_INNER = "@inner@"


class ObservedRun:
    """A network and an input of it."""

    def __init__(self, file: OnnxFile, feeds: Feeds) -> None:
        self._file, self._feeds = file, feeds
        self.failed = ""  # why it could not be run

    def shapes(self, names: Sequence[str]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Element type and shape of the tensors with these names, as far as they are tensors. Nothing where the
        network cannot be run here: `failed` says why."""
        import onnx

        given = {name: self._feeds[name] for name in names if name in self._feeds}
        found = {name: (array.dtype.name, array.shape) for name, array in given.items()}
        wanted = [name for name in names if name not in given]
        if not wanted:
            return found
        try:
            model = self._whole()
            there = {value.name for value in model.graph.output}
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in there)
            with refusals(f"run {self._file.path.name}"):
                session = self._session(model, _options())
                values = session.run_with_ort_values(wanted, _ort_values(self._feeds))
        except (EngineError, NotEnoughMemory) as error:
            self.failed = str(error)
            return found
        for name, value in zip(wanted, values, strict=True):
            kind = type_name(value.element_type()) if value.is_tensor() else None
            if kind is not None:
                found[name] = (kind, tuple(value.shape()))
        return found

    def node_seconds(self, places: Sequence[int], threads: int | None = None) -> list[float]:
        """The seconds of the nodes in these places of the model's list, by ONNX Runtime's own clock: the least of
        several runs. What it makes of several nodes counts for one of them.

        EngineError where it does not run, NotEnoughMemory where it has no room.
        """
        model = self._whole()
        makers = {name: place for place, node in enumerate(model.graph.node) for name in node.output if name}
        for place, node in enumerate(model.graph.node):
            node.name = f"@{place}@"
            _mark_inner(node)
        with tempfile.TemporaryDirectory(prefix="edge-profile-") as folder:
            options = _options(threads)
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "run")
            with refusals(f"run {self._file.path.name}"):
                session = self._session(model, options)
                ends_s = time.monotonic() + _MOST_S
                for i in range(_RUNS):
                    if i < _LEAST_RUNS or time.monotonic() < ends_s:
                        session.run(None, self._feeds)
                events = json.loads(Path(session.end_profiling()).read_text())
        taken = kernel_seconds(events, makers)
        return [taken.get(place, 0.0) for place in places]

    def _whole(self) -> Any:
        """The model, functions inlined, as a copy. NotEnoughMemory where it has no room here."""
        import onnx

        need, have = _COPIES * self._file.weight_bytes, available_memory()
        if need > have:
            raise NotEnoughMemory(
                f"to run {self._file.path.name} once takes about {need >> 20:,} MiB here, and there are {have >> 20:,}"
            )
        model = onnx.ModelProto()
        if self._file.external:  # weights stay where they are
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
    """Seconds by the place of a node, the least of all runs, from the events of a profile whose nodes have names with
    their places. What ONNX Runtime makes of convolutions is called by a tensor: makers has the places that make these.
    Another kernel, which ONNX Runtime put in, counts for the next one that is known."""
    runs: dict[int, list[float]] = {}
    waiting = 0.0
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        name = str(event.get("name", ""))
        if event.get("cat") != "Node" or not name.endswith(_KERNEL) or _INNER in name:
            continue
        seconds = float(event["dur"]) / 1e6
        mark = _MARK.search(name)
        place = int(mark[1]) if mark else makers.get(name.removesuffix(_KERNEL).removesuffix(_BLOCKED))
        if place is None:
            waiting += seconds
            continue
        runs.setdefault(place, []).append(seconds + waiting)
        waiting = 0.0
    return {place: min(seconds) for place, seconds in runs.items()}


def _mark_inner(node: Any) -> None:
    """Give the nodes of subgraphs names that say so: they are part of the node that holds them."""
    for attribute in node.attribute:
        for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            for i, inner in enumerate(graph.node):
                inner.name = f"{node.name}{_INNER}{i}"
                _mark_inner(inner)


def _options(threads: int | None = None) -> Any:
    options = runtime().SessionOptions()
    options.log_severity_level = 4  # nothing
    if threads:
        options.intra_op_num_threads = threads
    return options


def _ort_values(feeds: Feeds) -> dict[str, Any]:
    return {name: runtime().OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
