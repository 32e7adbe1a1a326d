"""Writes tiny projectors (mmproj files), and text models that they are of: one for each kind of position and width."""

from pathlib import Path
from typing import Any

from tests.support import tiny_gguf
from tests.support.tiny_gguf import EMBD, Gguf, Tensor

WIDTH, FF, PATCH, SIDE = 32, 64, 8, 32  # of the encoder: embedding, FFN, points of a patch's and of a picture's side
DEEPSTACK = 1  # layers of the text model that get more of a picture
LARGEST = 1.0  # of a text model's weights: small ones, as in other tests, hide what a picture changes
KINDS = ("plain", "non_causal", "mrope", "deepstack", "audio")
_TYPES = {"plain": "mlp", "non_causal": "gemma3", "mrope": "qwen2vl_merger", "deepstack": "qwen3vl_merger"}
_TEXT = {"plain": "llama", "non_causal": "gemma3", "mrope": "qwen2vl", "deepstack": "qwen3vl", "audio": "llama"}


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


def projector(kind: str, n_embd: int = EMBD, layers: int = DEEPSTACK) -> Gguf:
    """A projector of this kind. layers: of the text model that get more of a picture."""
    side = "audio" if kind == "audio" else "vision"
    pairs: dict[str, tuple[str, Any]] = {
        "general.architecture": ("str", "clip"),
        f"clip.has_{side}_encoder": ("bool", True),
        "clip.projector_type": ("str", "ultravox" if kind == "audio" else _TYPES[kind]),
        f"clip.{side}.attention.layer_norm_epsilon": ("f32", 1e-6),
        "clip.use_gelu": ("bool", True),
    }
    numbers = {"embedding_length": WIDTH, "attention.head_count": 2, "feed_forward_length": FF, "block_count": 2,
               "projection_dim": n_embd}  # fmt: skip
    pairs |= {f"clip.{side}.{key}": ("u32", value) for key, value in numbers.items()}
    if kind == "audio":
        pairs |= {"clip.audio.num_mel_bins": ("u32", 80), "clip.audio.projector.stack_factor": ("u32", 4)}
        return Gguf(pairs, _audio(n_embd), seed=3)
    pairs |= {"clip.vision.image_size": ("u32", SIDE), "clip.vision.patch_size": ("u32", PATCH)}
    pairs |= {f"clip.vision.image_{name}": ("arr[f32]", [0.5, 0.5, 0.5]) for name in ("mean", "std")}
    if kind == "non_causal":
        pairs["clip.vision.projector.scale_factor"] = ("u32", 2)
    return Gguf(pairs, _vision(kind, n_embd, layers), seed=5)


def _vision(kind: str, n_embd: int, deep: int) -> dict[str, Tensor]:
    patches = (SIDE // PATCH) ** 2
    tensors = {"v.patch_embd.weight": Tensor((PATCH, PATCH, 3, WIDTH))}
    if kind in ("mrope", "deepstack"):
        tensors["v.patch_embd.weight.1"] = Tensor((PATCH, PATCH, 3, WIDTH))
    if kind != "mrope":
        tensors |= {"v.patch_embd.bias": Tensor((WIDTH,)), "v.position_embd.weight": Tensor((WIDTH, patches))}
    for i in range(2):
        tensors |= _layer(f"v.blk.{i}", fused=kind == "deepstack")
    tensors |= {"v.post_ln.weight": Tensor((WIDTH,)), "v.post_ln.bias": Tensor((WIDTH,))}
    if kind == "non_causal":
        return tensors | {"mm.input_projection.weight": Tensor((n_embd, WIDTH)),
                          "mm.soft_emb_norm.weight": Tensor((WIDTH,))}  # fmt: skip
    inner = WIDTH if kind == "plain" else 4 * WIDTH
    for i in range(deep if kind == "deepstack" else 0):
        name = f"v.deepstack.{i}"
        tensors |= {f"{name}.norm.weight": Tensor((inner,)), f"{name}.norm.bias": Tensor((inner,))}
        tensors |= {f"{name}.fc1.weight": Tensor((inner, inner)), f"{name}.fc1.bias": Tensor((inner,))}
        tensors |= {f"{name}.fc2.weight": Tensor((inner, n_embd)), f"{name}.fc2.bias": Tensor((n_embd,))}
    return tensors | {"mm.0.weight": Tensor((inner, inner)), "mm.0.bias": Tensor((inner,)),
                      "mm.2.weight": Tensor((inner, n_embd)), "mm.2.bias": Tensor((n_embd,))}  # fmt: skip


def _layer(name: str, *, fused: bool = False, audio: bool = False) -> dict[str, Tensor]:
    layer: dict[str, Tensor] = {}
    for part in ("attn_qkv",) if fused else ("attn_q", "attn_k", "attn_v"):
        rows = 3 * WIDTH if fused else WIDTH
        layer[f"{part}.weight"] = Tensor((WIDTH, rows))
        if not (audio and part == "attn_k"):
            layer[f"{part}.bias"] = Tensor((rows,))
    for norm in ("ln1", "ln2"):
        layer |= {f"{norm}.weight": Tensor((WIDTH,)), f"{norm}.bias": Tensor((WIDTH,))}
    layer |= {"attn_out.weight": Tensor((WIDTH, WIDTH)), "attn_out.bias": Tensor((WIDTH,))}
    layer |= {"ffn_up.weight": Tensor((WIDTH, FF)), "ffn_up.bias": Tensor((FF,))}
    layer |= {"ffn_down.weight": Tensor((FF, WIDTH)), "ffn_down.bias": Tensor((WIDTH,))}
    return {f"{name}.{part}": tensor for part, tensor in layer.items()}


def _audio(n_embd: int) -> dict[str, Tensor]:
    tensors = {
        "a.position_embd.weight": Tensor((WIDTH, 1500)),
        "a.conv1d.1.weight": Tensor((3, 80, WIDTH), "f16", noisy=True), "a.conv1d.1.bias": Tensor((1, WIDTH)),
        "a.conv1d.2.weight": Tensor((3, WIDTH, WIDTH), "f16", noisy=True), "a.conv1d.2.bias": Tensor((1, WIDTH)),
        "a.post_ln.weight": Tensor((WIDTH,)), "a.post_ln.bias": Tensor((WIDTH,)),
        "mm.a.norm_pre.weight": Tensor((4 * WIDTH,)), "mm.a.norm_mid.weight": Tensor((WIDTH,)),
        "mm.a.mlp.1.weight": Tensor((4 * WIDTH, 2 * WIDTH)), "mm.a.mlp.2.weight": Tensor((WIDTH, n_embd)),
    }  # fmt: skip
    for i in range(2):
        tensors |= _layer(f"a.blk.{i}", audio=True)
    return tensors


def write(kind: str, folder: Path, layers: int = 3) -> tuple[Path, Path]:
    """Write a text model and its projector."""
    return (
        text_model(kind, layers).write(folder / f"{kind}.gguf"),
        projector(kind).write(folder / f"mmproj-{kind}.gguf"),
    )
