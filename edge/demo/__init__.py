"""The bundled demonstration model: a tiny chat model, its grammar and how to train it again."""

from pathlib import Path

MODEL_PATH = Path(__file__).with_name("edge-demo-q8_0.gguf")
