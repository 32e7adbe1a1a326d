"""The page's operations in node give what native llama.cpp gives, and refuse what is wrong in one line."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.llama.batch import Batch
from edge.llama.llama import Context, ContextSizes, Model
from edge.models.demo import MODEL_PATH
from edge.models.shapes import Shape
from edge.models.synth import write_outline
from quant.types import cache_type
from tests.browser.conftest import Open
from tests.support.page_bridge import STATIC, PageBridge, PageError, node_page

SIZES = {
    "threads": 2, "n_ctx": 256, "n_batch": 64, "n_seq_max": 4, "n_outputs_max": 64, "n_rs_seq": 0, "type_k": 0,
    "type_v": 0, "flash": 0,
}  # fmt: skip  # type 0: F32
CLOSE = 1e-4  # in standard deviations: floats are added in different orders
PROMPT = [1, 300, 417, 9, 133, 250, 77, 41, 511, 400, 401, 402]


def decode(
    bridge: PageBridge,
    tokens: list[int],
    *,
    start: int = 0,
    sequence: int = 0,
    embeddings: np.ndarray | None = None,
    as_tokens: bool = True,
    **fields: Any,
) -> np.ndarray:
    """Decode tokens, all with outputs, from position `start` on. Return the page's values."""
    n = len(tokens)
    payload = np.array(tokens, np.int32).tobytes() if as_tokens else b""
    if embeddings is not None:
        payload += embeddings.astype(np.float32).tobytes()
        fields["embeddings"] = embeddings.shape[1]
    payload += np.arange(start, start + n, dtype=np.int32).tobytes()
    payload += np.full(n, sequence, np.int32).tobytes() + np.ones(n, np.int8).tobytes()
    header, data = bridge.call("decode", payload, n=n, tokens=as_tokens, sections=1, **fields)
    assert header["code"] == 0
    return np.frombuffer(data, np.float32).reshape(header["rows"], 2 * fields.get("top", 0) or header["width"])


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference in standard deviations of the expected values."""
    assert values.shape == expected.shape
    return float(np.abs(values - expected).max() / expected.std())


def natively(path: Path, tokens: list[int], *, flash: str = "off") -> np.ndarray:
    """Return the logits of native llama.cpp."""
    model = Model(path, repack=False)
    context = Context(model, ContextSizes(256, cache_type("f32"), batch=64, outputs=64, flash_attention=flash))
    try:
        batch, n = Batch(64), len(tokens)
        batch.tokens[:n], batch.positions[:n], batch.outputs[:n] = tokens, np.arange(n), 1
        context.decode(batch, n)
        return context.logits(0, n).copy()
    finally:
        context.close()
        model.close()


@pytest.fixture(scope="module")
def model_path(synthetic: Callable[..., Path]) -> Path:
    """A small model with random weights in F32, whose results depend on nothing but the order of sums."""
    return synthetic("llama", "f32")


@pytest.fixture(scope="module")
def page(open_page: Open, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PageBridge:
    """A page that has loaded `model_path`."""
    bridge = open_page(tmp_path_factory.mktemp("store"))
    name, _ = bridge.send_file(model_path)
    bridge.facts, _ = bridge.call("load", file=name, **SIZES)
    bridge.file = name
    return bridge


@pytest.fixture
def empty(page: PageBridge) -> PageBridge:
    """The page of `page`, with an empty KV cache."""
    page.call("clear")
    return page


def test_built_files_have_their_digests_and_are_small() -> None:
    lines = (STATIC / "checksums.txt").read_text().splitlines()
    digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert set(digests) == {path.name for path in STATIC.glob("llama-*")}
    for name, digest in digests.items():
        data = (STATIC / name).read_bytes()
        assert sha256(data).hexdigest() == digest
        assert len(data) < 5_000_000


def test_hello_says_what_the_page_can_do(page: PageBridge) -> None:
    assert page.hello["threads"] == 2
    assert page.hello["memory_bytes"] == 1 << 32
    assert (page.hello["isolated"], page.hello["simd"], page.hello["loaded"]) == (True, True, "")


def test_load_reports_facts_of_model_and_context(page: PageBridge, model_path: Path) -> None:
    model = Model(model_path, allocate=False)
    facts = page.facts["model"]
    assert (facts["n_vocab"], facts["architecture"], facts["pre_tokenizer"]) == (
        model.n_vocab, model.architecture, model.pre_tokenizer
    )  # fmt: skip
    assert (facts["has_decoder"], facts["is_recurrent"], facts["n_swa"]) == (True, False, 0)
    assert facts["n_embd"] == facts["n_embd_inp"] == model.n_embd_inp
    assert page.facts["context"] == {"n_ctx": 256, "n_rs_seq": 0, "can_shift": True}
    assert page.facts["heap_bytes"] > model_path.stat().st_size
    assert page.event("loading")["fraction"] <= 1.0
    model.close()


@pytest.mark.thorough
def test_slice_larger_than_one_buffer_loads(open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    write_outline(path, Shape("llama", layers=6, embd=4096, ff=14336, heads=32, kv=2, vocab=512), "large")
    assert path.stat().st_size > 2 << 30  # emscripten's malloc refuses 2 GiB and more at once
    bridge = open_page(tmp_path / "store")
    name, _ = bridge.send_file(path, 16 << 20)
    facts, _ = bridge.call("load", file=name, **SIZES)
    assert facts["heap_bytes"] > path.stat().st_size
    assert (decode(bridge, PROMPT) == 0).all()  # its weights are zeros


def test_logits_equal_native_ones(empty: PageBridge, model_path: Path) -> None:
    assert deviation(decode(empty, PROMPT), natively(model_path, PROMPT)) < CLOSE


def test_threads_and_batches_do_not_change_logits(empty: PageBridge) -> None:
    whole = decode(empty, PROMPT, threads=1)
    empty.call("clear")
    parts = [decode(empty, PROMPT[:5]), decode(empty, PROMPT[5:], start=5)]
    assert deviation(np.concatenate(parts), whole) < CLOSE


@pytest.mark.parametrize("top", [1, 40])
def test_largest_logits_alone_are_returned(empty: PageBridge, top: int) -> None:
    whole = decode(empty, PROMPT)
    empty.call("clear")
    places, logits = decode(empty, PROMPT, top=top).view(np.uint32).reshape(2, len(PROMPT), top)
    assert np.array_equal(places, np.argsort(whole)[:, -top:])
    assert np.array_equal(logits.view(np.float32), np.sort(whole)[:, -top:])


def test_hidden_states_at_a_node_end_the_graph(empty: PageBridge) -> None:
    width = empty.facts["model"]["n_embd"]
    first, last = decode(empty, PROMPT, stop_at="l_out-0"), decode(empty, PROMPT[:1], stop_at="l_out-1", sequence=1)
    assert (first.shape, last.shape) == ((len(PROMPT), width), (1, width))
    assert np.isfinite(first).all()
    assert first.std() > 0


def test_embeddings_written_at_the_input_node_replace_those_of_tokens(empty: PageBridge) -> None:
    inputs = decode(empty, PROMPT, stop_at="embd")
    expected = decode(empty, PROMPT, sequence=1)
    written = decode(empty, [5] * len(PROMPT), sequence=2, embeddings=inputs, write="embd")
    passed = decode(empty, PROMPT, sequence=3, embeddings=inputs, as_tokens=False)
    assert deviation(written, expected) < CLOSE
    assert deviation(passed, expected) < CLOSE


def test_state_and_copy_continue_equally(empty: PageBridge) -> None:
    decode(empty, PROMPT)
    _, state = empty.call("state_get", sequence=0, flags=0)
    empty.call("seq_cp", source=0, target=1, start=0, end=-1)
    assert empty.call("state_set", state, sequence=2, flags=0)[0]["result"] == len(state)
    steps = [decode(empty, [42], start=len(PROMPT), sequence=sequence) for sequence in range(3)]
    assert deviation(steps[1], steps[0]) < CLOSE
    assert deviation(steps[2], steps[0]) < CLOSE


def test_positions_are_removed_and_shifted(empty: PageBridge) -> None:
    decode(empty, PROMPT)
    assert empty.call("ends", sequence=0)[0]["result"] == [0, len(PROMPT) - 1]
    assert empty.call("seq_rm", sequence=0, start=2, end=5)[0]["result"] is True
    empty.call("seq_add", sequence=0, start=5, end=-1, delta=-3)
    assert empty.call("ends", sequence=0)[0]["result"] == [0, len(PROMPT) - 4]
    assert np.isfinite(decode(empty, [42], start=len(PROMPT) - 3)).all()
    empty.call("clear")
    assert empty.call("ends", sequence=0)[0]["result"] == [-1, -1]


def test_full_cache_is_code_1(empty: PageBridge) -> None:
    for start in range(0, 256, 64):
        decode(empty, [7] * 64, start=start)
    rows = struct.pack("<iiib", 7, 256, 0, 1)
    assert empty.call("decode", rows, n=1, tokens=True)[0]["code"] == 1


def test_stop_ends_decodes_until_resume(empty: PageBridge) -> None:
    empty.send({"op": "stop"})
    rows = struct.pack("<iiib", 7, 0, 0, 1)
    assert empty.call("decode", rows, n=1, tokens=True)[0]["code"] == 2
    empty.send({"op": "resume"})
    assert empty.call("decode", rows, n=1, tokens=True)[0]["code"] == 0


ROW = struct.pack("<iiib", 7, 0, 0, 1)
BAD: list[tuple[dict[str, Any], bytes, str]] = [
    ({"op": "dance"}, b"", "unknown operation dance"),
    ({"op": "constructor"}, b"", "unknown operation constructor"),
    ({"op": "load", "file": "0" * 64, **SIZES}, b"", "loaded already"),
    ({"op": "decode", "n": 1, "tokens": True}, ROW[:-1], "needs 13 bytes of data instead of 12"),
    ({"op": "decode", "n": -1, "tokens": True}, b"", "a batch of -1 rows"),
    ({"op": "decode", "n": "1", "tokens": True}, ROW, 'n must be a whole number, not "1"'),
    ({"op": "decode", "n": 1 << 40, "tokens": True}, ROW, "n must be a whole number"),
    ({"op": "decode", "n": 65, "tokens": True}, bytes(65 * 13), "65 rows, of 1 to 64"),
    ({"op": "decode", "n": 1, "tokens": False}, ROW[4:], "neither tokens nor embeddings"),
    ({"op": "decode", "n": 1, "tokens": False, "embeddings": 3}, bytes(12) + ROW[4:], "embeddings of 3 values"),
    ({"op": "decode", "n": 1, "tokens": True, "write": "embd"}, ROW, "no embeddings for the node embd"),
    ({"op": "decode", "n": 1, "tokens": True, "stop_at": "nowhere"}, ROW, "the graph has no node nowhere"),
    ({"op": "decode", "n": 1, "tokens": True}, struct.pack("<iiib", 7, 0, 9, 1), "no sequence 9"),
    ({"op": "seq_rm", "sequence": 99, "start": 0, "end": 1}, b"", "no sequence 99"),
    ({"op": "seq_cp", "source": 0, "target": -1, "start": 0, "end": 1}, b"", "no sequence -1"),
    ({"op": "seq_add", "sequence": 0, "start": 0, "end": 1}, b"", "delta must be a whole number"),
    ({"op": "state_get", "sequence": 1 << 20}, b"", "no sequence 1048576"),
    ({"op": "file", "name": "../x", "size": 1, "chunk_bytes": 1, "chunks": []}, b"", "SHA-256"),
    ({"op": "file", "name": "0" * 64, "size": 9, "chunk_bytes": 4, "chunks": []}, b"", "the digests of 3 chunks"),
    ({"op": "file", "name": "0" * 64, "size": -1, "chunk_bytes": 4, "chunks": []}, b"", "a file of -1 bytes"),
    ({"op": "chunk", "name": "0" * 64, "index": 0}, b"x", "no chunk of"),
    ({"op": "drop", "name": "key.json"}, b"", "SHA-256"),
]


@pytest.mark.parametrize(("header", "payload", "message"), BAD, ids=lambda part: str(part)[:40])
def test_bad_operation_is_an_error_of_one_line(
    empty: PageBridge, header: dict[str, Any], payload: bytes, message: str
) -> None:
    fields = {name: value for name, value in header.items() if name != "op"}
    with pytest.raises(PageError) as raised:
        empty.call(header["op"], payload, **fields)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert empty.call("ping")[0].keys() == {"id"}


def test_invalid_token_is_a_code_and_broken_state_is_refused(empty: PageBridge) -> None:
    rows = struct.pack("<iiib", 1 << 30, 0, 0, 1)
    assert empty.call("decode", rows, n=1, tokens=True)[0]["code"] == -1
    decode(empty, PROMPT)
    _, state = empty.call("state_get", sequence=0, flags=0)
    assert empty.call("state_set", state[: len(state) // 2], sequence=1, flags=0)[0]["result"] == 0
    assert np.isfinite(decode(empty, [42], start=len(PROMPT))).all()


def test_measure_reports_speeds(page: PageBridge) -> None:
    speeds, _ = page.call("measure", seconds=0.2)
    assert speeds["threads"] == 2
    assert speeds["memory_bytes_per_s"] > 1e6
    assert speeds["flops"] > 1e6


def test_interrupted_upload_is_resumed_and_wrong_chunks_are_refused(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path, threads=1)
    data = np.random.default_rng(0).bytes(10_500)
    name, chunks = sha256(data).hexdigest(), [data[at : at + 1000] for at in range(0, len(data), 1000)]
    about = {
        "name": name, "size": len(data), "chunk_bytes": 1000, "chunks": [sha256(chunk).hexdigest() for chunk in chunks]
    }  # fmt: skip
    assert bridge.call("file", **about)[0]["missing"] == list(range(11))
    with pytest.raises(PageError, match="chunk 3 has another digest"):
        bridge.call("chunk", chunks[4], name=name, index=3)
    with pytest.raises(PageError, match="chunk 10 has 1000 bytes instead of 500"):
        bridge.call("chunk", chunks[3], name=name, index=10)
    for index in (0, 3, 7):
        bridge.call("chunk", chunks[index], name=name, index=index)
    with pytest.raises(PageError, match="not complete"):
        bridge.call("load", file=name, **SIZES)
    assert bridge.call("file", **about)[0]["missing"] == [1, 2, 4, 5, 6, 8, 9, 10]
    for index in (10, 9, 8, 6, 5, 4, 2, 1):
        bridge.call("chunk", chunks[index], name=name, index=index)
    assert bridge.call("files")[0]["files"] == [{"name": name, "size": len(data), "complete": True}]
    assert bridge.call("file", **about)[0]["missing"] == []
    stored = tmp_path / "slices" / name
    assert stored.read_bytes() == data
    stored.write_bytes(data[:5000] + b"!" + data[5001:])
    assert bridge.call("file", **about)[0]["missing"] == [5]
    assert bridge.call("files")[0]["files"][0]["complete"] is False
    stored.write_bytes(data + b"more")
    assert bridge.call("file", **about)[0]["missing"] == []
    assert bridge.call("files")[0]["files"][0]["size"] == len(data)
    bridge.call("drop", name=name)
    assert bridge.call("files")[0]["files"] == []


def test_broken_slice_is_refused_and_the_page_lives(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path / "store", threads=1)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(MODEL_PATH.read_bytes()[:100_000])
    name, _ = bridge.send_file(broken)
    with pytest.raises(PageError, match="cannot load this slice"):
        bridge.call("load", file=name, **SIZES)
    with pytest.raises(PageError, match="no slice is loaded"):
        bridge.call("decode", ROW, n=1, tokens=True)
    name, _ = bridge.send_file(MODEL_PATH)
    with pytest.raises(PageError, match="unknown cache type 99"):
        bridge.call("load", file=name, **{**SIZES, "type_k": 99})
    bridge.call("load", file=name, **SIZES)
    assert len(decode(bridge, PROMPT)) == len(PROMPT)


def test_slice_that_does_not_fit_into_the_storage_is_computed_from_memory(open_page: Open, tmp_path: Path) -> None:
    """Other files make room first. What was stored is not sent again."""
    n_chunks = -(-MODEL_PATH.stat().st_size // (1 << 20))
    bridge = open_page(tmp_path / "page", "--quota", str(3 << 20), threads=1)
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    bridge.send_file(other)
    name, missing = bridge.send_file(MODEL_PATH)
    assert missing == list(range(n_chunks))
    bridge.event("full")
    bridge.call("load", file=name, **SIZES)
    assert deviation(decode(bridge, PROMPT), natively(MODEL_PATH, PROMPT)) < 0.05
    files = bridge.call("files")[0]["files"]
    assert files == [{"name": name, "size": 3 << 20, "complete": False}]
    bridge.call("unload")
    with pytest.raises(PageError, match="not complete"):
        bridge.call("load", file=name, **SIZES)
    assert bridge.send_file(MODEL_PATH)[1] == list(range(3, n_chunks))
    bridge.call("load", file=name, **SIZES)


def test_storage_that_is_cleared_loses_no_slice_in_use(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path, threads=1)
    data, half = MODEL_PATH.read_bytes(), 4 << 20
    chunks, name = [data[:half], data[half:]], sha256(data).hexdigest()
    digests = [sha256(chunk).hexdigest() for chunk in chunks]
    bridge.call("file", name=name, size=len(data), chunk_bytes=half, chunks=digests)
    for index, chunk in enumerate(chunks):
        bridge.call("chunk", chunk, name=name, index=index)
        shutil.rmtree(tmp_path / "slices")
    bridge.call("load", file=name, **SIZES)
    expected = decode(bridge, PROMPT)
    assert bridge.call("files")[0]["files"] == []
    bridge.call("unload")
    assert bridge.send_file(MODEL_PATH)[1]
    bridge.call("load", file=name, **SIZES)
    assert np.array_equal(decode(bridge, PROMPT), expected)


def test_device_with_less_memory_than_it_reports_refuses_and_lives(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path, "--memory", str(64 << 20), threads=1)
    assert bridge.hello["memory_bytes"] == 1 << 32
    name, _ = bridge.send_file(MODEL_PATH)
    for _ in range(2):
        with pytest.raises(PageError, match=r"\Allama.cpp cannot make a context of 1048576 tokens: .*bad_alloc\Z"):
            bridge.call("load", file=name, **{**SIZES, "n_ctx": 1 << 20})
        bridge.call("unload")
    bridge.call("load", file=name, **SIZES)
    assert len(decode(bridge, PROMPT)) == len(PROMPT)


def test_unload_frees_memory_and_a_slice_loads_again_without_sending(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path)
    name, missing = bridge.send_file(MODEL_PATH)
    assert missing
    first, _ = bridge.call("load", file=name, **SIZES)
    loaded = decode(bridge, PROMPT)
    # Products of Q8_0 round differently: AVX2 and WebAssembly add in different orders.
    assert deviation(loaded, natively(MODEL_PATH, PROMPT)) < 0.05
    bridge.send({"op": "stop"})  # stops nothing after the slice is unloaded
    bridge.call("unload")
    with pytest.raises(PageError, match="no slice is loaded"):
        decode(bridge, PROMPT)
    again, _ = bridge.call("load", file=name, **SIZES)
    assert again["heap_bytes"] == first["heap_bytes"]
    assert np.array_equal(decode(bridge, PROMPT), loaded)
    assert bridge.send_file(MODEL_PATH)[1] == []


def test_page_without_threads_computes_the_same(open_page: Open, model_path: Path, tmp_path: Path) -> None:
    bridge = open_page(tmp_path, single=True)
    assert (bridge.hello["isolated"], bridge.hello["threads"]) == (False, 1)
    name, _ = bridge.send_file(model_path)
    bridge.call("load", file=name, **SIZES)
    assert deviation(decode(bridge, PROMPT), natively(model_path, PROMPT)) < CLOSE


def test_page_reconnects_after_its_stream_broke_and_answers_what_was_asked(page: PageBridge) -> None:
    number = page.start("measure", seconds=1)
    page.cut()
    hello = page.event("hello")
    assert hello["pending"] in ([number], [])
    assert hello["loaded"] == page.file
    assert page.wait(number)[0]["threads"] == 2
    assert page.call("ping")[0].keys() == {"id"}
    page.send({"op": "stop"})
    page.call("ping")
    page.cut()  # a resume may be lost with the connection
    page.event("hello")
    page.call("clear")
    assert page.call("decode", ROW, n=1, tokens=True)[0]["code"] == 0


def test_page_answers_again_until_it_is_confirmed_and_forgets_another_bridge(open_page: Open, tmp_path: Path) -> None:
    bridge = open_page(tmp_path, threads=1)
    name, _ = bridge.send_file(MODEL_PATH)
    bridge.send({"op": "stop"})
    with pytest.raises(PageError, match="stopped"):
        bridge.call("load", file=name, **SIZES)
    bridge.send({"op": "resume"})
    bridge.call("load", file=name, **SIZES)
    bridge.fails = True
    number = bridge.start("ping")
    assert bridge.event("hello")["pending"] == [number]
    bridge.wait(number)

    numbers = [bridge.start("measure", seconds=3), bridge.start("ping")]
    bridge.identity = "second"
    bridge.cut()
    hello = bridge.event("hello")
    assert (hello["pending"], hello["loaded"]) == ([], "")
    assert bridge.call("ping")[0].keys() == {"id"}
    assert all(bridge.answers[number].empty() for number in numbers)


def test_page_is_alive_while_it_computes(page: PageBridge) -> None:
    number = page.start("measure", seconds=6)
    page.event("alive")
    page.event("alive")
    assert page.answers[number].empty()
    page.wait(number)


def test_used_token_is_refused_with_the_reason(node: str, tmp_path: Path) -> None:
    bridge = PageBridge()
    bridge.tokens.clear()
    try:
        with node_page(node, bridge.url, tmp_path) as process:
            line = json.loads(process.communicate(timeout=60)[0])
        assert line == {"state": "refused", "text": "this link was used already; ask for a new one"}
    finally:
        bridge.close()


def test_unknown_key_and_replaced_page_end(open_page: Open, node: str, tmp_path: Path) -> None:
    bridge = PageBridge()
    try:
        with node_page(node, bridge.url, tmp_path / "a", threads=1) as process:
            bridge.event("hello")
            bridge.replace()
            states = [json.loads(line)["state"] for line in process.communicate(timeout=60)[0].splitlines()]
        assert states == ["connecting", "connected", "replaced"]
        bridge.keys.clear()
        with node_page(node, bridge.url, tmp_path / "a", threads=1) as process:
            states = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        assert states[-1] == {"state": "refused", "text": "this device is not a member"}
    except subprocess.TimeoutExpired:
        pytest.fail("the page did not end")
    finally:
        bridge.close()
