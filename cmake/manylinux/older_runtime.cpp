// Functions of libstdc++ and glibc that g++ 12 calls and manylinux_2_28 does not have, implemented with older
// functions. Each definition is hidden: only the library into which it is linked uses it. The definitions have mangled
// names, because the headers of a newer libstdc++ already declare these functions, some of them as private members.
#include <pthread.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <sstream>

extern "C" {

// GLIBC_2.32: whether the process has only one thread. With 0, libstdc++ always counts references atomically.
char __libc_single_threaded = 0;

// CXXABI_1.3.13: changes the reference count of an exception. Older versions have only the copy constructor and the
// destructor, which change it too.
void copy_exception_ptr(void* target, const void* source) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_reference(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release_reference(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(void* pointer) {
  void* never_destroyed = nullptr;
  copy_exception_ptr(&never_destroyed, pointer);
}

void release_reference(void* pointer) {
  destroy_exception_ptr(pointer);
  void* null_pointer = nullptr;
  std::memcpy(pointer, &null_pointer, sizeof null_pointer);
}

// GLIBCXX_3.4.29: throws the exception for an invalid array length.
[[noreturn]] void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.30: waits for a condition variable.
void wait(std::condition_variable* condition,
          std::unique_lock<std::mutex>* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void wait(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}

// GLIBCXX_3.4.26: constructs string streams, without arguments.
void make_stringstream(void* memory) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* memory) { new (memory) std::stringstream(std::ios_base::in | std::ios_base::out); }
void make_ostringstream(void* memory) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_ostringstream(void* memory) { new (memory) std::ostringstream(std::ios_base::out); }
}
