# make demo: train a small language model with forge and draw what it learnt.
# make test: build everything, run all tests, C++ and Python, and say in the last line what was run. Those of
#   forge.torch and forge.transformers, forge.jax, forge.mlx and forge.mpi are skipped where these packages are not
#   there; FORGE_REQUIRE_TORCH=1, FORGE_REQUIRE_JAX=1, FORGE_REQUIRE_MLX=1 and FORGE_REQUIRE_MPI=1 install and run them.
# make test-quick: what daily work needs of it, two minutes.
# make docs: the documentation as a site, build/docs/index.html.
# make bench: time forge against other implementations, see docs/benchmarks.md.
# make test-neon: the C++ tests for 64-bit ARM under an emulator (needs NEON_TOOLS).
# make test-metal: the Metal backend on the software device, and the build for Macs, without a Mac.
# They need Python >= 3.10, make and a C++17 compiler; the rest is made in .venv and build/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PRESET ?= dev
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_PEERS ?= torch==2.13.0 onnxruntime onnx jax
NEON_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64
FLOAT_STRIDE ?= 97
# Exact versions: another one formats otherwise.
LINT_TOOLS := ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5 check-jsonschema==0.39.0
MACHO_TOOLS := lief==1.0.0
TEST_TOOLS := "pytest>=8" "hypothesis>=6.100" "build>=1" "pyyaml>=6" "ml_dtypes>=0.4" -r benchmarks/requirements.txt
# What forge works with, tested on the CPU build alone.
TEST_PEERS := $(if $(FORGE_REQUIRE_TORCH),-r tests/requirements-torch.txt) \
  $(if $(FORGE_REQUIRE_JAX),-r tests/requirements-jax.txt) \
  $(if $(FORGE_REQUIRE_MPI),-r tests/requirements-mpi.txt) \
  $(if $(FORGE_REQUIRE_MLX),-r tests/requirements-mlx.txt)
# Those whose Metal streams have stand-ins on the software device.
STREAM_PEERS := $(if $(FORGE_REQUIRE_TORCH),-r tests/requirements-torch.txt) \
  $(if $(FORGE_REQUIRE_MLX),-r tests/requirements-mlx.txt)
CASE_STRIDE ?= 1
# Tests at a time. They check nothing by the clock that a busy machine would change.
JOBS ?= 2
# The module of the software Metal device is another build of the same package.
SOFTWARE := .venv-software
SOFTWARE_PY := $(SOFTWARE)/bin/python
SOFTWARE_PIP := $(SOFTWARE_PY) -m pip --disable-pip-version-check
# What zig builds of its C++ library, a minute for each system, serves all builds.
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/build/zig-cache

# What CTest did, for tests/summary.py.
results = --output-junit $(CURDIR)/build/$(1)/results/ctest.xml

.PHONY: demo test test-parts test-quick docs bench test-neon test-neon-reduced test-metal test-software test-macos sanitize lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(PIP) install --quiet "tqdm>=4.60" "matplotlib>=3.6"
	$(PY) examples/train_char_lm.py $(DEMO_ARGS)

# The last line sums up what ran and what did not; build/test-summary.json has the same for a machine.
test:
	@rm -rf build/*/results build/left-out
	@status=0; $(MAKE) --no-print-directory test-parts || status=$$?; \
	$(PYTHON) tests/summary.py build --status $$status

test-parts: $(VENV)/.installed
	$(PIP) install --quiet $(TEST_TOOLS) $(TEST_PEERS)
	$(VENV)/bin/cmake --preset $(PRESET) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY)
	$(VENV)/bin/cmake --build build/$(PRESET)
	$(VENV)/bin/ctest --preset $(PRESET) -j $(JOBS) $(call results,$(PRESET))
	@$(MAKE) --no-print-directory test-metal
	@$(MAKE) --no-print-directory test-neon-reduced

# For daily work: C++ tests, and of the Python tests those of the kernels and their checks.
test-quick: $(VENV)/.installed
	$(PIP) install --quiet $(TEST_TOOLS)
	$(VENV)/bin/cmake --preset $(PRESET) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY)
	$(VENV)/bin/cmake --build build/$(PRESET)
	$(VENV)/bin/ctest --preset $(PRESET) -L cpp -j $(JOBS)
	FORGE_TEST_SCOPE=quick $(PY) -m pytest -q

# Cross-built, then run under qemu-user. Functions of one float are tried on every FLOAT_STRIDE-th,
# the fused kernels on every CASE_STRIDE-th case.
test-neon: $(VENV)/.installed
	$(VENV)/bin/cmake --preset neon-qemu -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) \
	  -DFORGE_FLOAT_STRIDE=$(FLOAT_STRIDE) -DFORGE_CASE_STRIDE=$(CASE_STRIDE)
	$(VENV)/bin/cmake --build build/neon-qemu
	$(VENV)/bin/ctest --preset neon-qemu -j $(JOBS) $(call results,neon-qemu)

# The same tests on fewer floats and cases, where the tools are installed; with FORGE_REQUIRE_NEON set their
# absence is a failure.
test-neon-reduced:
	@case "$$(uname -m)" in arm64|aarch64) \
	  echo "NEON: the tests above ran it, this machine is 64-bit ARM"; exit 0;; esac; \
	missing=; for tool in $(NEON_TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then \
	  exec $(MAKE) --no-print-directory test-neon FLOAT_STRIDE=10007 CASE_STRIDE=11; fi; \
	mkdir -p build; echo "NEON: missing$$missing" >>build/left-out; \
	echo "NEON: SKIPPED, missing:$$missing (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; \
	test -z "$$FORGE_REQUIRE_NEON"

# Both need zig's clang, from the package index; with FORGE_REQUIRE_METAL set its absence is a failure.
test-metal: $(SOFTWARE)/.tools
	@if test "$$(uname -s)" = Darwin; then echo "METAL: the tests above ran it, this is a Mac"; exit 0; fi; \
	if $(SOFTWARE_PIP) install --quiet --no-deps --require-hashes -r cmake/requirements-zig.txt; then \
	  $(MAKE) --no-print-directory test-software && exec $(MAKE) --no-print-directory test-macos; fi; \
	mkdir -p build; echo "Metal and macOS: the ziglang wheel cannot be installed" >>build/left-out; \
	echo "METAL: SKIPPED, the ziglang wheel (cmake/requirements-zig.txt) cannot be installed"; \
	test -z "$$FORGE_REQUIRE_METAL"

test-software: $(SOFTWARE)/.tools
	$(SOFTWARE_PIP) install --quiet $(TEST_TOOLS) $(STREAM_PEERS)
	$(SOFTWARE_PIP) install --quiet --no-build-isolation -C build-dir=build/software \
	  -C cmake.define.FORGE_METAL=software -C cmake.define.FORGE_TESTS=ON \
	  -C cmake.define.FORGE_WERROR=ON .
	FORGE_REQUIRE_JAX= FORGE_REQUIRE_MPI= \
	  $(SOFTWARE)/bin/ctest --test-dir build/software --output-on-failure -j $(JOBS) $(call results,software)

test-macos: $(SOFTWARE)/.tools
	$(SOFTWARE_PIP) install --quiet $(MACHO_TOOLS)
	$(SOFTWARE)/bin/cmake --preset macos-cross -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(SOFTWARE)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(SOFTWARE_PY) \
	  -Dpybind11_DIR=$$($(SOFTWARE_PY) -m pybind11 --cmakedir)
	$(SOFTWARE)/bin/cmake --build build/macos-cross
	$(SOFTWARE)/bin/ctest --preset macos-cross $(call results,macos-cross)

# A warning is an error: a link that leads nowhere, a page that no menu lists, a name in a docstring that is not there.
docs: $(VENV)/.installed
	$(PIP) install --quiet -r docs/requirements.txt
	$(PY) -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	@echo build/docs/index.html

# A peer that cannot be installed is left out of the run.
bench: $(VENV)/.installed
	$(PIP) install --quiet -r benchmarks/requirements.txt
	@for peer in $(BENCH_PEERS); do \
	  $(PIP) install --quiet "$$peer" || echo "bench: $$peer cannot be installed here"; done
	$(PY) -m benchmarks $(BENCH_ARGS)

# The C++ tests under AddressSanitizer with UBSan, then under ThreadSanitizer.
sanitize: $(VENV)/.installed
	for preset in asan-ubsan tsan; do \
	  $(VENV)/bin/cmake --preset $$preset -G Ninja \
	    -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) && \
	  $(VENV)/bin/cmake --build build/$$preset && $(VENV)/bin/ctest --preset $$preset || exit 1; \
	done

lint: $(VENV)/.installed
	$(PIP) install --quiet $(LINT_TOOLS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'tests/cpp/*' 'tests/dialect/*.h' 'tests/gpu_backend/*.h' \
	  'tests/softmetal/*.h' 'tests/softmetal/*.cpp' 'shaders/*' 'tests/gpu/*.h' \
	  'benchmarks/probe/*.cpp' 'benchmarks/probe/*.h')

# The package, rebuilt when anything it is made of has changed.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml CMakeLists.txt README.md \
    $(shell find csrc cmake python -type f -not -name '*.pyc')
	$(PIP) install --quiet --no-build-isolation -C build-dir=build/wheel .
	@touch $@

# pip itself too: that of an older Python does not know -C.
$(VENV)/.tools $(SOFTWARE)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "forge needs Python 3.10 or later; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "pip>=23.1" "scikit-build-core>=0.10" "pybind11>=2.13" "cmake>=3.23" ninja
	@touch $@

clean:
	rm -rf build $(VENV) $(SOFTWARE)
