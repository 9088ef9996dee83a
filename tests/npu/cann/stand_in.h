// Declarations shared by the stand-ins for CANN's libraries.
#pragma once

#include <cstdint>

constexpr int64_t kStandInVectorCores = 40;
constexpr int64_t kStandInUbBytes = 192 * 1024;
constexpr uint64_t kStandInArgsBytes = 57 * 8;  // sizeof(NgramNpuLaunchArgs)

// Adds a launch to the record that tests read. Returns an error if a test has requested failing launches.
extern "C" uint32_t stand_in_record_launch(const char* kernel, const void* stream);
