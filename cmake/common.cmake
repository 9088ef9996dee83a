# What every target shares: the language, warnings as errors, hidden symbols, sanitizers.
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

add_library(ngram_npu_options INTERFACE)
target_compile_options(ngram_npu_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
target_include_directories(ngram_npu_options INTERFACE "${NGRAM_NPU_CSRC}")
if(NGRAM_NPU_SANITIZE)
  target_compile_options(ngram_npu_options INTERFACE -fsanitize=${NGRAM_NPU_SANITIZE} -fno-sanitize-recover=all
                                                     -fno-omit-frame-pointer -g)
  target_link_options(ngram_npu_options INTERFACE -fsanitize=${NGRAM_NPU_SANITIZE})
endif()

# A library that exports its C entry points and nothing else.
function(ngram_npu_export_c_only target)
  target_link_options(${target} PRIVATE "-Wl,--version-script=${NGRAM_NPU_CSRC}/version.map")
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${NGRAM_NPU_CSRC}/version.map")
  target_link_options(${target} PRIVATE -Wl,--as-needed)
endfunction()
