"""List the benchmarks: `python -m benchmarks`."""

import ast
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("bench_*.py")):
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(doc.partition("\n\n")[0].split())
    print(f"{path.stem:18} {first}")
