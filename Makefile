# Run `make check` while you work, and `make test` before you submit. `make setup` installs what the targets need.
VENV := .venv
VLLM_VENV := .venv-vllm
VLLM_V2_VENV := $(VLLM_VENV)-v2
DOCS_VENV := .venv-docs
BUILD := build
DIST := dist
PYTHON ?= python3
PY := $(VENV)/bin/python
JOBS ?= $(shell nproc)
PYTEST := $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal
# Tests of a file run in one process and share engines, each of which has one thread and needs 2 GB. A test that takes long
# therefore has a separate file.
BY_FILE := -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not prove"
PIP := -m pip --quiet --disable-pip-version-check
STAGES = $(PYTHON) tools/stages.py $(MAKE)
SOURCES := $(shell find CMakeLists.txt README.md pyproject.toml cmake csrc docs/ops python tools/ops_stub.py -type f -not -name '*.pyc')
# Without bytecode files, each test process would compile the modules that it imports, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

TEST_TARGETS := lint install test-cpp test-twins test-python
MORE_TARGETS := docs tidy cuda-resources test-slow test-sanitizers test-pythons test-fuzz test-vllm test-vllm-v2

.PHONY: counts demo check test docs release-check test-all prove setup wheel install dev lint format tidy gtest twins launch \
  cuda-resources check-python test-cpp test-twins test-python test-slow test-sanitizers test-pythons fuzz test-fuzz test-vllm \
  test-vllm-v2 test-neon prove-mutants prove-async prove-store prove-fuzz prove-engines prove-torches gpu gpu-peers \
  gpu-build gpu-test gpu-bench gpu-loads gpu-sanitize bench clean another-python

demo: install
	$(VENV)/bin/ngram-npu doctor
	$(VENV)/bin/ngram-npu replay --demo

check:
	@$(MAKE) --silent --question setup || { echo "make check downloads no dependencies: run make setup first"; exit 1; }
	@$(STAGES) lint dev check-python

test:
	@$(STAGES) $(TEST_TARGETS)

# Builds the documentation as a site in build/docs. A warning, a broken link or a page that loads external files is an error;
# with --quiet, --strict would not see the warnings.
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# Builds the wheel and the source distribution in dist, and tests both in a new environment (docs/guides/release.md).
RELEASE := $(BUILD)/release
release-check: $(DIST)/.ready
	rm -rf $(RELEASE) $(DIST)/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(PIP) install build twine
	NGRAM_NPU_TORCH=OFF $(RELEASE)/bin/python -m build --sdist --outdir $(DIST) . >/dev/null
	$(PYTHON) -m tools.release_check $(DIST)
	$(RELEASE)/bin/twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz
	$(RELEASE)/bin/python $(PIP) install $(DIST)/ngram_npu-*.whl
	cd $(RELEASE) && bin/python -m doctest -o FAIL_FAST $(abspath README.md) && bin/ngram-npu doctor
	NGRAM_NPU_TORCH=OFF $(RELEASE)/bin/python $(PIP) install --force-reinstall --no-deps $(DIST)/ngram_npu-*.tar.gz
	cd $(RELEASE) && bin/python -m doctest -o FAIL_FAST $(abspath README.md)

$(DOCS_VENV)/.ready: tools/requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP) install -r tools/requirements-docs.txt
	touch $@

test-all:
	@$(STAGES) $(TEST_TARGETS) $(MORE_TARGETS)

prove:
	@$(STAGES) prove-async prove-store prove-mutants prove-fuzz prove-engines prove-torches test-neon

setup: $(VENV)/.ready

$(VENV)/.ready: tools/requirements-dev.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) $(PIP) install -r tools/requirements-dev.txt
	touch $@

# If PYTHON is set, environments of another Python version are created again, with everything that depends on them.
ifneq ($(origin PYTHON),file)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
has_version = $(shell grep -s '^version = $(VERSION)\.' $(1)/pyvenv.cfg)
$(foreach venv,$(VENV) $(VLLM_VENV) $(VLLM_V2_VENV),$(if $(call has_version,$(venv)),,$(eval $(venv)/.ready: another-python)))
endif

# The build is not isolated, so that it uses this environment's torch. auditwheel adds the manylinux tag that the wheel's
# symbols allow. It vendors no library: the user has torch, and a second C++ runtime could not catch the first one's
# exceptions. A wheel with the NPU backend needs CANN, which is not part of manylinux, so auditwheel does not run on it.
$(DIST)/.ready: $(VENV)/.ready $(SOURCES)
	rm -rf $(DIST) $(BUILD)/wheel
	$(PY) $(PIP) wheel --no-build-isolation --no-deps --config-settings=cmake.define.NGRAM_NPU_WERROR=ON -w $(BUILD)/wheel .
	@if [ -n "$$ASCEND_HOME_PATH" ]; then mv $(BUILD)/wheel $(DIST); else \
	  PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/auditwheel repair --exclude 'libtorch*.so' -w $(DIST) $(BUILD)/wheel/*.whl; fi
	touch $@

wheel: $(DIST)/.ready

$(VENV)/.installed: $(DIST)/.ready
	$(PY) $(PIP) install --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	touch $@

install: $(VENV)/.installed

# Makes an editable install instead of the wheel: Python changes take effect at once, C++ changes after another `make dev`. The
# CUDA kernels are left out, because they take minutes to compile.
BUILD_TYPE ?= Release
dev: setup
	$(PY) $(PIP) install --no-build-isolation --no-deps --config-settings=build-dir=$(BUILD)/dev --config-settings=cmake.build-type=$(BUILD_TYPE) \
	  --config-settings=cmake.define.NGRAM_NPU_CUDA=OFF --config-settings=cmake.define.NGRAM_NPU_WERROR=ON --editable .
	rm -f $(VENV)/.installed

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	files=$$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh') && test -n "$$files" && \
	  $(VENV)/bin/clang-format --dry-run --Werror $$files

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format -i

PYBIND11 = -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir)
tidy: setup gtest
	cmake --preset python-asan $(PYBIND11) >/dev/null
	git ls-files 'csrc/api/*.cpp' 'csrc/cpu/*.cpp' | grep -v _neon | \
	  xargs -P $(JOBS) -n 4 $(VENV)/bin/clang-tidy -p $(BUILD)/python-asan --quiet

# Prints the size of this repository. Images and data, such as results files, are not counted as lines.
counts:
	@for part in python csrc tests tools docs .; do \
	  printf '%-8s %6d lines\n' $$part $$(git ls-files -z $$part | grep -zvE '\.(json|svg|png)$$' | xargs -0 cat | wc -l); done
	@printf '%-8s %6d lines\n%-8s %6d tracked\n' results $$(git ls-files tools/bench/results | xargs cat | wc -l) files $$(git ls-files | wc -l)

# `make check` runs tests that need no twin, and the parity tests only on this machine's best instruction set.
QUICK := tests/ops/test_parity.py tests/ops/test_errors.py tests/ops/test_torch.py tests/ops/test_bookkeeping.py \
  tests/ops/test_drafts.py $(wildcard tests/core/test_*.py) tests/engines/vllm/unit tests/cli/replay tests/cli/tune \
  tests/async_state/test_state.py tests/async_state/test_failures.py \
  tests/repo/test_documents.py tests/repo/test_gate.py tests/repo/bench/test_figures.py \
  tests/core/index/test_index.py tests/core/index/test_ladder_index.py tests/core/test_proposer.py
check-python:
	native=$$($(PY) -c 'from ngram_npu import _C; print(_C.instruction_set())') && $(PYTEST) -q $(QUICK) -m "not slow" \
	  -k "test_parity and $$native or not (test_parity or cuda_ or ascendc_)"

# The tests import the installed wheel, as users do, instead of the source tree.
WITH_WHEEL = NGRAM_NPU_WHEEL=$$(ls $(DIST)/ngram_npu-*.whl)
test-python: install twins
	$(WITH_WHEEL) $(PYTEST) -m "not slow"

# Ray (150 MB) is needed by one slow test only.
$(VENV)/.slow: tools/requirements-slow.txt $(VENV)/.ready
	$(PY) $(PIP) install -r tools/requirements-slow.txt
	touch $@

test-slow: install twins launch $(VENV)/.slow
	$(WITH_WHEEL) $(PYTEST) -m slow

# Tests the package with the other Python versions in pyproject.toml that are installed on this machine.
test-pythons: setup
	$(PY) -m tools.pythons

# The arguments of `build` are a preset, CMake options and targets.
define build
	cmake --preset $(1) $(2) >/dev/null
	$(VENV)/bin/ninja -C $(BUILD)/$(1) --quiet $(3)
endef
define suite
	$(call build,$(1),$(2))
	ctest --test-dir $(BUILD)/$(1) --output-on-failure -j $(JOBS)
endef

test-cpp: setup gtest
	$(call suite,cpp)

# Runs the C++ suite under ASan+UBSan and TSan, then the parity suite, which tests more values, under ASan+UBSan.
SAN_STAGE := $(BUILD)/python-asan/stage
test-sanitizers: setup gtest
	$(call suite,python-asan,$(PYBIND11))
	$(call suite,tsan)
	rm -rf $(SAN_STAGE) && mkdir $(SAN_STAGE) && cp -r python/ngram_npu $(SAN_STAGE)/
	cmake --install $(BUILD)/python-asan --prefix $(SAN_STAGE) >/dev/null
	CI=1 ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SAN_STAGE) NGRAM_NPU_EXPECT_VERSION=sanitized \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(PYTEST) -p no:cacheprovider -k "not guarded and not cuda_ and not ascendc_" tests/ops/test_parity.py tests/ops/test_errors.py

# Builds the device kernels for models of their devices; no device is needed.
twins: setup gtest
	$(call build,twins)

test-twins: twins
	ctest --test-dir $(BUILD)/twins --output-on-failure -j $(JOBS)

# Fuzzes the store, compared with a naive model. Needs clang. The corpus keeps inputs that reach new code. If an event never
# occurs, the run fails. FUZZ_SEED=0 chooses a new seed in each run.
FUZZ_CXX ?= clang++-14
FUZZ_SECONDS ?= 30
FUZZ_SEED ?= 0
fuzz: setup
	$(call build,fuzz,-DCMAKE_CXX_COMPILER=$(FUZZ_CXX),fuzz_store)
	$(PY) -m tools.fuzz $(BUILD)/fuzz/tests/cpp/fuzz_store --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# Fuzzes for a short time, if clang is installed or can be installed.
test-fuzz: setup
	@if ! command -v $(FUZZ_CXX) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq; apt-get install -y -qq --no-install-recommends clang-14 libclang-rt-14-dev >/dev/null || true; \
	fi
	@if command -v $(FUZZ_CXX) >/dev/null; then $(MAKE) fuzz FUZZ_SECONDS=20 FUZZ_SEED=1; \
	  else echo "fuzz: skipped, $(FUZZ_CXX) is missing (Debian, Ubuntu: clang-14, libclang-rt-14-dev)"; fi

gtest:
	@if ! printf '#include <gtest/gtest.h>\n' | $${CXX:-g++} -E -x c++ - >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq libgtest-dev >/dev/null; \
	  else \
	    echo "GoogleTest is missing: install it (Debian, Ubuntu: sudo apt-get install libgtest-dev)"; exit 1; \
	  fi; \
	fi

bench: install
	$(PY) -m tools.bench ngram_step_

include tools/targets.mk

clean:
	rm -rf $(BUILD) $(DIST) $(VENV)/.installed
