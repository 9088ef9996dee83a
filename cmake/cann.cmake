# Finds CANN and torch_npu for the NPU backend. NGRAM_NPU_ASCENDC is ON, OFF or AUTO before this file, and ON or OFF after it.
set(ASCEND_HOME_PATH "$ENV{ASCEND_HOME_PATH}" CACHE PATH "CANN's folder; its set_env.sh exports it")
set(SOC_VERSION "$ENV{SOC_VERSION}" CACHE STRING "The chip the kernels are compiled for, e.g. Ascend910B3: npu-smi info shows it")
foreach(variable ASCEND_HOME_PATH SOC_VERSION)  # the cache may contain an empty value from an earlier run
  if(NOT ${variable})
    set(${variable} "$ENV{${variable}}")
  endif()
endforeach()
set(NGRAM_NPU_TORCH_NPU "" CACHE PATH "The package folder of torch_npu; empty: that of Python_EXECUTABLE")

# CANN's releases have ascendc.cmake in different folders.
foreach(folder tools/tikcpp/ascendc_kernel_cmake compiler/tikcpp/ascendc_kernel_cmake
               ascendc_devkit/tikcpp/samples/cmake)
  if(ASCEND_HOME_PATH AND NOT NGRAM_NPU_ASCENDC_CMAKE AND EXISTS "${ASCEND_HOME_PATH}/${folder}/ascendc.cmake")
    set(NGRAM_NPU_ASCENDC_CMAKE "${ASCEND_HOME_PATH}/${folder}/ascendc.cmake")
  endif()
endforeach()

if(NOT NGRAM_NPU_ASCENDC_CMAKE)
  if(NOT ASCEND_HOME_PATH)
    set(reason "ASCEND_HOME_PATH is not set (source CANN's set_env.sh)")
  else()
    set(reason "there is no ascendc.cmake under ASCEND_HOME_PATH=${ASCEND_HOME_PATH} (tools/tikcpp, compiler/tikcpp, \
ascendc_devkit/tikcpp/samples): install CANN's toolkit")
  endif()
  if(NOT NGRAM_NPU_ASCENDC STREQUAL AUTO)
    message(FATAL_ERROR "NGRAM_NPU_ASCENDC=${NGRAM_NPU_ASCENDC}: ${reason}")
  endif()
  message(STATUS "The NPU backend is left out: ${reason}")
  set(NGRAM_NPU_ASCENDC OFF)
  return()
endif()

# If CANN is installed, the user wants the backend. With AUTO, a missing torch_npu or SOC_VERSION is therefore an error too.
set(alternative "(or build without the NPU backend: -DNGRAM_NPU_ASCENDC=OFF)")
if(NOT SOC_VERSION)
  message(FATAL_ERROR "SOC_VERSION is not set: set the chip to compile for, e.g. Ascend910B3 (npu-smi info shows it) "
                      "${alternative}")
endif()
string(TOLOWER "${SOC_VERSION}" chip)
if(NOT chip MATCHES "^ascend(910b[1-4]|910_93|950)")
  message(FATAL_ERROR "SOC_VERSION=${SOC_VERSION}: expected a 910B (Ascend910B1 to B4), an A3 (Ascend910_93...) or a 950, the "
                      "only chips with kernels ${alternative}")
endif()
if(NOT NGRAM_NPU_TORCH_NPU)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch_npu').origin))"
    OUTPUT_VARIABLE NGRAM_NPU_TORCH_NPU OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE find_status ERROR_QUIET)
  if(find_status)
    message(FATAL_ERROR "torch_npu is not installed for ${Python_EXECUTABLE}: install it ${alternative}")
  endif()
endif()
if(NOT EXISTS "${NGRAM_NPU_TORCH_NPU}/lib/libtorch_npu.so")
  message(FATAL_ERROR "NGRAM_NPU_TORCH_NPU=${NGRAM_NPU_TORCH_NPU} has no lib/libtorch_npu.so: set it to torch_npu's package "
                      "folder ${alternative}")
endif()
set(NGRAM_NPU_ASCENDC ON)
message(STATUS "The NPU backend is built for ${SOC_VERSION} and ${NGRAM_NPU_TORCH_NPU}, with ${NGRAM_NPU_ASCENDC_CMAKE}")
