"""Write tiny projectors (mmproj files) and their text models: one for each kind of position and width."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import tiny_gguf
from tests.support.tiny_gguf import EMBD, Gguf, Tensor

DEEPSTACK = 1  # layers of the text model that get more of a picture
LARGEST = 1.0  # of a text model's weights: small ones, as in other tests, hide what a picture changes
KINDS = ("plain", "non_causal", "mrope", "deepstack", "audio")
_TYPES = {"plain": "mlp", "non_causal": "gemma3", "mrope": "qwen2vl_merger", "deepstack": "qwen3vl_merger"}
_TEXT = {"plain": "llama", "non_causal": "gemma3", "mrope": "qwen2vl", "deepstack": "qwen3vl", "audio": "llama"}


@dataclass(frozen=True)
class Size:
    """Size of an encoder. patch, side: points of a patch's and of a picture's side."""

    width: int = 32
    ff: int = 64
    layers: int = 2
    heads: int = 2
    patch: int = 8
    side: int = 32

    @property
    def patches(self) -> int:
        """Patches of a picture."""
        return (self.side // self.patch) ** 2


TINY = Size()


def text_model(kind: str, layers: int = 3) -> Gguf:
    """A text model that takes what the projector of this kind makes."""
    arch = _TEXT[kind]
    like = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}.get(arch, arch)
    model = tiny_gguf.model(like, layers=layers)
    model.largest = LARGEST
    if like != arch:
        pairs = {key.replace(f"{like}.", f"{arch}."): value for key, value in model.pairs.items()}
        pairs["general.architecture"] = ("str", arch)
        pairs[f"{arch}.rope.dimension_sections"] = ("arr[i32]", [2, 3, 3, 0])
        model.pairs = pairs
    if kind == "deepstack":
        model.pairs["qwen3vl.n_deepstack_layers"] = ("u32", DEEPSTACK)
    model.pairs[f"{arch}.context_length"] = ("u32", 512)
    return model


def projector(kind: str, n_embd: int = EMBD, layers: int = DEEPSTACK, size: Size = TINY) -> Gguf:
    """A projector of this kind. layers: of the text model that get more of a picture."""
    side = "audio" if kind == "audio" else "vision"
    pairs: dict[str, tuple[str, Any]] = {
        "general.architecture": ("str", "clip"),
        f"clip.has_{side}_encoder": ("bool", True),
        "clip.projector_type": ("str", "ultravox" if kind == "audio" else _TYPES[kind]),
        f"clip.{side}.attention.layer_norm_epsilon": ("f32", 1e-6),
        "clip.use_gelu": ("bool", True),
    }
    numbers = {"embedding_length": size.width, "attention.head_count": size.heads, "feed_forward_length": size.ff,
               "block_count": size.layers, "projection_dim": n_embd}  # fmt: skip
    pairs |= {f"clip.{side}.{key}": ("u32", value) for key, value in numbers.items()}
    if kind == "audio":
        pairs |= {"clip.audio.num_mel_bins": ("u32", 80), "clip.audio.projector.stack_factor": ("u32", 4)}
        return Gguf(pairs, _audio(n_embd, size), seed=3)
    pairs |= {"clip.vision.image_size": ("u32", size.side), "clip.vision.patch_size": ("u32", size.patch)}
    pairs |= {f"clip.vision.image_{name}": ("arr[f32]", [0.5, 0.5, 0.5]) for name in ("mean", "std")}
    if kind == "non_causal":
        pairs["clip.vision.projector.scale_factor"] = ("u32", 2)
    return Gguf(pairs, _vision(kind, n_embd, layers, size), seed=5)


def _vision(kind: str, n_embd: int, deep: int, size: Size) -> dict[str, Tensor]:
    width, patch = size.width, size.patch
    tensors = {"v.patch_embd.weight": Tensor((patch, patch, 3, width))}
    if kind in ("mrope", "deepstack"):
        tensors["v.patch_embd.weight.1"] = Tensor((patch, patch, 3, width))
    if kind != "mrope":
        tensors |= {"v.patch_embd.bias": Tensor((width,)), "v.position_embd.weight": Tensor((width, size.patches))}
    for i in range(size.layers):
        tensors |= _layer(f"v.blk.{i}", size, fused=kind == "deepstack")
    tensors |= {"v.post_ln.weight": Tensor((width,)), "v.post_ln.bias": Tensor((width,))}
    if kind == "non_causal":
        return tensors | {"mm.input_projection.weight": Tensor((n_embd, width)),
                          "mm.soft_emb_norm.weight": Tensor((width,))}  # fmt: skip
    inner = width if kind == "plain" else 4 * width
    for i in range(deep if kind == "deepstack" else 0):
        name = f"v.deepstack.{i}"
        tensors |= {f"{name}.norm.weight": Tensor((inner,)), f"{name}.norm.bias": Tensor((inner,))}
        tensors |= {f"{name}.fc1.weight": Tensor((inner, inner)), f"{name}.fc1.bias": Tensor((inner,))}
        tensors |= {f"{name}.fc2.weight": Tensor((inner, n_embd)), f"{name}.fc2.bias": Tensor((n_embd,))}
    return tensors | {"mm.0.weight": Tensor((inner, inner)), "mm.0.bias": Tensor((inner,)),
                      "mm.2.weight": Tensor((inner, n_embd)), "mm.2.bias": Tensor((n_embd,))}  # fmt: skip


def _layer(name: str, size: Size, *, fused: bool = False, audio: bool = False) -> dict[str, Tensor]:
    layer: dict[str, Tensor] = {}
    width, ff = size.width, size.ff
    for part in ("attn_qkv",) if fused else ("attn_q", "attn_k", "attn_v"):
        rows = 3 * width if fused else width
        layer[f"{part}.weight"] = Tensor((width, rows))
        if not (audio and part == "attn_k"):
            layer[f"{part}.bias"] = Tensor((rows,))
    for norm in ("ln1", "ln2"):
        layer |= {f"{norm}.weight": Tensor((width,)), f"{norm}.bias": Tensor((width,))}
    layer |= {"attn_out.weight": Tensor((width, width)), "attn_out.bias": Tensor((width,))}
    layer |= {"ffn_up.weight": Tensor((width, ff)), "ffn_up.bias": Tensor((ff,))}
    layer |= {"ffn_down.weight": Tensor((ff, width)), "ffn_down.bias": Tensor((width,))}
    return {f"{name}.{part}": tensor for part, tensor in layer.items()}


def _audio(n_embd: int, size: Size) -> dict[str, Tensor]:
    width = size.width
    tensors = {
        "a.position_embd.weight": Tensor((width, 1500)),
        "a.conv1d.1.weight": Tensor((3, 80, width), "f16", noisy=True), "a.conv1d.1.bias": Tensor((1, width)),
        "a.conv1d.2.weight": Tensor((3, width, width), "f16", noisy=True), "a.conv1d.2.bias": Tensor((1, width)),
        "a.post_ln.weight": Tensor((width,)), "a.post_ln.bias": Tensor((width,)),
        "mm.a.norm_pre.weight": Tensor((4 * width,)), "mm.a.norm_mid.weight": Tensor((width,)),
        "mm.a.mlp.1.weight": Tensor((4 * width, 2 * width)), "mm.a.mlp.2.weight": Tensor((width, n_embd)),
    }  # fmt: skip
    for i in range(size.layers):
        tensors |= _layer(f"a.blk.{i}", size, audio=True)
    return tensors


def write(kind: str, folder: Path, layers: int = 3) -> tuple[Path, Path]:
    """Write a text model and its projector."""
    return (
        text_model(kind, layers).write(folder / f"{kind}.gguf"),
        projector(kind).write(folder / f"mmproj-{kind}.gguf"),
    )
