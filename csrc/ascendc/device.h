// Functions and classes that the kernels share: reading arguments, ordering the pipes, staging inputs and results.
//
// The scalar unit reads global memory through the Params' pointers, with the functions in core/. It never writes to
// global memory, because the scalar caches of two cores would overwrite each other's parts of a line. Results are
// staged in the unified buffer and copied to global memory; a copy writes exactly the bytes of the results.
#pragma once

#include "ascendc/launch_args.h"
#include "ascendc/ub_layout.h"
#include "core/lookup_rules.h"
#include "kernel_operator.h"

// Defines the kernel `name`, which calls function(args).
#define NGRAM_NPU_KERNEL(name, ...)                                     \
  extern "C" __global__ __aicore__ void name(NgramNpuLaunchArgs args) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                     \
    __VA_ARGS__(args);                                                  \
  }

namespace ngram_npu::ascendc {

// Converts the words of an argument back to the struct that the host copied into them.
template <class T, int32_t max_words>
__aicore__ inline T read_as(const uint64_t (&words)[max_words]) {
  static_assert(sizeof(T) <= sizeof(words));
  union {
    uint64_t copy[max_words];
    T value;
  } converter;
  constexpr int32_t num_words = (sizeof(T) + sizeof(uint64_t) - 1) / sizeof(uint64_t);
  for (int32_t i = 0; i < num_words; ++i) converter.copy[i] = words[i];
  return converter.value;
}

// Makes later instructions of the event's second pipe wait for earlier instructions of its first pipe. The ID is not
// reserved, so nothing may happen between setting the flag and waiting for it.
template <AscendC::HardEvent event>
__aicore__ inline void sync_pipes() {
  const int32_t id = static_cast<int32_t>(GetTPipePtr()->FetchEventID(event));
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// Items are assigned to cores in passes: in a pass, each core that the CoreTiling uses gets per_pass consecutive items.
// Returns the first item of this core in the first pass, or INT64_MAX if this core has no items.
__aicore__ inline int64_t first_item(const CoreTiling& core_tiling) {
  const int64_t core = AscendC::GetBlockIdx();
  return core < core_tiling.cores ? core * core_tiling.per_pass : INT64_MAX;
}
// Returns the number of items of all cores in one pass: the distance from a core's items to its items in the next pass.
__aicore__ inline int64_t pass_stride(const CoreTiling& core_tiling) {
  return core_tiling.cores * core_tiling.per_pass;
}

// Returns the parameters of a copy of `count` contiguous items, without padding.
template <class T>
__aicore__ inline AscendC::DataCopyExtParams make_copy_params(int64_t count) {
  return AscendC::DataCopyExtParams(1, static_cast<uint32_t>(count * int64_t{sizeof(T)}), 0, 0, 0);
}

// A buffer of at least one item in the unified buffer, which exists for the whole kernel. Scalar, vector and copy
// instructions access it; the kernel orders these accesses with sync_pipes(). The position is not VECCALC, because the
// 910B's documentation allows no copies between VECCALC and global memory.
template <class T, AscendC::TPosition position = AscendC::TPosition::VECIN>
class LocalBuffer : public LocalBufferLayout<T> {
 public:
  __aicore__ inline LocalBuffer(AscendC::TPipe& pipe, int64_t capacity) {
    pipe.InitBuffer(buffer_, static_cast<uint32_t>(LocalBuffer::ub_bytes(capacity)));
    tensor_ = buffer_.template Get<T>();
  }

  __aicore__ inline const AscendC::LocalTensor<T>& tensor() const { return tensor_; }
  __aicore__ inline T get(int64_t i) const { return tensor_.GetValue(static_cast<uint32_t>(i)); }
  __aicore__ inline void set(int64_t i, T value) const { tensor_.SetValue(static_cast<uint32_t>(i), value); }

  // Copy items [offset, offset + count) of the buffer from or to global memory. The first item's byte offset must be a
  // multiple of 32.
  __aicore__ inline void load(int64_t offset, Gm<const T> source, int64_t count) {
    if (count <= 0) return;
    AscendC::GlobalTensor<T> global;
    // A C cast, because Gm is a class on the twin, for which const_cast is not possible.
    global.SetGlobalBuffer((Gm<T>)source, static_cast<uint64_t>(count));
    AscendC::DataCopyPad(tensor_[static_cast<uint32_t>(offset)], global, make_copy_params<T>(count),
                         AscendC::DataCopyPadExtParams<T>());
  }
  __aicore__ inline void store(int64_t offset, Gm<T> destination, int64_t count) const {
    if (count <= 0) return;
    AscendC::GlobalTensor<T> global;
    global.SetGlobalBuffer(destination, static_cast<uint64_t>(count));
    AscendC::DataCopyPad(global, tensor_[static_cast<uint32_t>(offset)], make_copy_params<T>(count));
  }

 private:
  AscendC::TBuf<position> buffer_;
  AscendC::LocalTensor<T> tensor_;
};

// Words of a buffer, from `offset` on. The functions in core/ accept it in place of a pointer.
struct UbWords {
  struct Word {
    const LocalBuffer<int32_t>& buffer;
    int64_t i;
    __aicore__ inline operator int32_t() const { return buffer.get(i); }
    __aicore__ inline void operator=(int32_t value) const { buffer.set(i, value); }
  };
  const LocalBuffer<int32_t>& buffer;
  int64_t offset;
  __aicore__ inline Word operator[](int64_t i) const { return {buffer, offset + i}; }
};

// Items [first, first + count) of an array, staged in the unified buffer and accessed by their indices in the array.
template <class T>
class UbWindow : public LocalBufferLayout<T> {
 public:
  __aicore__ inline UbWindow(AscendC::TPipe& pipe, Gm<const T> array, int64_t capacity)
      : array_(array), items_(pipe, capacity) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    first_ = first;
    items_.load(0, array_ + first, count);
  }
  __aicore__ inline T operator[](int64_t i) const { return items_.get(i - first_); }

 private:
  const Gm<const T> array_;
  LocalBuffer<T> items_;
  int64_t first_ = 0;
};

// Rows of draft token ids of 4 or 8 bytes for a pass of requests, staged in the unified buffer. Each row begins at a
// multiple of 32 bytes and is stored with one copy. If all rows of a pass are stored, contiguous rows of int32 ids are
// staged without gaps and stored with a single copy.
class StagedDraftRows : public StagedDraftRowsLayout {
 public:
  __aicore__ inline StagedDraftRows(AscendC::TPipe& pipe, const DraftRows& rows, int64_t k, int64_t per_pass,
                                    bool stores_all_rows)
      : rows_(rows),
        num_words_(k * words_per_id()),
        has_no_gaps_(stores_all_rows && words_per_id() == 1 && rows.stride == k),
        stride_(has_no_gaps_ ? num_words_ : round_up_items<int32_t>(num_words_)),
        words_(pipe, per_pass * stride_) {}

  // Sets token t of request j of the pass.
  __aicore__ inline void set(int64_t j, int64_t t, int32_t token) {
    const int64_t word = j * stride_ + t * words_per_id();
    words_.set(word, token);
    if (words_per_id() == 2) words_.set(word + 1, token < 0 ? -1 : 0);
  }
  // Stores the row of request j of the pass to batch position i.
  __aicore__ inline void store(int64_t j, int64_t i) const { words_.store(j * stride_, row_at(i), num_words_); }
  // Stores the rows of `count` requests to the batch positions from `first` on.
  __aicore__ inline void store_all(int64_t first, int64_t count) const {
    if (has_no_gaps_) words_.store(0, row_at(first), count * num_words_);
    for (int64_t j = 0; !has_no_gaps_ && j < count; ++j) store(j, first + j);
  }

 private:
  __aicore__ inline int64_t words_per_id() const { return rows_.bytes / int64_t{sizeof(int32_t)}; }
  __aicore__ inline Gm<int32_t> row_at(int64_t i) const {
    return static_cast<Gm<int32_t>>(rows_.data) + i * rows_.stride * words_per_id();
  }

  const DraftRows rows_;
  const int64_t num_words_;
  const bool has_no_gaps_;
  const int64_t stride_;
  LocalBuffer<int32_t> words_;
};

// An array that the scalar unit accesses at any index. The whole array is staged in the unified buffer. An array of
// more than kMaxStagedItems items stays in global memory, and each access may wait for a cache line.
template <class T>
class RandomAccessArray : public RandomAccessArrayLayout<T> {
 public:
  __aicore__ inline RandomAccessArray(AscendC::TPipe& pipe, Gm<const T> array, int64_t size)
      : array_(array), num_staged_(size <= kMaxStagedItems ? size : 0), staged_items_(pipe, array, num_staged_) {}

  __aicore__ inline void load() { staged_items_.load(0, num_staged_); }
  __aicore__ inline T operator[](int64_t i) const { return num_staged_ > 0 ? staged_items_[i] : array_[i]; }

 private:
  const Gm<const T> array_;
  const int64_t num_staged_;
  UbWindow<T> staged_items_;
};

// An IndexArray that the scalar unit accesses at any index, like RandomAccessArray.
class RandomAccessIndices : public RandomAccessIndicesLayout {
 public:
  __aicore__ inline RandomAccessIndices(AscendC::TPipe& pipe, const IndexArray& indices, int64_t size)
      : bytes_(indices.bytes),
        int32_indices_(pipe, static_cast<Gm<const int32_t>>(indices.data), bytes_ == 4 ? size : 0),
        int64_indices_(pipe, static_cast<Gm<const int64_t>>(indices.data), bytes_ == 8 ? size : 0) {}

  __aicore__ inline void load() {
    int32_indices_.load();
    int64_indices_.load();
  }
  __aicore__ inline int64_t operator[](int64_t i) const {
    if (bytes_ == 0) return i;  // there is no index array: item i has index i
    return bytes_ == 8 ? int64_indices_[i] : int32_indices_[i];
  }

 private:
  const int32_t bytes_;
  RandomAccessArray<int32_t> int32_indices_;
  RandomAccessArray<int64_t> int64_indices_;
};

// Loads single values from any addresses in global memory, with one wait for all loads. Loads beyond the capacity are
// dropped, and operator[] then returns another loaded value. The caller's capacity is sufficient for all requests of a
// pass; only with a query_start_loc that is not sorted, for which results are unspecified, are there more loads.
class ScatteredLoads : public ScatteredLoadsLayout {
 public:
  __aicore__ inline ScatteredLoads(AscendC::TPipe& pipe, int64_t capacity)
      : capacity_(capacity), values_(pipe, capacity * kUnitItems) {}

  __aicore__ inline void request(Gm<const int32_t> address) {
    if (count_ == capacity_) return;
    values_.load(count_ * kUnitItems, address, 1);
    ++count_;
  }
  __aicore__ inline int32_t operator[](int64_t n) const { return values_.get(smaller(n, count_ - 1) * kUnitItems); }
  __aicore__ inline void clear() { count_ = 0; }

 private:
  const int64_t capacity_;
  LocalBuffer<int32_t> values_;
  int64_t count_ = 0;
};

}  // namespace ngram_npu::ascendc
