"""Plants seeded faults one by one in a copy of this tree, and shows which the tests notice.

    python tests/faults/plant.py [--all] [ID ...]

The faults are in the .toml files beside this one, one file for each package of the product. `text` occurs once in
`file` and is replaced by `becomes`. `harm` says what the fault would do to a person. `tests` lists the tests that
notice the fault, each as a file or file::test. Without IDs all faults are planted. The tests that are named with a
fault are run, or the whole suite with --all. The tests must pass before a fault is planted. The exit code is 1 if a
fault is not noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent
SUITE_TIMEOUT_S, TESTS_TIMEOUT_S = 3600, 300  # a fault that makes tests hang is noticed, too
_FAILED = 1  # pytest's exit code where tests ran and some failed


@dataclass(frozen=True)
class Fault:
    """One change to the product that tests should notice."""

    id: str
    file: str
    text: str  # occurs once in the file
    becomes: str
    harm: str  # what it would do to a person
    tests: tuple[str, ...]  # tests that should notice the fault: files, or files::tests

    def planted_in(self, source: str) -> str:
        """The file's text with the fault. ValueError where it is no longer what the fault was made for."""
        result = source.count(self.text)
        if result != 1:
            raise ValueError(
                f"{self.id}: its text occurs {result} times in {self.file}, expected once; see tests/faults"
            )
        return source.replace(self.text, self.becomes)


def faults() -> list[Fault]:
    """All that are listed."""
    tables = [table for path in sorted(LISTS.glob("*.toml")) for table in tomllib.loads(path.read_text())["fault"]]
    return [Fault(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def copy_of_the_tree(folder: Path) -> None:
    """Copy what git has or would add, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def outcome(folder: Path, tests: Sequence[str], timeout_s: float, *, is_planted: bool) -> str:
    """Run tests in a tree; return "passed", "failed", "hung", or "broken" where they could not be run. Prints what is
    not as it should be."""
    workers = ("-n", "0") if tests else ()  # a few tests are done before other processes have begun
    command = [sys.executable, "-m", "pytest", "-q", "-x", *workers, "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode and not (is_planted and done.returncode == _FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return {0: "passed", _FAILED: "failed"}.get(done.returncode, "broken")


def main() -> int:
    """Plant, run, show; the exit code."""
    parser = argparse.ArgumentParser(description="Plant faults in a copy of this tree, and see what tests notice.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults to plant (default: all)")
    parser.add_argument("--all", action="store_true", help="run the whole suite for each, not only the tests named")
    args = parser.parse_args()
    known = {fault.id: fault for fault in faults()}
    if unknown := [name for name in args.ids if name not in known]:
        parser.error(f"no fault is called {', '.join(unknown)}; see {LISTS}")
    chosen = [known[name] for name in args.ids or known]
    timeout_s = SUITE_TIMEOUT_S if args.all else TESTS_TIMEOUT_S
    missed = []
    with tempfile.TemporaryDirectory(prefix="edge-faults-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        texts = {fault.id: fault.planted_in((folder / fault.file).read_text()) for fault in chosen}
        needed = [] if args.all else sorted({test for fault in chosen for test in fault.tests})
        if outcome(folder, needed, SUITE_TIMEOUT_S, is_planted=False) != "passed":
            print("the tests fail without any fault; run them, and mend that first", file=sys.stderr)
            return 2
        print(f"{'fault':40} {'noticed':8} by", flush=True)
        for fault in chosen:
            path = folder / fault.file
            sound = path.read_text()
            path.write_text(texts[fault.id])
            result = outcome(folder, [] if args.all else fault.tests, timeout_s, is_planted=True)
            path.write_text(sound)
            noticed = result in ("failed", "hung")
            if not noticed:
                missed.append(fault)
            by = result if result != "failed" else "the suite" if args.all else ", ".join(fault.tests)
            print(f"{fault.id:40} {'yes' if noticed else 'NO':8} {by}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are noticed")
    for fault in missed:
        print(f"missed: {fault.id}: {fault.harm}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
