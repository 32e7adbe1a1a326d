"""The wheel and the sdist have every module and every other file of the packages, and nothing else."""

from pathlib import Path

from tests.packages.building import ABOUT, built, copied, in_sdist, in_wheel, of_packages


def test_the_wheel_and_the_sdist_have_all_files_of_the_packages(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    files = of_packages(source)
    assert {
        "edge/py.typed",
        "edge/models/demo/edge-demo-q8_0.gguf",
        "edge/serve/page/index.html",
        "apps/cli.py",
    } <= files
    sdist = built("sdist", source, tmp_path / "built")
    assert in_sdist(sdist) == files | set(ABOUT)
    assert in_wheel(built("wheel", source, tmp_path / "built")) == files
