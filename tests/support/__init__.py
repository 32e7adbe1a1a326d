"""Shared parts of tests: models, workers, clusters, commands, and paths of files."""

import math
import sys
from pathlib import Path
from types import ModuleType

from devices import probe
from devices.processes.rates import Rates

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FORKED_COMMAND = "tests.support.forked_command"  # what fork servers of tests run
ENGINE = "an engine process"  # asks them for one, in place of a command
MODULE = "a module"  # and for a process that runs one, which has the end of its name
MOST_OF_A_NAME = 15  # characters; Linux keeps no more
# Seconds that `edge.net.dialling` measures a link for: tests check what is done with figures, not how true they are.
BRIEF_LINKS = {"_ROUND_TRIPS_S": 0.003, "_MEASURE_S": 0.01}
BRIEF_MEASUREMENTS: dict[str, float] = {
    "edge.planning.plan_options.SURVEY_S": math.inf,  # beside other tests a survey may take long
    "edge.profiling.layer_times._SAMPLES": 1,
    "edge.profiling.onnx_times._LEAST_S": 0.01,
    "edge.profiling.onnx_times._LONG_S": 0.01,
    "edge.profiling.links._PAIR_S": 0.02,
    "edge.profiling.links._APART_S": 0.0,
    "edge.profiling.links._ROUNDS": 1,
    "edge.planning.measure.ROUNDS": 1,
    "edge.planning.measuring.SCATTER": math.inf,  # none is measured again
    "edge.planning.measuring.OFF": math.inf,
    "edge.planning.measure._SAMPLE_S": 0.01,
    "edge.planning.measure._SAMPLES": 1,
    "edge.planning.onnx_space._ABOUT_S": 0.1,
    "edge.planning.type_files.CHUNKS": 1,
}
# Types that weights are tried in, where a file is made to fit: to quantize to further ones takes seconds to prepare.
FEW_PROBES = 5
# Objects, until garbage is looked for: each few hundred, as Python does, it takes a tenth of the time of unit tests.
GARBAGE_AFTER = 10_000
# Of `apps.show.progress`: after how long the first line of a job comes, and the next.
PLAIN_LINES = ("PLAIN_AFTER_S", "PLAIN_INTERVAL_S", "STILL_S")
NEVER_S = 1e9


def made_up_rates(threads: int) -> Rates:
    """Stand in for the process that measures a device's rates: tests do not check how true they are."""
    return Rates(threads * 1e10, threads * 5e10)


def one_thread() -> int:
    """Stand in for `devices.probe.default_threads`: tests share the cores with other tests, and llama.cpp's threads
    spin while they wait for each other."""
    return 1


def ask_for_default_threads() -> list[ModuleType]:
    """List the modules of the product that ask for the default number of threads, as far as they are imported."""
    modules = [module for name, module in [*sys.modules.items()] if not name.startswith("tests.")]
    return [module for module in modules if vars(module).get("default_threads") is probe.default_threads]
