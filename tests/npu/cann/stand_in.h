// Declarations that the stand-ins for CANN's libraries share.
#pragma once

#include <cstdint>

constexpr int64_t kStandInVectorCores = 40;
constexpr int64_t kStandInUbBytes = 192 * 1024;
constexpr uint64_t kStandInArgsBytes = 57 * 8;  // of a kernel's argument

// Adds a launch to the record that tests read. Returns an error if a test has requested one.
extern "C" uint32_t stand_in_record(const char* kernel, const void* stream);
