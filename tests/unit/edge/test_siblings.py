"""Test `import edge` and `python -m edge` next to a user's own devices.py, partition.py, quant.py or transport.py."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devices.processes.interpreter import module_command
from edge.__main__ import main
from edge.siblings import NEEDED
from tests.packages.building import built, copied
from tests.support import ROOT
from tests.support.helpers import TIMEOUT_S
from tests.support.thorough import each_once

HOSTILE = "raise SystemExit(__file__ + ' was imported')\n"
# A name of each of the packages beside edge, and a module in each.
USE = (
    "import edge; edge.ClusterFileError, edge.PlanError, edge.UnknownTypeError, edge.TransportError;"
    " import devices.files, partition.fields, quant.types, transport.frame; print('works')"
)
ASK = "import edge\nwith edge.load() as model:\n    print(*(r.text for r in edge.Chat(model).ask('hello')), sep='')\n"
AS_TEST = "import edge\n\ndef test_it():\n    assert edge.PlanError and edge.TransportError and edge.ClusterFileError\n"


def python(*arguments: str | Path, cwd: Path, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """An interpreter as a person starts it in a folder, with this tree last. path: comes first in PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*([path] if path else ()), ROOT)))
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def as_script(folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "main.py").write_text(USE)
    return python("main.py", cwd=folder)


def as_command(folder: Path) -> "subprocess.CompletedProcess[str]":
    return python("-c", USE, cwd=folder)


def in_pythonpath(folder: Path) -> "subprocess.CompletedProcess[str]":
    return python("-c", USE, cwd=Path("/"), path=folder)


def as_pytest(folder: Path) -> "subprocess.CompletedProcess[str]":
    """pytest puts the folder of a test first on the path."""
    (folder / "test_main.py").write_text(AS_TEST)
    (folder / "conftest.py").write_text("")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder, cwd=Path("/"))
    done.stdout = done.stdout.replace("1 passed", "works")
    return done


Start = Callable[[Path], "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("start", "name"),
    each_once(
        [as_script, as_command, in_pythonpath, as_pytest],
        NEEDED,
        ids=lambda value: value if isinstance(value, str) else value.__name__,
    ),
)
def test_import_edge_works_beside_a_module_of_that_name(tmp_path: Path, name: str, start: Start) -> None:
    (tmp_path / f"{name}.py").write_text(HOSTILE)
    done = start(tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "works" in done.stdout


@pytest.mark.parametrize("package", [True, False], ids=["package", "folder"])
def test_import_edge_works_beside_folders_of_these_names(tmp_path: Path, package: bool) -> None:
    for name in NEEDED:
        (tmp_path / name).mkdir()
        if package:
            (tmp_path / name / "__init__.py").write_text(HOSTILE)
    done = as_command(tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("works", "")


def test_a_model_answers_beside_all_of_them(tmp_path: Path) -> None:
    """Its template is rendered by a process of its own, whose PYTHONPATH holds them, too."""
    for name in (*NEEDED, "apps"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    (tmp_path / "main.py").write_text(ASK)
    done = python("main.py", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_command_of_python_m_edge_works_beside_all_of_them(tmp_path: Path) -> None:
    for name in (*NEEDED, "apps"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    done = python("-m", "edge", "chat", "-p", "What is 27 plus 38?", "--temperature", "0", cwd=tmp_path, path=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "27 plus 38 is 65."), done.stderr
    wrong = python("-m", "edge", "chta", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("edge: ")
    assert "did you mean chat?" in wrong.stderr


def test_processes_of_ours_do_not_import_them_from_pythonpath(tmp_path: Path) -> None:
    for name in (*NEEDED, "apps", "edge"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    done = python(*module_command("apps.cli", "--version")[1:], cwd=tmp_path, path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("edge ")


def test_a_module_that_was_imported_first_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "quant.py").write_text("def mine(): return 7\n")
    done = python("-c", "import quant, edge", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: edge needs its own package 'quant', but this program has imported ")
    assert str(tmp_path / "quant.py") in last
    assert "rename that file" in last
    assert python("-c", "import quant; print(quant.mine())", cwd=tmp_path).stdout == "7\n"


def test_what_a_person_looks_for_in_the_hidden_module_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "quant.py").write_text("def mine(): return 7\n")
    done = python("-c", "import edge, quant; quant.mine()", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("AttributeError: module 'quant' has no attribute 'mine': it is a package of edge")
    assert f"hides {tmp_path / 'quant.py'}; rename that file" in last
    other = python("-c", "import edge, devices; devices.mine", cwd=tmp_path).stderr.strip().splitlines()[-1]
    assert other.startswith("AttributeError: module 'devices' has no attribute 'mine'")
    assert str(tmp_path) not in other


def test_a_package_that_is_ours_may_be_imported_first() -> None:
    done = python("-c", f"import devices, quant.gguf.file; {USE}", cwd=Path("/"))
    assert (done.stdout.strip(), done.stderr) == ("works", "")


def test_an_incomplete_installation_is_named(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    (source / "quant").rename(source / "quant-elsewhere")
    done = python("-c", "import edge", cwd=source)
    assert f"its package 'quant' is not in {source}; install it again" in done.stderr.strip().splitlines()[-1]


def test_the_wheel_works_beside_them_and_its_command_is_edge(tmp_path: Path) -> None:
    wheel = built("wheel", copied(tmp_path / "source"), tmp_path / "built")
    site, folder = tmp_path / "site", tmp_path / "folder"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True, timeout=TIMEOUT_S)
    for name in (*NEEDED, "apps"):
        (folder / f"{name}.py").write_text(HOSTILE)
    done = python("-c", f"{USE}; print(edge.__file__, devices.__file__)", cwd=folder, path=site)
    assert done.stdout.split() == ["works", str(site / "edge" / "__init__.py"), str(site / "devices" / "__init__.py")]
    (points,) = site.glob("*.dist-info/entry_points.txt")
    assert points.read_text().split() == ["[console_scripts]", "edge", "=", "edge.__main__:main"]
    script = "import sys; from edge.__main__ import main; sys.exit(main())"
    assert python("-c", script, "--version", cwd=folder, path=site).stdout.startswith("edge ")


def test_ctrl_c_during_the_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edge.__main__.import_siblings", interrupt)
    assert main() == 130
