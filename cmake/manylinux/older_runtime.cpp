// What g++ 12 calls in libstdc++ and glibc and manylinux_2_28 lacks, made of what it has. Each definition is hidden, so
// that it serves the library it is linked into and nothing else in the process. Mangled names because the headers of a
// newer libstdc++ declare these functions, and some are private.
#include <pthread.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <sstream>

extern "C" {

// GLIBC_2.32: whether there is one thread only. No: reference counts are atomic.
char __libc_single_threaded = 0;

// CXXABI_1.3.13: before, one reference more or less was a copy made or destroyed.
void copy_exception_ptr(void* to, const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void* of) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_reference(void* of) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release_reference(void* of) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(void* of) {
  void* never_destroyed = nullptr;
  copy_exception_ptr(&never_destroyed, of);
}

void release_reference(void* of) {
  destroy_exception_ptr(of);
  void* none = nullptr;
  std::memcpy(of, &none, sizeof none);
}

// GLIBCXX_3.4.29
[[noreturn]] void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.30
void wait(std::condition_variable* until,
          std::unique_lock<std::mutex>* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void wait(std::condition_variable* until, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(until->native_handle(), lock->mutex()->native_handle());
}

// GLIBCXX_3.4.26: the constructors without an argument.
void make_stringstream(void* at) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* at) { new (at) std::stringstream(std::ios_base::in | std::ios_base::out); }
void make_ostringstream(void* at) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_ostringstream(void* at) { new (at) std::ostringstream(std::ios_base::out); }
}
