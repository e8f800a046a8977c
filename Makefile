# Every command of the project. Each target does its own set-up, in .venv, and a second call does nothing twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No search for a TPU on machines without one: with torch_tpu installed, `import torch` would wait minutes for it.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
RUST := rust/Cargo.toml rust/Cargo.lock rust/build.rs $(wildcard rust/shim/* rust/src/*.rs rust/src/*/*.rs)
CARGO_FLAGS := --manifest-path rust/Cargo.toml --release --locked
SHELL_SCRIPTS := .ci/run project-setup.sh rig/startup.sh rig/torchtpu-rig-mcp demo/install.sh demo/launch tests/rig/machine.sh
C_SOURCES := $(wildcard rust/shim/*.h rust/shim/*.cpp tpu/simulated/*.c)

.DEFAULT_GOAL := help
.PHONY: help setup build lock vendor check check-plugin format test test-rust test-python test-tpu test-boot real real-short parity parity-e2b estimate sanitize bench bench-cpu pictures serve train score ci clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# -- set-up --------------------------------------------------------------------------------------------

$(BIN)/uv: requirements/uv.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 to 3.14, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	@touch $@

$(VENV)/.installed: $(BIN)/uv requirements/lock.txt
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements/uv.txt requirements/lock.txt
	@touch $@

# The stamp is newer than what it was built from, the installed PyTorch included.
$(VENV)/.built: $(VENV)/.installed $(RUST) pyproject.toml
	@command -v cargo >/dev/null || { echo "expected cargo (install Rust from https://rustup.rs), found none" >&2; exit 1; }
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	@touch $@

setup: $(VENV)/.installed  ## Make .venv with the locked packages

build: $(VENV)/.built  ## Build the Rust module into .venv

lock: $(BIN)/uv  ## Renew requirements/lock.txt from pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" --extra dev pyproject.toml -o requirements/lock.txt

# What the chat page has from others, as it is served.
MARKED := 18.2.1
DOMPURIFY := 3.5.0

vendor:  ## Fetch the chat page's two libraries from npm again, in these versions
	scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && cd "$$scratch" && \
	npm pack --silent marked@$(MARKED) dompurify@$(DOMPURIFY) >/dev/null && \
	for package in marked-$(MARKED) dompurify-$(DOMPURIFY); do \
	  mkdir $$package && tar xzf $$package.tgz -C $$package --strip-components=1; done && \
	cd $(CURDIR)/page/vendor && \
	cp "$$scratch"/marked-*/lib/marked.esm.js "$$scratch"/dompurify-*/dist/purify.min.js . && \
	cp "$$scratch"/marked-*/LICENSE LICENSE-marked && cp "$$scratch"/dompurify-*/LICENSE LICENSE-dompurify && \
	{ echo '# name version file sha256; `make vendor` writes this file and the others in the folder'; \
	  echo "marked $(MARKED) marked.esm.js $$(sha256sum < marked.esm.js | cut -d' ' -f1)"; \
	  echo "dompurify $(DOMPURIFY) purify.min.js $$(sha256sum < purify.min.js | cut -d' ' -f1)"; } > VERSIONS

# -- judging -------------------------------------------------------------------------------------------

check: build  ## Formatters, linters, types, stub: warnings are errors
	cargo fmt --manifest-path rust/Cargo.toml --check
	cargo clippy $(CARGO_FLAGS) --features extension-module -- -D warnings
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=. $(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml torchtpu_rs
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

format: setup  ## Rewrite sources in the project's format
	cargo fmt --manifest-path rust/Cargo.toml
	$(BIN)/clang-format -i $(C_SOURCES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: test-rust test-python test-tpu test-boot  ## Run the tests

# Unit tests of the crate link libtorch without an interpreter.
test-rust: build
	LD_LIBRARY_PATH="$$($(BIN)/python -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "lib")')" \
	  cargo test $(CARGO_FLAGS) --lib --quiet

test-python: build
	$(BIN)/python -m pytest -q

test-tpu: build  ## The tests that need TorchTPU, on the simulated TPU
	$(BIN)/python -m pytest -q -o timeout=400 tests/tpu

test-boot: build  ## A VM's whole boot, from its metadata to a chat, on a systemd of its own; needs root
	$(BIN)/python -m pytest -q -o timeout=600 tests/boot

real: build  ## Google's Gemma 3 270M, from its package: tokens, text and serving against transformers; minutes
	$(BIN)/python -m pytest -q -o timeout=900 tests/real

real-short: build  ## The same in its short form, which CI runs
	$(BIN)/python -m pytest -q -o timeout=300 -m short tests/real

# Claude Code is 400 MB, so the part of the plugin's tests that runs it is a target of its own.
CLAUDE := $(CURDIR)/$(VENV)/claude/node_modules/.bin/claude
$(CLAUDE):
	@command -v npm >/dev/null || { echo "expected npm (install Node.js 20 or later from https://nodejs.org), found none" >&2; exit 1; }
	npm install --prefix $(VENV)/claude --no-audit --no-fund --loglevel=error @anthropic-ai/claude-code@2.1.332

check-plugin: build $(CLAUDE)  ## The plugin and the demo under Claude Code itself, which is installed by npm
	CLAUDE=$(CLAUDE) $(BIN)/python -m pytest -q tests/rig/test_plugin.py tests/demo/test_install.py

estimate: build  ## What E2B's compiled steps should cost on a TPU v5e, by libtpu's compiler
	$(BIN)/python -m tpu.estimate --read 1024
	$(BIN)/python -m tpu.estimate --read 1024 --format int8

# On a nightly Rust, which is installed with its parts if it is not there; some ten minutes.
SANITIZED := cargo +nightly test --manifest-path rust/Cargo.toml --release --target x86_64-unknown-linux-gnu --lib kernels::
sanitize: build  ## The kernels' tests under AddressSanitizer, ThreadSanitizer and Miri
	rustup toolchain install nightly --profile minimal --component miri --component rust-src
	export LD_LIBRARY_PATH="$$($(BIN)/python -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "lib")')"; \
	RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 $(SANITIZED) --target-dir rust/target/asan && \
	RUSTFLAGS=-Zsanitizer=thread $(SANITIZED) -Zbuild-std --target-dir rust/target/tsan && \
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --manifest-path rust/Cargo.toml --target-dir rust/target/miri --lib kernels::

parity: build  ## Compare with transformers on the embedded model, token by token
	$(BIN)/python -m bench.parity models/gemma4-embedded --tokens 64

parity-e2b: build  ## The same on a random checkpoint of E2B's full size (8.6 GiB, made in $TORCHTPU_SCRATCH)
	$(BIN)/python -m bench.parity_e2b

bench: build  ## Speed against transformers at E2B's size, and what the server and the shim add; writes bench/results
	$(BIN)/python -m bench.compare
	$(BIN)/python -m bench.server_overhead
	$(BIN)/python -m bench.shim_overhead

bench-cpu: build  ## Speed at E2B's size against llama.cpp, vLLM, mistral.rs, transformers (50 GB in $TORCHTPU_SCRATCH)
	$(BIN)/python -m bench.cpu

pictures: build  ## The README's pictures, from the real thing; needs root, systemd and Chromium
	PYTHONPATH=. $(BIN)/python docs/pictures.py

train: build  ## Train the embedded model anew, and score it
	$(BIN)/python -m models.training.train models/gemma4-embedded
	$(BIN)/python -m models.training.score models/gemma4-embedded

score: build  ## Score the embedded model on held-out questions
	$(BIN)/python -m models.training.score models/gemma4-embedded --backend torchtpu_rs

# -- running -------------------------------------------------------------------------------------------

serve: build  ## Serve the embedded model on port 8000
	$(BIN)/torchtpu-rs serve

ci: check test  ## What CI runs

clean:  ## Remove everything that was built
	rm -rf $(VENV) rust/target torchtpu_rs/*.so
