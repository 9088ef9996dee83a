# Settings of all targets: the language, warnings as errors, hidden symbols, sanitizers.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN")

set(NGRAM_NPU_CSRC "${CMAKE_CURRENT_SOURCE_DIR}/csrc")

# Removes paths of this machine, which __FILE__ contains, from Release builds. Debuggers need the paths in other builds.
function(ngram_npu_hide_path path)
  set(map "-ffile-prefix-map=${path}=.")
  add_compile_options("$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:${map}>"
                      "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CUDA>>:-Xcompiler=${map}>")
endfunction()
ngram_npu_hide_path("${CMAKE_SOURCE_DIR}")

add_library(ngram_npu_options INTERFACE)
target_compile_options(ngram_npu_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                                   $<$<BOOL:${NGRAM_NPU_WERROR}>:-Werror>)
target_include_directories(ngram_npu_options INTERFACE "${NGRAM_NPU_CSRC}")
# Before glibc 2.34, pthread_atfork is in a separate library.
find_package(Threads REQUIRED)
target_link_libraries(ngram_npu_options INTERFACE Threads::Threads)
if(NGRAM_NPU_SANITIZE)
  target_compile_options(ngram_npu_options INTERFACE -fsanitize=${NGRAM_NPU_SANITIZE} -fno-sanitize-recover=all
                                                     -fno-omit-frame-pointer -g)
  target_link_options(ngram_npu_options INTERFACE -fsanitize=${NGRAM_NPU_SANITIZE})
endif()

# Makes a library export only its C entry points.
function(ngram_npu_export_c_only target)
  target_link_options(${target} PRIVATE "-Wl,--version-script=${NGRAM_NPU_CSRC}/version.map")
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${NGRAM_NPU_CSRC}/version.map")
  target_link_options(${target} PRIVATE -Wl,--as-needed)
endfunction()

# The families of the operators. The CPU and the NPU have one source file of kernels per family, with the family's name.
set(NGRAM_NPU_FAMILIES bookkeeping correction drafting merging store)

# Sets `out` to the package folder of the torch that Python_EXECUTABLE would import.
function(ngram_npu_find_torch out)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE find_status ERROR_QUIET)
  if(find_status)
    message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}: install torch >= 2.10, or build without the torch "
                        "operators (pip: NGRAM_NPU_TORCH=OFF in the environment; cmake: -DNGRAM_NPU_TORCH=OFF)")
  endif()
  set(${out} "${torch_dir}" PARENT_SCOPE)
endfunction()
