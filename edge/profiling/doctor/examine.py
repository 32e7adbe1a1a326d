"""Run all checks in order: this device, each worker, each link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from devices.machine_cores import instruction_sets, knowable_sets
from devices.paths import cache_folder, config_folder, state_folder
from edge.errors import EngineError
from edge.profiling.doctor import install, machine, native, trust, workers
from edge.profiling.doctor.findings import LOCAL, NOTE, PROBLEM, Check, Finding, Report, Verdict, run_check
from edge.profiling.doctor.install import Build, Installed
from edge.tasks import SILENT, Steps

# For one check of this device. The slowest one starts a process with a shorter deadline.
CHECK_TIMEOUT_S = native.NATIVE_TIMEOUT_S + 10.0


def examine(addresses: Sequence[str] = (), *, insecure: bool = False, steps: Steps = SILENT) -> Report:
    """Check this device, the workers at these addresses, and every link between all of them.

    A failed or late check becomes a finding, and the other checks still run.
    insecure: allow workers without TLS.
    """
    findings: list[Finding] = []
    checks = LocalChecks().checks()
    with steps.step("Checking this device", len(checks), "checks") as show:
        for number, (name, check) in enumerate(checks.items()):
            show(number, what=name)
            findings.append(run_check(LOCAL, name, check, CHECK_TIMEOUT_S))
    names: dict[str, str] = {}
    with steps.step("Checking workers", len(addresses), "workers") as show:
        for number, address in enumerate(addresses):
            show(number, what=address)
            worker, worker_findings = workers.check_worker(address, insecure=insecure)
            findings += worker_findings
            if worker is not None:
                names[address] = worker
    n_links = len(names) * (len(names) + 1) // 2
    with steps.step("Measuring links", n_links, "links") as show:
        for number, link in enumerate(workers.link_findings(names, insecure=insecure), 1):
            findings.append(link)
            show(number, what=link.where)
    return Report(findings)


class LocalChecks:
    """Checks of this device. Shared facts are read once, by the first check that needs them."""

    @cached_property
    def installed(self) -> Installed | None:
        """Installed packages, or None for a checkout that is not installed."""
        with suppress(PackageNotFoundError):
            return install.read_installed()
        return None

    @cached_property
    def build(self) -> Build | EngineError:
        """llama.cpp's description of its build, or the error of reading it."""
        try:
            description = native.ask("describe")
        except EngineError as error:
            return error
        sets, knowable = frozenset(instruction_sets()), knowable_sets()
        return Build(
            description["library"], description["system_info"], description["gpu"], sets, knowable, install.gpu_files(),
            description["module"], tuple(description["modules"]),
        )  # fmt: skip

    @cached_property
    def cores(self) -> machine.Cores:
        """Cores and load."""
        return machine.read_cores()

    def checks(self) -> dict[str, Check]:
        """Return the checks by name, in order."""
        folders = {"cache": cache_folder(), "state": state_folder(), "config": config_folder()}
        return {
            "python": partial(self._package, install.python),
            "packages": partial(self._package, install.packages),
            **{name: partial(self._package, partial(install.extra, name)) for name in install.EXTRAS},
            "llama.cpp": self._llama_cpp,
            "instructions": partial(self._native, install.instructions),
            "amx": partial(self._native, install.amx),
            "gpu": partial(self._native, install.gpu),
            "answer": partial(self._native, answer_of),
            "memory": lambda: machine.memory(machine.read_memory()),
            **{name: partial(_folder, folder) for name, folder in folders.items()},
            "cores": lambda: machine.cores(self.cores),
            "load": lambda: machine.load(self.cores),
            "clocks": lambda: machine.clocks(machine.read_clocks()),
            "heat": lambda: machine.heat(machine.read_heat()),
            "files": lambda: machine.files(machine.read_files()),
            "port": lambda: machine.port(machine.read_port()),
            "trust": lambda: trust.trust(trust.read_trust()),
            "clock": lambda: trust.clock(trust.read_trust()),
        }

    def _package(self, judge: Callable[[Installed], Verdict]) -> Verdict:
        if self.installed is None:
            return Verdict(NOTE, "edge-runtime is not installed, so its ranges are not known", "pip install .")
        return judge(self.installed)

    def _llama_cpp(self) -> Verdict:
        if isinstance(self.build, EngineError):
            return Verdict(PROBLEM, str(self.build), install.REBUILD)
        return install.llama_cpp(self.build)

    def _native(self, judge: Callable[[Build], Verdict]) -> Verdict:
        if isinstance(self.build, EngineError):
            return Verdict(NOTE, "not checked: llama.cpp cannot be used", "see the check llama.cpp")
        return judge(self.build)


def _folder(folder: Path) -> Verdict:
    return machine.folder(machine.read_folder(folder))


def answer_of(build: Build) -> Verdict:
    """Check the bundled model's answer, unless a kernel of this build would crash the process."""
    if install.instructions(build).level == PROBLEM:
        return Verdict(NOTE, "not tried: this build does not fit the processor", "see the check instructions")
    try:
        return install.answer(native.ask("answer")["text"])
    except EngineError as error:
        return Verdict(PROBLEM, str(error), install.REBUILD)
