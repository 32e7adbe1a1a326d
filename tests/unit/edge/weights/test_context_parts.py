"""The memory of a context by part, from llama.cpp's log."""

from edge.weights.memory import MIB, context_parts

LINES = [
    "llama_context: Vulkan_Host  output buffer size =     2.00 MiB",
    "llama_kv_cache:        CPU KV buffer size =     6.00 MiB",
    "llama_kv_cache:    Vulkan0 KV buffer size =    10.00 MiB",
    "llama_kv_cache: size =   16.00 MiB (512 cells, 8 layers, 1/1 seqs), K (f16): 8.00 MiB",
    "llama_memory_recurrent:    Vulkan0 RS buffer size =     4.00 MiB",
    "llama_memory_recurrent: size =    4.00 MiB (1 cells, 8 layers, 1 seqs), R (f32): 1.00 MiB",
    "sched_reserve:    Vulkan0 compute buffer size =    30.00 MiB",
    "sched_reserve: Vulkan_Host compute buffer size =     5.00 MiB",
    "sched_reserve:        CPU compute buffer size =     1.00 MiB",
]


def parts(gpu: str | None) -> dict[str, float]:
    return {name: n / MIB for name, n in context_parts(LINES, gpu).items()}


def test_all_memory_counts_without_a_gpu() -> None:
    assert parts(None) == {"KV cache": 20, "compute buffers": 36, "output buffer": 2}


def test_the_memory_of_the_gpu_is_left_out_and_that_of_the_host_for_it_counts() -> None:
    assert parts("Vulkan0") == {"KV cache": 6, "compute buffers": 6, "output buffer": 2}
    assert parts("CUDA0") == parts(None)
