"""`python -m tests.packages` builds the wheel and the sdist, installs each into an empty environment, and tries it.

PYTHON is the interpreter of these environments, else the one that runs this. pip takes llama-cpp-python from its cache,
or builds it, which takes minutes; PIP_FIND_LINKS may name a folder of wheels.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packages.building import built, copied

_INSTALL_S = 3600.0  # llama.cpp may be built
_RUN_S = 300.0
_PROMPT = "What is 27 plus 38?"
_ANSWER = "27 plus 38 is 65."


def main() -> None:
    """Try both; the first that fails ends with an error."""
    python = os.environ.get("PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        source = copied(folder / "source")
        packages = [built(kind, source, folder / "built") for kind in ("wheel", "sdist")]
        for package in packages:
            try_out(package, python, folder / f"{package.name}-environment")
            print(f"{package.name}: installed, and it answers", flush=True)


def try_out(package: Path, python: str, folder: Path) -> None:
    """Install a package into a new environment in a folder, and run it there, outside of the checkout."""
    _run(_RUN_S, python, "-m", "venv", str(folder))
    bin_folder = folder / "bin"
    _run(_INSTALL_S, str(bin_folder / "python"), "-m", "pip", "install", "--quiet", str(package))
    version = _run(_RUN_S, str(bin_folder / "python"), "--version").strip()
    said = _run(_RUN_S, str(bin_folder / "edge"), "chat", "-p", _PROMPT, "--temperature", "0", cwd=folder).strip()
    if said != _ANSWER:
        raise SystemExit(f"{package.name} with {version}: edge chat says {said!r}, and {_ANSWER!r} was expected")
    files = _run(_RUN_S, str(bin_folder / "edge"), "doctor", "--json", cwd=folder, codes=(0, 8))
    if str(folder) not in files:
        raise SystemExit(f"{package.name} with {version}: edge doctor does not find llama.cpp in {folder}")


def _run(limit_s: float, *command: str, cwd: Path | None = None, codes: tuple[int, ...] = (0,)) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
