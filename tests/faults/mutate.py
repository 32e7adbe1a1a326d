"""Mutate files in a copy of this tree with Cosmic Ray, and show the mutants that no test notices.

    python -m tests.faults.mutate [FILE ...] [--tests TEST ...]

Without FILE, only the lines of the product that differ from the branch `main` are mutated. By default, the tests that
import a file are run for it. They must pass before the file is mutated. The exit code is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.plant import ROOT, TESTS_TIMEOUT_S, copy_of_the_tree, outcome

PACKAGES = ("apps", "devices", "edge", "partition", "quant", "transport")
SLOW = ("clients", "faults", "house", "real", "support", "system", "vulkan")  # folders of tests that are not run

CONFIG = """
[cosmic-ray]
module-path = {module}
timeout = {timeout_s}
excluded-modules = []
test-command = {command}
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.git-filter]
branch = {base}
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]  # mostly types such as `int | None`
"""


def git(*words: str, folder: Path = ROOT) -> str:
    """Run git in a folder, and return its output."""
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def changed_files(base: str) -> list[str]:
    """Return the Python files of the product that differ from a commit."""
    names = git("diff", "--name-only", "--diff-filter=d", base, "--", *PACKAGES).splitlines()
    return [name for name in names if name.endswith(".py") and not name.endswith("_pb2.py")]


def tests_of(file: str) -> list[str]:
    """Return the files of tests that import a file of the product."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"(from|import) {re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if imports.search(path.read_text())]
    names = [path.relative_to(ROOT) for path in paths]
    return [str(name) for name in names if name.parts[1] not in SLOW]


def survivors(folder: Path, file: str, tests: Sequence[str], base: str | None) -> tuple[int, list[str]]:
    """Mutate a file. Return the number of mutants, and the differences of the mutants that pass all tests.

    base: commit; only lines that differ from it are mutated. None: mutate all lines.
    """
    from cosmic_ray.work_db import WorkDB, use_db  # `make mutate` installs it
    from cosmic_ray.work_item import TestOutcome

    command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider {' '.join(tests)}"
    config, session = folder / "mutate.toml", folder / "mutate.sqlite"
    tools = Path(sys.executable).parent
    env = {**os.environ, "PYTHONPATH": str(folder)}
    values = {"module": file, "timeout_s": TESTS_TIMEOUT_S, "command": command, "base": base or ""}
    config.write_text(CONFIG.format(**{name: json.dumps(value) for name, value in values.items()}))
    session.unlink(missing_ok=True)
    subprocess.run([tools / "cosmic-ray", "init", config, session], cwd=folder, check=True)
    subprocess.run([tools / "cr-filter-operators", session, config], cwd=folder, check=True)
    if base:
        subprocess.run([tools / "cr-filter-git", "--config", config, session], cwd=folder, check=True)
    subprocess.run([tools / "cosmic-ray", "exec", config, session], cwd=folder, env=env, check=True)
    with use_db(session, WorkDB.Mode.open) as work:
        results = [result for _, result in work.completed_work_items if result.test_outcome is not None]
    return len(results), [result.diff for result in results if result.test_outcome == TestOutcome.SURVIVED]


def main() -> int:
    """Mutate files and print survivors. Return the exit code."""
    parser = argparse.ArgumentParser(description="Mutate files in a copy of this tree, and show what no test notices.")
    parser.add_argument("files", nargs="*", metavar="FILE", help="files of the product (default: changes since main)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="tests to run (default: those that import the file)")
    args = parser.parse_args()
    n_mutants, n_survivors = 0, 0
    with tempfile.TemporaryDirectory(prefix="edge-mutants-") as name:
        folder = Path(name)
        git("clone", "--quiet", "--shared", str(ROOT), name)
        copy_of_the_tree(folder)
        base = git("merge-base", "main", "HEAD").strip()
        for file in args.files or changed_files(base):
            tests = args.tests or tests_of(file)
            if not tests:
                print(f"{file}: no test imports it; name some with --tests", file=sys.stderr)
                continue
            if outcome(folder, tests, TESTS_TIMEOUT_S, is_planted=False) != "passed":
                return 2
            n, differences = survivors(folder, file, tests, None if args.files else base)
            n_mutants, n_survivors = n_mutants + n, n_survivors + len(differences)
            print(f"{file}: {len(differences)} of {n} mutants survive {', '.join(tests)}", flush=True)
            print(*differences, sep="\n", flush=True)
    print(f"{n_mutants - n_survivors} of {n_mutants} mutants are noticed")
    return 1 if n_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
