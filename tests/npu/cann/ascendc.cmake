# Replaces the CMake file with which CANN builds kernels. Defines the functions that our build calls, and checks the same
# requirements. The built binary runs the operators' CPU kernels (kernels.cpp).
foreach(variable ASCEND_CANN_PACKAGE_PATH RUN_MODE SOC_VERSION)
  if(NOT DEFINED ${variable} OR "${${variable}}" STREQUAL "")
    message(FATAL_ERROR "${variable} is not set")
  endif()
endforeach()
if(NOT EXISTS "${ASCEND_CANN_PACKAGE_PATH}/lib64")
  message(FATAL_ERROR "ASCEND_CANN_PACKAGE_PATH=${ASCEND_CANN_PACKAGE_PATH} is not CANN")
endif()
string(TOLOWER "${SOC_VERSION}" chip)
if(NOT chip MATCHES "^ascend(910b[1-4]|910_93[0-9]+|950[a-z]+_[0-9a-z]+|310p[0-9])$")
  message(FATAL_ERROR "SOC_VERSION ${SOC_VERSION} is not supported")
endif()
set(STAND_IN "${CMAKE_CURRENT_LIST_DIR}")
set(CMAKE_SKIP_RPATH TRUE)  # also set in the scope that includes this file, as by the real file

# Builds the kernels' binary, here a shared library with one entry point per kernel (kernels.cpp). Like the real function,
# writes the binary below the prefix.
function(ascendc_fatbin_library target)
  set(entries "")
  foreach(source ${ARGN})
    file(READ "${source}" text)
    string(REGEX MATCHALL "NGRAM_NPU_KERNEL\\([a-z_]+," kernels "${text}")
    if(NOT kernels)
      message(FATAL_ERROR "${source} has no NGRAM_NPU_KERNEL")
    endif()
    foreach(kernel ${kernels})
      string(REGEX REPLACE ".*\\(ngram_npu_([a-z_]+)," "\\1" kernel "${kernel}")
      string(REGEX REPLACE "_(search|draft|copy|write)$" "" op "${kernel}")
      string(REGEX REPLACE "^copy_" "correct_" op "${op}")  # the second launch of the two operators that correct
      file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/plans.h" in_place REGEX "X\\(${op}_,")
      if(in_place)  # the operator's name has an underscore at its end
        string(APPEND op "_")
      endif()
      string(APPEND entries "STAND_IN_KERNEL(${op}, ngram_npu_${kernel})\n")
    endforeach()
  endforeach()
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${target}/entries.inc" "${entries}")
  add_library(${target} SHARED "${STAND_IN}/kernels.cpp")
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/${target}")
  target_link_directories(${target} PRIVATE "${ASCEND_CANN_PACKAGE_PATH}/lib64")
  target_link_libraries(${target} PRIVATE ascendcl ngram_npu_cpu)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET default BUILD_RPATH "${ASCEND_CANN_PACKAGE_PATH}/lib64")
  set(out "${CMAKE_INSTALL_PREFIX}/fatbin/${target}")
  add_custom_target(${target}_fatbin_obj ALL COMMAND ${CMAKE_COMMAND} -E make_directory "${out}"
                    COMMAND ${CMAKE_COMMAND} -E copy "$<TARGET_FILE:${target}>" "${out}/${target}.o")
  add_dependencies(${target}_fatbin_obj ${target})
endfunction()

function(ascendc_include_directories target scope)
  target_include_directories(${target} ${scope} ${ARGN})
endfunction()
