"""Models the tests run: the bundled one, and small random ones of each architecture, written once a session."""

import os
import sys

# Four processes, and hundreds that they start, import the same. Bytecode is written before they do, also where
# PYTHONDONTWRITEBYTECODE is set: a first run would compile everything each time, for a minute of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of llama.cpp and numpy spin while they wait for each other: beside three other processes of tests, for ever.
# Libraries read this when they are loaded, and processes that tests start have it, too.
if os.environ.get("EDGE_THOROUGH") != "1":
    os.environ |= {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}

import gc
import importlib
import signal
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from apps.show import progress
from devices.paths import cache_folder, state_folder
from devices.processes.forking import available
from edge.cluster import session
from edge.errors import EdgeError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from edge.net import dialling
from tests.support import (
    BRIEF_LINKS,
    GARBAGE_AFTER,
    NEVER_S,
    PLAIN_LINES,
    ROOT,
    TESTS,
    ask_for_default_threads,
    made_up_rates,
    one_thread,
)
from tests.support.fixtures import one_worker, two  # noqa: F401
from tests.support.forked_modules import fork_modules
from tests.support.helpers import OwnEngines
from tests.support.measuring import measure_briefly
from tests.support.thorough import THOROUGH, some

# Tests fork (pexpect does); gRPC would want to be told of it, and sometimes ends the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Tests send themselves SIGINT, which a shell that starts them in the background has ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure; a test that hangs is ended by its own deadlines.
settings.register_profile("edge", deadline=None, max_examples=some(30, 100))
settings.load_profile("edge")

# What is collected, half a million objects, stays to the end: neither is garbage looked for until it is there, nor are
# these objects ever looked at, which would take a fifth of the time of the tests.
gc.disable()


def pytest_collection(session: pytest.Session) -> None:
    """Import the files of tests, each of several processes from another one on: what the first has compiled to
    bytecode, which takes two thirds of the time of collecting, the others find."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    folders = [session.config.invocation_params.dir / argument for argument in session.config.args]
    files = sorted({file for folder in folders if folder.is_dir() for file in folder.rglob("test_*.py")})
    first = len(files) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) // workers
    for file in files[first:] + files[:first]:
        with suppress(Exception):  # collecting says what is wrong with it
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Look for garbage from now on, in what tests make, but seldom: the end of each file looks, too."""
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_looked_for_in_what_a_file_makes() -> Iterator[None]:
    """Leave what lives on when the tests of a file are over, such as modules, out of later searches."""
    yield
    gc.collect()
    gc.freeze()


# What a person has kept is neither used nor changed; processes that tests start look here, too.
_STATE = tempfile.TemporaryDirectory(prefix="edge-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
if "PYTEST_XDIST_WORKER" not in os.environ:  # the processes of pytest-xdist share the caches
    os.environ.setdefault("PIP_CACHE_DIR", str(cache_folder().parent / "pip"))
    os.environ["XDG_CACHE_HOME"] = str(Path(_STATE.name) / "cache")
    os.environ["HF_HOME"] = str(Path(_STATE.name) / "huggingface")

# Where a test keeps what it caches elsewhere, matplotlib would list all fonts of the system anew.
os.environ.setdefault("MPLCONFIGDIR", str(Path(_STATE.name) / "matplotlib"))


@pytest.fixture(autouse=True)
def _nothing_is_kept_of_prompts() -> None:
    """A test finds no prompts of others: without the key there are none."""
    (state_folder() / "prefix.key").unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def _a_slow_machine_prints_no_more() -> Iterator[None]:
    """Print no lines of progress on standard error: beside a load every job is long. Forked commands do the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in PLAIN_LINES:
            patch.setattr(progress, name, NEVER_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_file_of_certificates_is_read_once() -> Iterator[None]:
    """Each client of httpx reads those of the web's authorities, for 15 ms, also where it speaks to this machine."""
    new = ssl.create_default_context
    of_file = cache(lambda path: new(cafile=path))

    def context(*arguments: Any, **how: Any) -> ssl.SSLContext:
        return of_file(how["cafile"]) if how.keys() == {"cafile"} and not arguments else new(*arguments, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _processes_are_forked() -> Iterator[None]:
    """Engine processes and others of this device, as commands are; with EDGE_THOROUGH=1 they are started as people's
    are, compute on as many threads, and links are tried for as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("devices.processes.rates.measured_apart", made_up_rates)
        if available() and not THOROUGH:
            for module in ask_for_default_threads():
                patch.setattr(module, "default_threads", one_thread)
            for name, seconds in BRIEF_LINKS.items():
                patch.setattr(dialling, name, seconds)
            patch.setattr(session, "RankProcess", partial(session.RankProcess, fork_server=OwnEngines()))  # type: ignore[attr-defined]
            fork_modules(patch)
        yield


def pytest_report_header() -> str:
    """Say whether all cases run."""
    return "all cases (EDGE_THOROUGH=1)" if THOROUGH else "fewer cases of some tests; EDGE_THOROUGH=1 runs all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `thorough`, unless it was asked for. Files that take long come first: a long one at the
    end would leave a process without work."""
    if not THOROUGH:
        left_out = {item for item in items if item.get_closest_marker("thorough")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, item.path.is_relative_to(TESTS / "unit")))


# Of half a minute and more; those of units take seconds.
LONG_FILES = {
    "test_chat_command.py", "test_collective.py", "test_discovery.py", "test_distributed_cli.py", "test_fitting.py",
    "test_links.py", "test_memory_commands.py", "test_onnx_devices_command.py", "test_onnx_survival.py",
    "test_python_api.py", "test_scheduler.py", "test_serve_command.py", "test_sessions.py", "test_survival.py",
    "test_trust_network.py",
}  # fmt: skip


SMALL = {"layers": 2, "embd": 128, "ff": 96, "heads": 4, "vocab": 512, "context": 512}
FIGURES: dict[str, dict[str, int]] = {
    "llama": {"kv": 2},
    "qwen2": {"kv": 2},
    "qwen3": {"kv": 2, "head_size": 32},
    "gemma": {"kv": 1, "head_size": 32},
    "gemma2": {"kv": 2, "head_size": 32},
    "gemma3": {"kv": 1, "head_size": 32},
    "qwen3moe": {"kv": 2, "head_size": 32, "experts": 4, "experts_used": 2, "expert_ff": 32},
    "phi3": {"kv": 2},
    "gpt-oss": {"kv": 2, "head_size": 32, "experts": 4, "experts_used": 2, "expert_ff": 32},
}
# Tests share two cores with whatever else runs; llama.cpp's threads spin while they wait for each other.
OPTIONS = EngineOptions(threads=1, context=256, batch=32)

Synthetic = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def own_priority() -> Iterator[None]:
    """Restore the priority of this thread after the tests of a file: devices of a sleeping lab run before all else."""
    if sys.platform == "linux":
        policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    yield
    if sys.platform == "linux":
        os.sched_setscheduler(0, policy, parameters)


@pytest.fixture(autouse=True)
def messages_name_options() -> None:
    """Let errors name options of the commands, until the test uses a name of `import edge`."""
    EdgeError.worded = staticmethod(str)


@pytest.fixture(scope="module")
def measured_briefly() -> Iterator[None]:
    """Surveys and measurements of the tests of a file take as short as can be."""
    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch)
        yield


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    """`synthetic(arch, type)`: the path of a small random model."""
    folder = tmp_path_factory.mktemp("models")

    def model(arch: str, type_name: str = "f16") -> Path:
        path = folder / f"{arch}-{type_name}.gguf"
        if not path.exists():
            synth.synthesize(path, shapes.shape(arch, **SMALL, **FIGURES[arch]), type_name)
        return path

    return model


@pytest.fixture
def demo() -> Iterator[Engine]:
    """The bundled model, loaded."""
    with Engine(MODEL_PATH, OPTIONS) as engine:
        yield engine


@pytest.fixture
def llama(synthetic: Synthetic) -> Iterator[Engine]:
    """A small random Llama, loaded; with quantized weights llama.cpp's sums do not depend on the batch size."""
    with Engine(synthetic("llama", "q8_0"), OPTIONS) as engine:
        yield engine
