"""The bundled demonstration model, a tiny chat model. `tools/demo_model` in the source trains it."""

from pathlib import Path

MODEL_PATH = Path(__file__).with_name("edge-demo-q8_0.gguf")
