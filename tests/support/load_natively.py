"""Loads GGUF files with llama.cpp, each in a process of its own, and says how that ended.

    python load_natively.py < paths > outcomes

One path a line in, one line out: "ran", "refused: <error of llama.cpp>" or "died: <signal>: <last words>". The library
is imported once; each case is a fork of this process, which has no other thread (OPENBLAS_NUM_THREADS=1 must be set).
"""

import ctypes
import os
import resource
import signal
import sys
from typing import Any

import llama_cpp as llama

DEADLINE_S = 20
MEMORY_BYTES = 8 << 30  # address space; a model that asks for more is refused by malloc
ERROR_LEVEL = 4


def load_and_decode(path: str) -> str:
    """Load, make a context of 64, decode a token, use the vocabulary; "" when that works, else llama.cpp's error."""
    errors = ["no error was logged"]

    @llama.llama_log_callback
    def log(level: int, text: bytes, _user: Any) -> None:
        if level == ERROR_LEVEL:
            errors.append(text.decode("utf-8", "replace").strip())

    llama.llama_log_set(log, None)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        return errors[-1] if len(errors) < 3 else errors[1]
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 64
    settings.n_threads = settings.n_threads_batch = 1
    context = llama.llama_init_from_model(model, settings)
    if not context:
        return errors[-1]
    batch = llama.llama_batch_get_one((llama.llama_token * 1)(1), 1)
    code = llama.llama_decode(context, batch)
    if code:
        return f"decode returned {code}: {errors[-1]}"
    vocabulary = llama.llama_model_get_vocab(model)
    if llama.llama_vocab_type(vocabulary) != llama.LLAMA_VOCAB_TYPE_NONE:
        use(vocabulary)
    return ""


def use(vocabulary: Any) -> None:
    """Use a vocabulary as a chat does: text to tokens, and every token to text."""
    for text in (b"Hello, world\n\t", "\u00fc\u4e2d\U0001f642".encode(), b"\xff\xfe", b"<s>", b""):
        tokens = (llama.llama_token * 64)()
        llama.llama_tokenize(vocabulary, text, len(text), tokens, 64, True, True)
    piece = ctypes.create_string_buffer(64)
    for token in range(llama.llama_vocab_n_tokens(vocabulary)):
        llama.llama_token_to_piece(vocabulary, token, piece, 64, 0, True)
    for special in (llama.llama_vocab_bos, llama.llama_vocab_eos, llama.llama_vocab_eot, llama.llama_vocab_nl):
        special(vocabulary)


def outcome(path: str) -> str:
    """Load `path` in a fork of this process; return in one line how it ended."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":  # macOS does not hold this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(DEADLINE_S)
        os.dup2(write_end, 2)  # where a failed GGML_ASSERT says which
        error = load_and_decode(path)
        os.write(write_end, (error or "ran").encode())
        os._exit(1 if error else 0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        text = pipe.read().decode("utf-8", "replace").replace("\n", " ")[-300:]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        return f"died: {signal.Signals(-status).name}: {text}"
    return f"refused: {text}" if status else text


if __name__ == "__main__":
    llama.llama_backend_init()
    for line in sys.stdin:
        print(outcome(line.rstrip("\n")), flush=True)
