// Jobs on a late stream, compared with a model that runs each step immediately: rows reused while jobs are pending,
// ends announced late or early, text that may be stored only after a lag, a store that is being saved.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "choices.h"
#include "cpu/host_drafting.h"
#include "cpu/index_policy.h"
#include "entry_points.h"
#include "late_stream.h"

namespace ngram_npu::test {
namespace {

constexpr int64_t kRows = 5, kCapacity = 300, kDrafts = 4, kMost = kDrafts + 1, kPages = 80, kBlocks = 24,
                  kLineBits = 6;

struct Memory {
  explicit Memory(uint32_t visibility) : store(kRows, kBlocks, kLineBits, visibility) {}

  Index index{kRows, kPages};
  SharedStore store;
};

struct Request {
  std::vector<int32_t> text;
  int64_t scope = 0, settled = 0, cut = -1;
  std::vector<int32_t> stop_tokens;
  StopConditions stop{};

  bool stops() const {
    const auto size = static_cast<int64_t>(text.size());
    for (const int32_t token : stop_tokens) {
      if (text.back() == token) return true;
    }
    if (size >= stop.max_length) return true;
    const int64_t output = size - stop.prompt_length;
    if (output < stop.min_output || stop.max_pattern == 0) return false;
    for (int64_t pattern = stop.min_pattern; pattern <= stop.max_pattern; ++pattern) {
      if (pattern * stop.min_count > output) return false;
      bool repeats = true;
      for (int64_t j = 1; j <= pattern * (stop.min_count - 1); ++j) {
        const auto at = static_cast<size_t>(size - j);
        repeats = repeats && text[at] == text[at - static_cast<size_t>(pattern)];
      }
      if (repeats) return true;
    }
    return false;
  }
};

struct Tables {
  std::vector<uint8_t> costs, store_costs;
  LookupOptions lookup;
  LadderOptions ladder;
};

// Runs each step immediately, and stores text `lag` steps later, request by request.
class Model {
 public:
  Model(const Tables& tables, uint32_t visibility, int64_t lag) : memory(visibility), tables_(tables), lag_(lag) {}

  void begin(int64_t row, Request request) {
    end(row);
    request.settled = static_cast<int64_t>(request.text.size());
    requests_[row] = std::move(request);
    ++generations_[row];
  }
  void end(int64_t row) {
    Request& request = requests_[row];
    if (request.text.empty()) return;
    if (request.cut > request.settled) settle(row, request.cut);
    const int64_t slot = row;
    const NgramStoreFinishParams finish{memory.store.access(), {&slot, 8}, 1};
    ngram_npu_cpu_ngram_store_finish_(&finish, nullptr);
    const NgramIndexResetParams reset{memory.index.access({&slot, 8}), 1};
    ngram_npu_cpu_ngram_index_reset_(&reset, nullptr);
    request = {};
    ++generations_[row];
  }
  // Rows without a request are padding: they sample nothing. A step with padding only does not count.
  std::vector<uint8_t> step(const std::vector<int32_t>& rows, const std::vector<std::vector<int32_t>>& sampled,
                            bool drafting) {
    std::vector<Step> now;
    std::vector<int32_t> counts;
    bool is_step = false;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0 || rows[i] >= kRows || !has(rows[i])) {
        counts.push_back(0);
        continue;
      }
      is_step = true;
      Request& request = requests_[rows[i]];
      counts.push_back(static_cast<int32_t>(sampled[i].size()));
      for (const int32_t token : sampled[i]) {
        if (static_cast<int64_t>(request.text.size()) == kCapacity) break;
        request.text.push_back(token);
        if (request.cut < 0 && request.stops()) request.cut = static_cast<int64_t>(request.text.size());
      }
      const auto size = static_cast<int64_t>(request.text.size());
      now.push_back({rows[i], generations_[rows[i]], request.cut < 0 ? size : smaller(size, request.cut)});
    }
    std::vector<uint8_t> drafts;
    if (drafting) drafts = draft(rows, counts);
    if (!is_step) return drafts;
    steps_.push_back(now);
    if (static_cast<int64_t>(steps_.size()) > lag_) {
      for (const Step& step : steps_.front()) {
        if (generations_[step.row] == step.generation && step.length > requests_[step.row].settled)
          settle(step.row, step.length);
      }
      steps_.pop_front();
    }
    return drafts;
  }
  bool has(int64_t row) const { return !requests_[row].text.empty(); }
  bool full(int64_t row) const { return static_cast<int64_t>(requests_[row].text.size()) == kCapacity; }
  bool stopped(int64_t row) const { return requests_[row].cut >= 0; }

  Memory memory;

 private:
  struct Step {
    int64_t row, generation, length;
  };

  void settle(int64_t row, int64_t length) {
    Request& request = requests_[row];
    const auto count = static_cast<int32_t>(length - request.settled), end = static_cast<int32_t>(length);
    request.settled = length;
    const int64_t slot = row, at = 0;
    request.text.reserve(kCapacity);
    InsertParams params{};
    params.store = {memory.store.access(),
                    {request.text.data(), 1, kCapacity, kCapacity},
                    &end,
                    &count,
                    {&at, 8},
                    {&slot, 8},
                    {&request.scope, 8},
                    1};
    ngram_npu_cpu_insert_tokens(&params);
  }

  std::vector<uint8_t> draft(const std::vector<int32_t>& rows, const std::vector<int32_t>& counts) {
    const auto batch = static_cast<int64_t>(rows.size());
    std::vector<int32_t> text(kRows * kCapacity), lengths(kRows);
    std::vector<int64_t> scopes;
    for (int64_t r = 0; r < kRows; ++r) {
      const std::vector<int32_t>& from = requests_[r].text;
      std::copy(from.begin(), from.end(), text.begin() + r * kCapacity);
      lengths[static_cast<size_t>(r)] = static_cast<int32_t>(from.size());
    }
    for (const int32_t row : rows) scopes.push_back(row >= 0 && row < kRows ? requests_[row].scope : 0);
    const StreamDraftLayout layout(batch, kDrafts);
    std::vector<uint8_t> drafts(static_cast<size_t>(layout.total_bytes));
    DraftParams params{};
    NgramProposeParams& p = params.index_propose.propose;
    p.token_ids = {text.data(), kRows, kCapacity, kCapacity};
    p.num_tokens = lengths.data();
    p.row_indices = {rows.data(), 4};
    p.num_sampled = counts.data();
    p.batch = batch;
    p.lookup = tables_.lookup;
    p.draft_token_ids = {drafts.data(), kDrafts, 8};
    p.num_draft_tokens = reinterpret_cast<int32_t*>(drafts.data() + layout.counts_offset);
    p.match_len = reinterpret_cast<int32_t*>(drafts.data() + layout.lengths_offset);
    p.draft_costs = {drafts.data() + layout.costs_offset, kDrafts};
    params.index_propose.index = memory.index.access();
    params.index_propose.catch_up_tokens = -1;
    params.index_propose.ladder = tables_.ladder;
    params.store = {memory.store.access(), {scopes.data(), 8}, tables_.store_costs.data(), 40};
    ngram_npu_cpu_draft(&params);
    return drafts;
  }

  const Tables& tables_;
  int64_t lag_;
  Request requests_[kRows];
  int64_t generations_[kRows] = {};
  std::deque<std::vector<Step>> steps_;
};

struct Counts {
  int64_t reused = 0, flushed = 0, dropped = 0, from_store = 0;
};

// Copies a store in pieces repeatedly, as the thread of an engine that saves it.
class Saving {
 public:
  explicit Saving(Memory* memory) : memory_(memory), thread_([this] { copy(); }) {}
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;

  // Stops copying. Returns whether the last complete copy is a valid store.
  bool stop(uint32_t visibility) {
    stopped_ = true;
    thread_.join();
    Memory loaded(visibility);
    const StoreAccess to = loaded.store.access();
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const auto count = static_cast<int64_t>(pieces_[i].size());
      const auto piece = static_cast<int64_t>(i);
      if (ngram_npu_cpu_ngram_store_unpack(to.words, to.num_words, piece, pieces_[i].data(), count) != 0) return false;
    }
    return loaded.store.fault() == kStoreFaultNone;
  }

 private:
  void copy() {
    const StoreAccess from = memory_->store.access();
    std::vector<uint32_t> buffer(static_cast<size_t>(kStorePieceWords));
    do {
      std::vector<std::vector<uint32_t>> pieces;
      const int64_t number = ngram_npu_cpu_ngram_store_pieces(from.words, from.num_words);
      while (static_cast<int64_t>(pieces.size()) < number) {
        const auto piece = static_cast<int64_t>(pieces.size());
        const int64_t count = ngram_npu_cpu_ngram_store_pack(from.words, from.num_words, piece, buffer.data());
        if (count >= 0) pieces.emplace_back(buffer.begin(), buffer.begin() + count);
      }
      pieces_.swap(pieces);
    } while (!stopped_);
  }

  Memory* memory_;
  std::atomic<bool> stopped_{false};
  std::vector<std::vector<uint32_t>> pieces_;
  std::thread thread_;
};

void run_episode(uint64_t seed, int steps, Counts* counts) {
  RandomChoices c(seed, steps);
  Tables tables{std::vector<uint8_t>(kCostRows * kCostColumns),
                std::vector<uint8_t>(kCostRows * store::kStoreCostColumns),
                {1, kLadderMaxN, kDrafts, kCapacity, kLatest, c.one_in(2), true, nullptr, 0},
                {}};
  for (auto* table : {&tables.costs, &tables.store_costs}) {
    for (uint8_t& cost : *table) cost = static_cast<uint8_t>(c.below(20));
  }
  tables.ladder = {true, tables.costs.data(), 40};
  const uint32_t visibility = c.one_in(2) ? store::kLive : store::kFinish;
  const int64_t lag = c.below(4);
  Model model(tables, visibility, lag);
  Memory memory(visibility);
  std::vector<int32_t> staging(kRows * (1 + kMost));
  std::vector<uint8_t> drafts(static_cast<size_t>(StreamDraftLayout(kRows, kDrafts).total_bytes));
  StreamOptions options{kRows, kCapacity, kMost, lag, {}, staging.data(), drafts.data()};
  options.draft.index_propose.propose.lookup = tables.lookup;
  options.draft.index_propose.index = memory.index.access();
  options.draft.index_propose.ladder = tables.ladder;
  options.draft.store = {memory.store.access(), {}, tables.store_costs.data(), 40};
  StreamDrafter* drafter = ngram_npu_cpu_stream_make(&options);
  ASSERT_NE(drafter, nullptr);
  const std::unique_ptr<Saving> saving(seed % 3 == 0 ? new Saving(&memory) : nullptr);

  std::deque<std::pair<std::vector<uint8_t>, std::vector<uint8_t>>> results;  // expected, actual
  {
    LateStream stream;
    const int64_t tokens = c.from(3, 6);
    while (c.more()) {
      std::vector<int32_t> rows;
      for (int32_t row = 0; row < kRows; ++row) {
        if (model.has(row) && (model.full(row) || c.one_in(model.stopped(row) ? 2 : 25))) {
          ngram_npu_cpu_stream_remove_request(drafter, row);
          counts->flushed += model.stopped(row);
          counts->dropped += !model.stopped(row) && lag > 0;
          model.end(row);
        }
        if (!model.has(row) && c.one_in(3)) {
          Request request;
          for (int64_t n = c.from(1, c.one_in(10) ? kCapacity : 40); n > 0; --n)
            request.text.push_back(static_cast<int32_t>(c.below(tokens)));
          request.scope = c.below(2);
          request.stop.prompt_length = static_cast<int64_t>(request.text.size());
          request.stop.max_length = c.one_in(2) ? INT64_MAX : request.stop.prompt_length + c.below(60);
          if (c.one_in(2)) request.stop_tokens = {static_cast<int32_t>(tokens)};
          if (c.one_in(3)) {
            request.stop.min_output = c.below(10);
            request.stop.min_pattern = c.from(1, 2);
            request.stop.max_pattern = c.from(2, 5);
            request.stop.min_count = c.from(2, 4);
          }
          StreamRequest begin{row, request.scope, request.text.data(), static_cast<int64_t>(request.text.size()),
                              request.stop};
          begin.stop.tokens = request.stop_tokens.data();
          begin.stop.num_tokens = static_cast<int64_t>(request.stop_tokens.size());
          ngram_npu_cpu_stream_add_request(drafter, &begin);
          counts->reused += ngram_npu_cpu_stream_count_pending_jobs(drafter) > 0;
          model.begin(row, std::move(request));
        }
        if (model.has(row) ? !c.one_in(4) : c.one_in(8)) rows.push_back(row);
      }
      if (c.one_in(5)) rows.clear();  // a dummy run
      if (c.one_in(8) && static_cast<int64_t>(rows.size()) < kRows) rows.push_back(c.one_in(2) ? -1 : kRows);
      std::vector<std::vector<int32_t>> sampled(rows.size());
      std::vector<int32_t> copied;
      for (std::vector<int32_t>& row_sampled : sampled) {
        for (int64_t n = c.below(kMost + 1); n > 0; --n)
          row_sampled.push_back(static_cast<int32_t>(c.one_in(30) ? tokens : c.below(tokens)));
        copied.push_back(static_cast<int32_t>(row_sampled.size()));
        copied.insert(copied.end(), row_sampled.begin(), row_sampled.end());
        copied.resize(copied.size() + static_cast<size_t>(kMost) - row_sampled.size(), -1);
      }
      const bool drafting = !c.one_in(4);
      StreamJob* job =
          ngram_npu_cpu_stream_create_job(drafter, rows.data(), static_cast<int64_t>(rows.size()), drafting);
      ASSERT_NE(job, nullptr);
      results.emplace_back(model.step(rows, sampled, drafting), std::vector<uint8_t>());
      auto* actual = &results.back().second;
      const auto batch = static_cast<int64_t>(rows.size());
      const auto bytes = drafting ? StreamDraftLayout(batch, kDrafts).total_bytes : 0;
      stream.add([=, &staging] { std::copy(copied.begin(), copied.end(), staging.begin()); });
      stream.add([=] { ngram_npu_cpu_stream_run_job(job); });
      stream.add([=, &drafts] { actual->assign(drafts.begin(), drafts.begin() + bytes); });
    }
  }
  EXPECT_EQ(ngram_npu_cpu_stream_count_pending_jobs(drafter), 0);
  if (saving != nullptr) {
    EXPECT_TRUE(saving->stop(visibility)) << "seed " << seed;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_EQ(results[i].second, results[i].first) << "seed " << seed << ", step " << i << ", lag " << lag;
  }
  ASSERT_EQ(memory.store, model.memory.store) << "seed " << seed;
  counts->from_store += static_cast<int64_t>(memory.store[store::kStatDrafts]);
  EXPECT_TRUE(ngram_npu_cpu_stream_free(drafter));
}

TEST(StreamDrafterTest, DraftsEqualThoseOfImmediateSteps) {
  Counts counts;
  const char* more = std::getenv("NGRAM_NPU_STREAM_EPISODES");  // `make prove`
  const uint64_t episodes = more != nullptr ? std::strtoull(more, nullptr, 10) : 40;
  for (uint64_t seed = 1; seed <= episodes; ++seed) run_episode(seed, 100, &counts);
  EXPECT_GT(counts.reused, 1000);
  EXPECT_GT(counts.flushed, 100);
  EXPECT_GT(counts.dropped, 50);
  EXPECT_GT(counts.from_store, 500);
}

// A drafter of one request with the text 1, 2, 3 in row 0. Its lookups only find text of a store.
class Drafter {
 public:
  explicit Drafter(StoreAccess store) {
    StreamOptions options{kRows, kCapacity, kMost, 0, {}, staging_.data(), drafts_.data()};
    options.draft.index_propose.propose.lookup = {1, 4, kDrafts, kCapacity, kLatest, true, true, nullptr, 0};
    options.draft.store = {store, {}, costs_.data(), 40};
    drafter_ = ngram_npu_cpu_stream_make(&options);
    const int32_t text[] = {1, 2, 3};
    const StreamRequest begin{0, 0, text, 3, {nullptr, 0, INT64_MAX, 0, 0, 0, 0, 0}};
    EXPECT_EQ(ngram_npu_cpu_stream_add_request(drafter_, &begin), kOk);
  }
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  ~Drafter() { EXPECT_TRUE(free()); }

  StreamJob* step() {
    const int32_t row = 0;
    return ngram_npu_cpu_stream_create_job(drafter_, &row, 1, true);
  }
  bool free() const { return ngram_npu_cpu_stream_free(drafter_); }

 private:
  std::vector<uint8_t> costs_ = std::vector<uint8_t>(kCostRows * store::kStoreCostColumns);
  std::vector<int32_t> staging_ = std::vector<int32_t>(kRows * (1 + kMost), 1);
  std::vector<uint8_t> drafts_ =
      std::vector<uint8_t>(static_cast<size_t>(StreamDraftLayout(kRows, kDrafts).total_bytes));
  StreamDrafter* drafter_;
};

// No other call on the store may happen, for example by the drafter of a second engine. If it does, neither call writes
// to the store, and the statistics count the skipped call.
TEST(StreamDrafterTest, JobSkipsAStoreInUse) {
  SharedStore store(kRows, kBlocks, kLineBits);
  Drafter drafter(store.access());
  store[store::kHeaderLock] = 1;
  Words before = store;
  ngram_npu_cpu_stream_run_job(drafter.step());
  ++before[store::kStatSkippedCalls];
  EXPECT_EQ(store, before);
  std::vector<uint32_t> piece(static_cast<size_t>(kStorePieceWords));
  EXPECT_EQ(ngram_npu_cpu_ngram_store_pack(store.data(), store.count(), 0, piece.data()), -1);
  EXPECT_EQ(store, before);
}

TEST(StreamDrafterTest, DrafterWithAPendingJobIsNotFreed) {
  Drafter drafter({});
  StreamJob* job = drafter.step();
  EXPECT_FALSE(drafter.free());
  ngram_npu_cpu_stream_run_job(job);
}

TEST(StreamDrafterTest, JobIndexesAtMostItsBudgetInTotal) {
  constexpr int64_t kPrompt = 5000;
  const std::vector<int32_t> text(kPrompt, 3);
  std::vector<int32_t> staging(3 * (1 + kMost), 1);
  std::vector<uint8_t> drafts(static_cast<size_t>(StreamDraftLayout(3, kDrafts).total_bytes));
  Index index(3, 64);
  StreamOptions options{3, kPrompt + 100, kMost, 0, {}, staging.data(), drafts.data()};
  options.draft.index_propose.propose.lookup = {1, 4, kDrafts, kPrompt, kLatest, true, true, nullptr, 0};
  options.draft.index_propose.index = index.access();
  StreamDrafter* drafter = ngram_npu_cpu_stream_make(&options);
  const int32_t rows[] = {0, 1, 2};
  for (const int64_t row : rows) {
    const StreamRequest begin{row, 0, text.data(), kPrompt, {nullptr, 0, INT64_MAX, 0, 0, 0, 0, 0}};
    ASSERT_EQ(ngram_npu_cpu_stream_add_request(drafter, &begin), kOk);
  }
  for (int64_t job = 1; job < 4; ++job) {
    ngram_npu_cpu_stream_run_job(ngram_npu_cpu_stream_create_job(drafter, rows, 3, job != 2));
    int64_t lengths[3];
    ngram_npu_cpu_ngram_index_lengths(index.data(), index.count(), rows, 3, lengths);
    EXPECT_EQ(lengths[0] + lengths[1] + lengths[2], smaller(job * cpu::kMaxStreamCatchUpTokens, 3 * (kPrompt + job)));
  }
  EXPECT_TRUE(ngram_npu_cpu_stream_free(drafter));
}

}  // namespace
}  // namespace ngram_npu::test
