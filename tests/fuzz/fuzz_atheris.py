"""Coverage-guided fuzzing of all that reads bytes from strangers. Needs atheris, which is no dependency of the project:

    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install atheris -e .
    /tmp/fuzz/bin/python tests/fuzz/fuzz_atheris.py -max_total_time=300 /tmp/found tests/corpus

What it finds of interest goes to the first folder; the few small files in tests/corpus are replayed by test_frame.py.
"""

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["transport", "partition", "devices"]):
    from tests.fuzz.fuzz_frames import feed

if __name__ == "__main__":
    atheris.Setup([*sys.argv, "-max_len=4096", "-rss_limit_mb=2048", "-timeout=10"], feed)
    atheris.Fuzz()
