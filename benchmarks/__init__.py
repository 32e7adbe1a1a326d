"""Benchmarks: `python -m benchmarks` lists them, `python -m benchmarks.bench_NAME --help` says what one measures."""
