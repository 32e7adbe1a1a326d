"""`python -m tests.packages.wheels FOLDER` installs edge from a folder of wheels without a compiler, and asks it.

The environment is empty, and its PATH has nothing but the environment's own programs. PYTHON is the interpreter, by
default the one that runs this. Packages of others come from PyPI or pip's cache. Prints how long each step took.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.packages.__main__ import _ANSWER, _PROMPT

_DEADLINE_S = 900.0  # of all commands together: a busy machine takes ten times as long as a quiet one


def main() -> None:
    wheels = Path(sys.argv[1]).resolve()
    end = time.monotonic() + _DEADLINE_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"PATH": str(folder / "bin"), "HOME": str(folder / "home"), "LANG": "C.UTF-8"}
        env |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "XDG_CACHE"))}
        cache = Path.home() / ".cache/pip"
        env.setdefault("PIP_CACHE_DIR", str(cache))

        def run(*command: str) -> str:
            began = time.monotonic()
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=folder, env=env, timeout=end - began, check=False
            )
            if done.returncode not in (0, 8):  # 8: findings of edge doctor
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
            print(f"{time.monotonic() - began:6.1f} s  {' '.join(command)}", flush=True)
            return done.stdout.strip()

        subprocess.run([os.environ.get("PYTHON", sys.executable), "-m", "venv", name], timeout=_DEADLINE_S, check=True)
        (folder / "home").mkdir()
        programs = f"{name}/bin"
        began = time.monotonic()
        options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--find-links", str(wheels))
        run(f"{programs}/python", "-m", "pip", "install", *options, "edge-runtime")
        answer = run(f"{programs}/edge", "chat", "-p", _PROMPT, "--temperature", "0")
        if answer != _ANSWER:
            raise SystemExit(f"edge chat says {answer!r}, and {_ANSWER!r} was expected")
        print(f"{time.monotonic() - began:6.1f} s  from pip install to an answer", flush=True)
        findings = {each["check"]: each for each in json.loads(run(f"{programs}/edge", "doctor", "--json"))["findings"]}
        if "uses its module" not in findings["instructions"]["seen"]:
            raise SystemExit(f"edge doctor names no module: {findings['instructions']['seen']}")
        print(findings["instructions"]["seen"])
    print("1 passed, 0 failed")


if __name__ == "__main__":
    main()
