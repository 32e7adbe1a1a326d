"""`edge serve` with many models: presets, idle ones, and folders of hundreds."""

import shutil
import struct
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.cli import main
from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from tests.cli.test_serve_command import refused, served
from tests.support.helpers import until

PRESETS = f"""
[[model]]
name = "house"
model = "{MODEL_PATH}"
system = "You run a house."
pinned = true
context = 512
attention-window = 128
draft = "draft.gguf"
mmproj = "eyes.gguf"
encoder = "here"
threads = 1
repack = false
lora = ["adapter.gguf:0.5"]
think = "off"

[[model]]
name = "plain"
model = "model.gguf"
"""


def configs_of(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> tuple[dict[str, EngineConfig], Any, Any]:
    """The configurations that a command line has served, the server's options, and what fetches models."""
    got: list[Any] = []

    def serve(configs: Any, options: Any, **more: Any) -> None:
        got.extend((configs, options, more["fetch"]))

    monkeypatch.setattr("edge.serve.server.serve", serve)
    assert main(["serve", "--port", "0", *map(str, words)]) == 0
    return got[0], got[1], got[2]


def test_presets_are_models_with_names_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edge.weights.adapter.checked_for", lambda path, lora: tuple(lora))
    monkeypatch.setattr("edge.media.projector.open_projector", lambda path: None)
    for name in ("adapter.gguf", "draft.gguf", "eyes.gguf"):
        (tmp_path / name).touch()
    shutil.copy(MODEL_PATH, tmp_path / "model.gguf")
    (tmp_path / "serve.toml").write_text(PRESETS)
    file = tmp_path / "serve.toml"
    configs, options, _ = configs_of(monkeypatch, "--config", file, "--threads", "2", "--idle-unload", "1.5")
    house, plain = configs["house"], configs["plain"]
    assert (house.path, plain.path) == (str(MODEL_PATH), str(tmp_path / "model.gguf"))
    assert (house.system, plain.system) == ("You run a house.", "")
    assert (house.options.context, plain.options.context) == (512, None)
    assert (house.options.threads, plain.options.threads) == (1, 2)  # its own, else the command's
    assert house.options.repack is False
    assert (house.options.lora, plain.options.lora) == ((f"{tmp_path}/adapter.gguf:0.5",), ())
    assert (house.think, plain.think) == (0, -1)
    assert (house.draft, house.mmproj) == (str(tmp_path / "draft.gguf"), str(tmp_path / "eyes.gguf"))
    assert (plain.draft, plain.mmproj) == ("auto", None)
    assert (house.encoder, house.options.attention_window) == ("here", 128)
    assert (options.pinned, options.idle_unload_s) == (("house",), 90)


def test_a_model_stays_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options, _ = configs_of(monkeypatch, MODEL_PATH)
    assert (options.pinned, options.idle_unload_s) == ((), float("inf"))


@pytest.mark.parametrize(
    ("words", "may"),
    [
        ((), True),
        (("--host", "0.0.0.0", "--api-key", "k"), True),
        (("--host", "0.0.0.0", "--insecure"), False),
        (("--host", "0.0.0.0", "--insecure", "--allow-pull"), True),
    ],
)
def test_models_are_fetched_unless_everybody_could_ask(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], may: bool
) -> None:
    assert (configs_of(monkeypatch, MODEL_PATH, *words)[2] is not None) is may


def test_fetched_models_are_served_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.models.paths.pull", lambda name, progress: Path(f"/models/{name}"))
    configs, _, fetch = configs_of(monkeypatch, MODEL_PATH, "--allow-pull", "--threads", "3")
    [served] = configs.values()
    assert fetch("new", lambda *done: None) == replace(served, path="/models/new")
    configs, _, fetch = configs_of(monkeypatch, MODEL_PATH, "--threads", "3", "--workers", "127.0.0.1:9", "--insecure")
    assert fetch("new", lambda *done: None) == replace(served, path="/models/new", insecure=True)  # on this device


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[model]]\nname = "a"\nmodel = "gone.gguf"', "model[0].model: no such file: gone.gguf"),
        ('[[model]]\nname = "a"\nmodel = "."', "model[0].model needs the file of a model"),
        ('[[model]]\nname = "a"\nmodel = "m"\nmodle = 1', "model[0] has an unknown key 'modle'; known keys are name"),
        ('[model]\nname = "a"', "model needs to be tables, each below a line [[model]]"),
        ("port = 1", "it has an unknown key 'port'; known keys are model"),
        ('[[model]]\nname = "a"\nmodel = "{0}"\ncontext = "wide"', "model[0].context: --context: "),
        ('[[model]]\nname = "a"\nmodel = "{0}"\ncontext = [1]', "model[0].context needs a text or a number"),
        ('[[model]]\nname = "a"\nmodel = "{0}"\npinned = "no"', "model[0].pinned needs true or false"),
        ('[[model]]\nmodel = "{0}"', "model[0].name needs a text"),
        ('[[model]]\nname = "a"\nmodel = "{0}"\n' * 2, "model[1].name needs a name that no other model has"),
        ('[[model]]\nname = "a"\nmodel = "{0}"\nwindow = "1MiB"', "the model 'a': --window needs a memory limit"),
        ('[[model]]\nname = "a"\nmodel = "{0}"\nencoder = "here"', "the model 'a': --encoder needs a projector"),
        ("", "has no models"),
        ("[[model", "is not valid TOML"),
    ],
)
def test_presets_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text.replace("{0}", str(MODEL_PATH)))
    code, said = refused("--config", str(file))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"edge serve: {file}")
    assert words in said


def test_presets_and_models_do_not_go_together(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(PRESETS)
    assert "leave m.gguf out" in refused("m.gguf", "--config", str(file))[1]
    assert "write it below its [[model]]" in refused("--config", str(file), "--lora", "a")[1]
    assert refused("--config", str(tmp_path / "gone.toml"))[0] != 0


def test_no_preset_makes_a_reproducible_server_another_one(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for option in ('draft = "ngram"', 'prefix-cache = "1GiB"'):
        file.write_text(f'[[model]]\nname = "a"\nmodel = "{MODEL_PATH}"\n{option}\n')
        code, said = refused("--config", str(file), "--reproducible")
        assert (code, f"{file}: the model 'a': --" in said, "reproducible" in said) == (2, True, True), said


def test_the_system_prompt_of_a_preset_is_that_of_chats_without_one(tmp_path: Path) -> None:
    models = "".join(
        f'[[model]]\nname = "{name}"\nmodel = "{MODEL_PATH}"\n{more}\n'
        for name, more in (("house", 'system = "You run a house."'), ("plain", ""))
    )
    (tmp_path / "serve.toml").write_text(models)
    chat: Any = {"messages": [{"role": "user", "content": "Hi"}]}
    own: Any = {"messages": [{"role": "system", "content": "You are."}, *chat["messages"]]}
    tool = {"type": "function", "function": {"name": "open_door"}}
    with served("--config", str(tmp_path / "serve.toml"), "--prefix-cache", "0") as server:

        def prompt(model: str, body: Any) -> str:
            return str(server.post("/apply-template", {"model": model, **body})["prompt"])

        assert "You run a house." in prompt("house", chat)
        written = [{"role": "system", "content": "You run a house."}, *chat["messages"]]
        assert prompt("house", chat) == prompt("plain", {"messages": written}) != prompt("plain", chat)
        assert "house" not in prompt("house", own)
        with_tools = prompt(
            "house", {**chat, "tools": [tool]}
        )  # the template knows none: they are in the system prompt
        assert with_tools.index("You run a house.") < with_tools.index("open_door")
        assert "open_door" in prompt("plain", {**chat, "tools": [tool]})


def test_an_idle_model_is_unloaded_by_a_running_server() -> None:
    with served("--idle-unload", "0.001", "--prefix-cache", "0") as server:
        until(lambda: not server.get("/v1/cluster")["models"], "the end of the idle model")
        assert server.answer() == "3 plus 4 is 7."
        until(lambda: not server.get("/api/ps")["models"], "the end of the idle model")
        server.errors.seek(0)
        assert f"{MODEL_PATH.stem}: unloaded because it is idle" in server.errors.read()


def test_five_hundred_models_in_one_folder(tmp_path: Path) -> None:
    """Only the first lines of a header are read before somebody asks for it: all but the first are damaged behind."""
    shutil.copy(MODEL_PATH, tmp_path / "000.gguf")
    for n in range(1, 500):
        (tmp_path / f"{n:03}.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0))
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with served(str(tmp_path), "--prefix-cache", "0") as server:
        names = [model["id"] for model in server.get("/v1/models")["data"]]
        assert names == [f"{n:03}" for n in range(500)]
        assert len(server.get("/api/tags")["models"]) == 500
        with pytest.raises(urllib.error.HTTPError) as error:
            server.answer(model="123")
        assert error.value.code == 400
        assert server.answer() == "3 plus 4 is 7."
        server.errors.seek(0)
        assert "bad.gguf is left out" in server.errors.read()


def test_a_model_that_cannot_be_loaded_leaves_the_server_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "first.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0))
    shutil.copy(MODEL_PATH, tmp_path / "second.gguf")
    with served(str(tmp_path), "--prefix-cache", "0") as server:
        assert [model["id"] for model in server.get("/v1/models")["data"]] == ["second"]
        assert server.answer() == "3 plus 4 is 7."
        server.errors.seek(0)
        assert "edge serve: first: first.gguf" in server.errors.read()
