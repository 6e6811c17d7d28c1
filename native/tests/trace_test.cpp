#include "bootseer/trace.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "bootseer/error.hpp"
#include "bootseer/read_whole_file.hpp"
#include "bootseer/trace_recorder.hpp"
#include "test_image.hpp"

namespace bootseer {
namespace {

TraceRecord at(std::uint64_t offset, std::uint32_t length, std::uint64_t t_ns) {
  return {.offset = offset, .length = length, .pid = 1, .t_ns = t_ns, .flags = 0};
}

TEST(Trace, RoundTrips) {
  const Trace trace(12345, 99, {at(0, 1, 5), {.offset = 7, .length = 8, .pid = 9, .t_ns = 10, .flags = 1}});
  const Trace again = Trace::parse(trace.serialize());
  EXPECT_EQ(again.records(), trace.records());
  EXPECT_EQ(again.image_bytes(), 12345U);
  EXPECT_EQ(again.started_unix_ns(), 99U);
  EXPECT_EQ(again.dropped(), 0U);
  EXPECT_TRUE(again.is_finished());
}

TEST(Trace, DamageCostsTheTailOnly) {
  std::vector<TraceRecord> records;
  for (std::uint32_t i = 0; i < 20; ++i) records.push_back(at(i, 1, i));
  const auto good = Trace(100, 0, records).serialize();
  for (std::size_t i = 0; i < good.size(); ++i) {
    auto bytes = good;
    bytes[i] ^= std::byte{4};
    if (i < trace_format::kHeaderBytes) {
      EXPECT_THROW(Trace::parse(bytes), Error);
    } else {
      const std::size_t intact = (i - trace_format::kHeaderBytes) / trace_format::kRecordBytes;
      const Trace trace = Trace::parse(bytes);
      EXPECT_EQ(trace.records().size(), intact);
      EXPECT_EQ(trace.dropped(), records.size() - intact);
    }
  }
}

TEST(Trace, PlanIsFirstUseInOrderAndIgnoresWhatIsOutside) {
  const TestImage image = make_test_image(41);
  const ChunkMap& map = *image.map;
  const auto begin = [&](std::uint32_t chunk) { return map.chunk(chunk).raw_offset; };
  const Trace trace(image.raw.size(), 0,
                    {at(begin(7), 1, 30), at(begin(2), 1, 10), at(begin(7), 1, 20), at(begin(4), 100, 1),
                     at(begin(11) - 1, 2, 40), at(image.raw.size(), 1, 0), at(~std::uint64_t{0}, ~0U, 0),
                     at(0, 0, 0), at(0, kMaxTraceRecordBytes + 1, 0), at(image.raw.size() - 1, 1 << 20, 50)});
  ASSERT_TRUE(map.chunk(4).is_zeros());  // never fetched, so not in the plan
  const std::vector<PlanEntry> expected = {{2, 10}, {7, 20}, {10, 40}, {11, 40}, {40, 50}};
  EXPECT_EQ(trace.plan(map), expected);
}

TEST(Trace, MergeKeepsTheEarliestTimes) {
  const Trace one(100, 7, {at(0, 1, 10), at(5, 1, 20)});
  const Trace two(100, 3, {at(5, 1, 2), at(9, 1, 30), {.flags = TraceRecord::kReady}});
  const Trace merged = Trace::merge(std::vector{one, two});
  EXPECT_EQ(merged.records(), (std::vector{at(5, 1, 2), at(0, 1, 10), at(9, 1, 30)}));
  EXPECT_EQ(merged.started_unix_ns(), 3U);
}

TEST(TraceRecorder, RecordsFirstUseOnly) {
  const TemporaryDirectory directory;
  const std::string path = directory / "trace";
  {
    TraceRecorder recorder(path, 1 << 20);
    recorder.touch(0, 4096, 1, false);
    recorder.touch(4096, 4096, 2, false);      // the same block
    recorder.touch(8192, 4096, 3, true);       // the same block, but somebody knows better
    recorder.touch(65536 - 10, 20, 4, false);  // one old block, one new
    recorder.touch(5 * 65536, 3 * 65536, 5, false);
    recorder.finish();
    recorder.touch(9 * 65536, 1, 6, false);  // after the end
  }
  const Trace trace = Trace::load(path);
  std::vector<std::uint32_t> pids;
  for (const auto& record : trace.records()) pids.push_back(record.pid);
  EXPECT_EQ(pids, (std::vector<std::uint32_t>{1, 3, 4, 5, 0}));
  EXPECT_TRUE(trace.is_finished());
}

TEST(TraceRecorder, ContinuesAfterACrash) {
  const TemporaryDirectory directory;
  const std::string path = directory / "trace";
  {
    TraceRecorder recorder(path, 1 << 20);
    recorder.touch(0, 1, 1, false);
  }
  {
    const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    ASSERT_EQ(::write(fd, "torn", 4), 4);
    ::close(fd);
    TraceRecorder recorder(path, 1 << 20);
    EXPECT_TRUE(recorder.is_recording());
    recorder.touch(10, 1, 2, false);  // known from before
    recorder.touch(70000, 1, 3, false);
    recorder.finish();
  }
  TraceRecorder finished(path, 1 << 20);
  EXPECT_FALSE(finished.is_recording());
  finished.close();
  const Trace trace = Trace::load(path);
  ASSERT_EQ(trace.records().size(), 3U);
  EXPECT_EQ(trace.dropped(), 0U);
  EXPECT_EQ(trace.records()[1].pid, 3U);
  EXPECT_GE(trace.records()[1].t_ns, trace.records()[0].t_ns);
  // Another image under the same path begins again.
  { TraceRecorder other(path, 1 << 21); }
  EXPECT_TRUE(Trace::load(path).records().empty());
}

TEST(TraceRecorder, ManyThreadsLoseNothing) {
  const TemporaryDirectory directory;
  const std::string path = directory / "trace";
  constexpr std::uint64_t kBlocks = 4000;
  {
    TraceRecorder recorder(path, kBlocks * kTraceBlockBytes);
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
      threads.emplace_back([&recorder, t] {
        for (std::uint64_t block = 0; block < kBlocks; ++block) {
          recorder.touch((block * 7 + t) % kBlocks * kTraceBlockBytes, 4096, t, false);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(recorder.lost(), 0U);
  }
  EXPECT_EQ(Trace::load(path).records().size(), kBlocks);
}

}  // namespace
}  // namespace bootseer
