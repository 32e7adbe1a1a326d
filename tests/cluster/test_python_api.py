"""Test the Python API from outside: the examples of its page, its names, its types, and the cost of an import."""

import os
import re
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import edge
from edge.models.demo import MODEL_PATH
from edge.weights.elastic.weights import ElasticWeights
from partition.plan.onnx_plan import OnnxPlan
from tests.support import ROOT
from tests.support.deployments import shared_workers
from tests.support.onnx_tiny import F32, graph, node
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

PAGE = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TYPED = """
from collections.abc import Generator
from contextlib import contextmanager

import edge
import numpy as np


class Quiet(edge.Steps):
    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Generator[edge.ShowStep, None, None]:
        def show(n: float, total: float | None = None, what: str = "") -> None:
            pass

        yield show


def answer(question: str) -> str:
    with edge.load(None, memory="3GiB", context=512) as model:
        return "".join(response.text for response in edge.Chat(model).ask(question))


async def answer_later(model: edge.Model, question: str) -> str:
    pieces: edge.Pieces[edge.Response] = edge.Chat(model).ask(question)
    text = "".join([response.text async for response in pieces])
    with model.stream() as requests:
        requests.add(question, max_tokens=8)
        async for event in requests:
            text += event.text
    await edge.Chat(model).retry().aclose()
    return text


def several(addresses: list[str]) -> list[int]:
    with edge.Cluster(addresses) as cluster:
        choice: edge.PlanChoice = edge.plan("m.gguf", cluster, options=edge.PlanOptions(context=512), steps=Quiet())
        picked = edge.pareto("m.gguf", cluster, measure=1).pick("knee")
        choice.save("plan.json")
        with edge.deploy(picked, cluster) as model:
            return model.tokenize("text")


def network(cluster: edge.Cluster, choice: edge.PlanChoice) -> int:
    with edge.deploy_onnx(choice, cluster) as model:
        return sum(int(outputs["y"].size) for outputs in model.map([{"x": np.ones((1, 4), np.float32)}]))


def smaller(source: str) -> int:
    try:
        return edge.quantize(source, "out.gguf", type="q8_0").n_bytes
    except edge.EdgeError as error:
        reveal_type(error)
        raise
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with shared_workers(tmp_path_factory, "pi", "laptop") as workers:
        yield workers


def test_the_examples_of_the_page_run(
    two: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").symlink_to(MODEL_PATH)
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Abs", ["b"], ["y"])]
    (tmp_path / "net.onnx").write_bytes(graph(nodes, [("x", F32, (1, 4))], [("y", F32, (1, 4))]))
    script = "\n".join(EXAMPLES)
    for name, worker in zip(("pi.local", "laptop.local"), two, strict=True):
        assert f'"{name}"' in script
        script = script.replace(name, worker.address)
    (tmp_path / "examples.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("examples.py", run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("65") >= 2  # one device's answer, and that of several
    assert "Ada" in said
    assert "something else" not in said
    assert "[[7. 7. 7. 7.]]" in said  # the last input of the pipeline
    assert {path.name for path in tmp_path.iterdir()} >= {"ada.json", "plan.json", "small.gguf"}


def test_every_offered_name_loads_and_has_a_docstring() -> None:
    assert edge.__all__ == sorted(edge.__all__) == dir(edge)
    assert set(edge.__all__) == set(edge._HOME_OF)
    for name in edge.__all__:
        thing = getattr(edge, name)
        assert thing.__doc__, name
    with pytest.raises(AttributeError, match="nothing_such"):
        edge.nothing_such  # noqa: B018
    errors = [thing for name in edge.__all__ if isinstance(thing := getattr(edge, name), type) and "Error" in name]
    assert all(issubclass(error, edge.EdgeError) for error in errors)


def test_an_import_loads_nothing_heavy() -> None:
    code = "import sys, edge; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert not {"numpy", "grpc", "llama_cpp", "onnx", "onnxruntime", "google", "psutil"} & set(names_in(done.stdout))


def names_in(text: str) -> list[str]:
    return re.findall(r"'(\w+)'", text)


def test_a_typed_script_passes_mypy_strict(tmp_path: Path) -> None:
    assert (ROOT / "edge" / "py.typed").exists()
    script = tmp_path / "script.py"
    script.write_text(TYPED)
    for path in (ROOT / ".mypy_cache").glob("*/*.db"):  # of `make test`: copied, as the tree's may be written meanwhile
        copy = tmp_path / "cache" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as cache, closing(sqlite3.connect(copy)) as copied:
            cache.backup(copied)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(script)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "edge.errors.EdgeError"' in done.stdout


def test_a_cluster_that_is_not_open_is_an_error_and_no_plan_without_its_workers(tmp_path: Path) -> None:
    cluster = edge.Cluster(["pi.local"])
    with pytest.raises(edge.WorkerError, match=r"not open: call open\(\)"):
        edge.plan(None, cluster)
    with pytest.raises(edge.WorkerError, match="not open"):
        edge.pareto(None, cluster)
    with pytest.raises(ValueError, match=r"must be a list, such as \['pi.local'\]"):
        edge.Cluster("pi.local")


def test_a_person_says_what_part_each_device_does(two: list[Worker], tmp_path: Path) -> None:
    with edge.Cluster([two[0].address]) as cluster:
        choice = edge.plan(None, cluster, parallel="pipeline", shares=[1, 3])
        assert [len(stage.layers) for stage in choice.plan.stages] == [2, 6]
        assert choice.why == "pipeline, with shares as given"
        (tmp_path / "net.onnx").touch()
        with pytest.raises(edge.PlanError, match=r"net\.onnx is a network"):
            edge.plan(tmp_path / "net.onnx", cluster, shares=[1, 1])


def test_a_plan_is_deployed_as_the_kind_of_model_it_is_for(two: list[Worker], tmp_path: Path) -> None:
    with edge.Cluster([two[0].address]) as cluster:
        choice = edge.plan(None, cluster, options=edge.PlanOptions(context=300, concurrency=2))
        with pytest.raises(edge.PlanError, match="is a language model: deploy it with deploy"):
            edge.deploy_onnx(choice, cluster)
        network = replace(choice, plan=object.__new__(OnnxPlan))
        with pytest.raises(edge.PlanError, match="is a network in ONNX: deploy it with deploy_onnx"):
            edge.deploy(network, cluster)
        with pytest.raises(edge.EngineError, match="memory must be from 1 to"):
            edge.deploy(choice, cluster, memory=0)
        with edge.deploy(choice, cluster) as model:  # as much context and as many sequences as it was planned for
            assert (model.engine.context, model.engine.sequences) == (300, 2)


def test_memory_that_changes_here_is_that_of_this_rank(two: list[Worker]) -> None:
    with edge.Cluster([two[0].address]) as cluster:
        both = edge.plan(None, cluster, parallel="pipeline", shares=[1, 1], options=edge.PlanOptions(context=300))
        with edge.deploy(both, cluster, memory="2GiB..3GiB", prefix_cache="64MiB") as model:
            assert isinstance(model.engine.paging, ElasticWeights)
            assert not model.engine.states.keeps  # what ranks of different sizes compute is not for later prompts
            assert "".join(response.text for response in model.generate("Hello", max_tokens=2))
    with edge.Cluster([]) as nobody:
        alone = edge.plan(None, nobody, options=edge.PlanOptions(context=300))
        with edge.deploy(alone, nobody, memory="2GiB..3GiB") as model:
            assert isinstance(model.engine.paging, ElasticWeights)


def test_a_list_of_messages_is_a_whole_conversation() -> None:
    greedy = edge.SamplingParams(temperature=0)
    with edge.load(context=256) as model:
        chat = edge.Chat(model)
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 3?"}]
        answer = "".join(response.text for response in chat.ask(said, greedy, max_tokens=8))
        assert chat.messages == [*said, {"role": "assistant", "content": answer}]
        by_hand = edge.Chat(model)
        by_hand.system = "Be brief."
        assert answer == "".join(response.text for response in by_hand.ask(said[1]["content"], greedy, max_tokens=8))
        assert len(said) == 2
        for wrong in ([], said[:1], [{"role": "user"}]):
            with pytest.raises(ValueError, match="message"):
                chat.ask(wrong)
        assert len(chat.messages) == 3
        assert repr(model) == "<edge.Model edge-demo-q8_0.gguf, context 256>"


def test_objects_describe_themselves_in_a_line(tmp_path: Path) -> None:
    assert repr(edge.Cluster()) == "<edge.Cluster of this device, closed>"
    assert repr(edge.Cluster(["10.0.0.1"])) == "<edge.Cluster of this device and 10.0.0.1:7070, closed>"
    assert repr(edge.OnnxModel("net.onnx")) == "<edge.OnnxModel net.onnx, closed>"
    done = edge.quantize(MODEL_PATH, tmp_path / "small.gguf", type="q4_0")
    assert len(repr(done)) < 200
