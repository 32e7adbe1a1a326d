"""Speeds of device presets, estimated from published rates and the bytes of a model's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from devices.catalog import DevicePreset
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from partition.model.model import block_of
from partition.predict.speeds import MOST_S, Curve, DeviceSpeed

_STEP_S = 5e-4
RUNTIME_BYTES = 200 << 20  # estimated memory of a process without weights and KV cache
_SUM_S = 1e-4
_ROWS = (1, 2, 4, 8, 64, 512)


@dataclass(frozen=True)
class PartSizes:
    """Bytes and values that one token reads of a model or a slice of it. Layer figures are those of the average
    layer.
    """

    attention_bytes: float  # matrices of attention, and everything outside of the FFN
    ff_bytes: float  # matrices of the FFN; of experts, only the experts that a token uses
    rest_bytes: float  # norms and biases, which every rank holds
    layer_values: float
    head_bytes: float
    head_values: float
    row_bytes: float  # hidden state of one token
    kv_bytes: float  # KV cache of one token in one layer, with 16-bit values
    heads: int  # query heads
    layers: int
    shares_heads: bool  # True if ranks also share attention

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer."""
        return self.attention_bytes + self.ff_bytes + self.rest_bytes

    @classmethod
    def from_file(cls, file: ModelFile) -> PartSizes:
        """Return the sizes of a file."""
        shape = file.shape
        n_bytes = {"attention": 0.0, "ff": 0.0, "rest": 0.0}
        values = 0.0
        for name, tensor in file.tensors.items():
            block = block_of(name)
            if block is None or block >= shape.n_layers:
                continue
            used = shape.n_experts_used / max(1, shape.n_experts) if "_exps." in name else 1.0
            kind = "rest" if len(tensor.shape) == 1 else "ff" if ".ffn_" in name else "attention"
            n_bytes[kind] += used * tensor.n_bytes
            values += used * tensor.n_values
        head = file.tensors.get("output.weight") or file.tensors.get("token_embd.weight")
        n = shape.n_layers
        return cls(
            attention_bytes=n_bytes["attention"] / n,
            ff_bytes=n_bytes["ff"] / n,
            rest_bytes=n_bytes["rest"] / n,
            layer_values=values / n,
            head_bytes=head.n_bytes if head else 0.0,
            head_values=head.n_values if head else 0.0,
            row_bytes=4.0 * shape.n_embd,
            kv_bytes=2.0 * shape.n_heads_kv[0] * (shape.head_k + shape.head_v),
            heads=max(shape.n_heads),
            layers=n,
            shares_heads=not RULES[file.architecture].whole_attention,
        )


def preset_speed(preset: DevicePreset, sizes: PartSizes, device: str, name: str) -> DeviceSpeed:
    """Estimate the speed of a preset by `rated_speed`."""
    speed = rated_speed(preset.memory_bytes_per_s, preset.flops, sizes, device, name)
    return replace(
        speed,
        memory_bytes=preset.memory_bytes,
        disk_bytes_per_s=preset.disk_bytes_per_s,
        watts=preset.watts,
        preset=True,
    )


def rated_speed(
    memory_bytes_per_s: float, flops: float, sizes: PartSizes, device: str, name: str, memory_bytes: int = 0
) -> DeviceSpeed:
    """Estimate the speed of a device from its rates. A part takes max(bytes / memory bandwidth, rows x 2 x values /
    operations per second).

    Attention reads the KV cache at the memory bandwidth. Half a layer takes half of the work that ranks share.
    """

    def curve(n_bytes: float, values: float) -> Curve:
        reads_s = n_bytes / memory_bytes_per_s
        return Curve(tuple((rows, min(MOST_S, max(reads_s, 2 * rows * values / flops))) for rows in _ROWS))

    layer = curve(sizes.layer_bytes, sizes.layer_values)
    shared = 1.0 if sizes.shares_heads else sizes.ff_bytes / sizes.layer_bytes
    return DeviceSpeed(
        device=device,
        name=name,
        step_s=Curve(((1, _STEP_S),)),
        layer_s=layer,
        token_s=sizes.kv_bytes / memory_bytes_per_s,
        half_layer_s=layer.times(1 - shared / 2),
        head_s=curve(sizes.head_bytes, sizes.head_values),
        memory_bytes=memory_bytes,
        runtime_bytes=RUNTIME_BYTES,
        sum_s=_SUM_S,
        estimate=True,
    )
