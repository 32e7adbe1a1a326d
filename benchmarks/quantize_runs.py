"""The sections of bench_quantize.py that depend on the machine: memory and time of large files, speeds of types."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from bench_slices import bare_write
from memory_group import Grouped, memory_group
from ranks import RankFailed
from raw_disk import NoDirectReads, RawDisk, forget

from devices.lab.control_group import NoGroups
from devices.probe import default_threads
from edge.llm.options import EngineOptions
from edge.models.presets import SHAPES
from edge.models.shapes import Shape, shape
from edge.models.synth import synthesize
from edge.quantization.compare_speed import measure_speeds
from edge.quantization.gguf import quantize
from edge.quantization.kernels import measure_kernels
from quant.gguf.file import GgufFile
from quant.mixes import MIXES
from quant.types import TYPES
from tests.support.groups import CountedGroup

SIDE = Path(__file__).with_name("quantize_side.py")
TOKENIZER = Path(__file__).parent.parent / "tests" / "data" / "hf" / "llama"
LIMIT = 2 << 30
RUN_S = 3600.0
DISK_S = 2.5  # of one measurement of reading
WRITE_BYTES = 4_000_000_000
SAMPLE_S = 0.02
COLUMNS = 2048  # of the matrices that types are timed with, as `edge quantize` times them
SPEED_MIXES = ("q2_k", "q3_k_m", "iq4_xs", "q4_0", "q4_k_m", "q6_k", "q8_0")
_TINY = shape("llama", layers=2, embd=256, ff=512, heads=8, kv=4, vocab=512)
_POOL_BYTES = 64 << 20


def tiny_model(folder: Path) -> Path:
    """What the sections about quality have in a tiny run."""
    return random_model(folder, "tiny", _TINY)


def random_model(folder: Path, name: str, model: Shape) -> Path:
    """The file of that name at F16, written where it is not there."""
    path = folder / f"{name}-f16.gguf"
    if not path.exists():
        synthesize(path, model, "f16", head_type="f16")
    return path


# --- memory ---


def memory(work: Path, folder: Path, tiny: bool) -> dict[str, Any]:
    """Each side in a process and a memory group of its own, after its file was dropped from the page cache. work: for
    the model; folder: for what is made of it."""
    large, small = (_TINY, _TINY) if tiny else (SHAPES["llama-2-7b"], SHAPES["tinyllama-1.1b"])
    source, out = random_model(work, "tiny" if tiny else "7b", large), folder / "out.gguf"
    size = source.stat().st_size
    found: dict[str, Any] = {"limit_bytes": LIMIT, "disk": disk(source, out, tiny), "rows": []}
    for mix in ("q4_0",) if tiny else ("q4_0", "q4_k_m"):
        for how in ("quantize", "directly"):
            row = alone(how, source, out, mix=mix)
            found["rows"].append({"what": f"{mix}, 7B", "how": how, "source_bytes": size, **row})
    checkpoint = folder / "checkpoint"
    size = write_checkpoint(checkpoint, small)
    row = alone("convert", checkpoint, out)
    found["rows"].append({"what": "safetensors, 1.1B", "how": "convert", "source_bytes": size, **row})
    return found


def disk(source: Path, out: Path, tiny: bool) -> dict[str, float]:
    """GB/s that the disk alone reads and writes."""
    found = {}
    forget(source)
    with suppress(NoDirectReads), RawDisk(source) as raw:
        found["read_gbps"] = max(raw.gbps(0.2 if tiny else DISK_S).values())
    n_bytes = 1_000_000 if tiny else WRITE_BYTES
    found["write_gbps"] = n_bytes / bare_write(out, n_bytes) / 1e9
    return found


def alone(do: str, source: Path, target: Path, **arguments: str) -> dict[str, Any]:
    """What a side says that it took, and its group. "failed" where it did not come to its end."""
    for path in source.iterdir() if source.is_dir() else [source]:
        forget(path)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        try:
            group: CountedGroup | None = stack.enter_context(memory_group(LIMIT))
        except NoGroups as error:
            group, found["without_group"] = None, str(error)
        side = stack.enter_context(Grouped(SIDE, group))
        peaks = stack.enter_context(anonymous(group))
        try:
            [seconds] = side.tell(do, RUN_S, source=str(source), target=str(target), **arguments)
            found.update(seconds=seconds, target_bytes=target.stat().st_size)
        except RankFailed as failed:
            found["failed"] = str(failed)
        if group:
            found["group"] = {**group.memory_report(), "anonymous_bytes": max(peaks, default=0)}
    target.unlink(missing_ok=True)
    return found


@contextmanager
def anonymous(group: CountedGroup | None) -> Iterator[list[int]]:
    """Samples of the memory of a group that is not the page cache, bytes, during a block."""
    samples: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while group is not None and not ended.wait(SAMPLE_S):
            stat = group.memory_stat()
            samples.append(stat["total_rss"] if "total_rss" in stat else stat["anon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        ended.set()
        watcher.join()


def write_checkpoint(folder: Path, model: Shape) -> int:
    """A folder of safetensors with random BF16 weights of a Llama's shape, and the tokenizer of a tiny one; bytes."""
    folder.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    config = json.loads((TOKENIZER / "config.json").read_text())
    config.update(
        dtype="bfloat16", hidden_size=model.embd, intermediate_size=model.ff, head_dim=model.sizes["head"],
        num_attention_heads=model.heads, num_key_value_heads=model.kv, num_hidden_layers=model.layers,
        vocab_size=model.vocab,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at = 0
    for name, dims in model.tensors():
        n_bytes = 2 * prod(dims)
        header[their_name(name)] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    values = np.random.default_rng(0).standard_normal(_POOL_BYTES // 2, np.float32) * 0.02
    pool = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(pool)):
            file.write(pool[: at - start])
    return path.stat().st_size


def their_name(name: str) -> str:
    """A tensor of a Llama as Hugging Face's library calls it."""
    parts = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    *block, part, weight = name.split(".")
    return ".".join([*(("model.layers", block[1]) if block else ()), parts[part], weight])


# --- kernels ---


def kernels(work: Path, rounds: int, tiny: bool) -> dict[str, Any]:
    """Decoding files of one shape in many types, beside what the speeds of their tensors' types add up to."""
    mixes = ("q4_0", "q8_0") if tiny else SPEED_MIXES
    name, model = ("tiny", _TINY) if tiny else ("1.1b", SHAPES["tinyllama-1.1b"])
    source = random_model(work, name, model)
    paths = {mix: work / f"{name}-{mix}.gguf" for mix in mixes}
    for mix, path in paths.items():
        if not path.exists():
            quantize(GgufFile.open(source), path, MIXES[mix])
    counts = {mix: values_by_type(path) for mix, path in paths.items()}
    kinds = [TYPES[name] for name in sorted({name for one in counts.values() for name in one})]
    threads = default_threads()
    single = {one.type.name: one for one in measure_kernels(kinds, COLUMNS, threads, prompts=True)}
    sizes = {"prompt_tokens": 8, "gen_tokens": 4} if tiny else {}
    speeds = measure_speeds(list(paths.values()), EngineOptions(threads=threads), rounds=rounds, **sizes)
    rows = [
        {
            "mix": mix,
            "size_bytes": paths[mix].stat().st_size,
            "kernels_s": sum(n / single[name].decode / 1e9 for name, n in counts[mix].items()),
            "kernels_prefill_s": sum(n / (single[name].prefill or 1) / 1e9 for name, n in counts[mix].items()),
            "decode_s": 1 / speed.decode,
            "prefill_s": 1 / speed.prefill,
            "decode_rounds": speed.decode_rounds,
        }
        for (mix, _), speed in zip(paths.items(), speeds, strict=True)
    ]
    return {
        "threads": threads,
        "rounds": rounds,
        "types": [
            {"type": name, "decode": one.decode, "prefill": one.prefill, "repacked": one.repacked}
            for name, one in single.items()
        ],
        "rows": rows,
        "pairs": len(rows) * (len(rows) - 1) // 2,
        "decode_swapped": swapped(rows, "kernels_s", "decode_s"),
        "prefill_swapped": swapped(rows, "kernels_prefill_s", "prefill_s"),
    }


def values_by_type(path: Path) -> dict[str, int]:
    """Values of the matrices that a token passes, by type."""
    counts: dict[str, int] = {}
    for name, tensor in GgufFile.open(path).tensors.items():
        if len(tensor.shape) > 1 and name != "token_embd.weight":
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + prod(tensor.shape)
    return counts


def swapped(rows: Sequence[dict[str, Any]], one: str, other: str) -> list[str]:
    """Pairs whose order in `one` is not that in `other`."""
    return [
        f"{a['mix']} and {b['mix']}" for a, b in combinations(rows, 2) if (a[one] < b[one]) != (a[other] < b[other])
    ]
