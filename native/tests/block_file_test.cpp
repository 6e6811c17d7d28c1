#include "bootseer/block_file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "bootseer/error.hpp"
#include "fake_source.hpp"
#include "test_image.hpp"

namespace bootseer {
namespace {

using namespace std::chrono_literals;

BlockFileOptions quiet_options() {
  BlockFileOptions options;
  options.fetcher.background_fill = false;
  return options;
}

std::vector<PlanEntry> whole_plan(const TestImage& image) {
  std::vector<PlanEntry> plan;
  for (std::uint32_t i = 0; i < image.map->count(); ++i) plan.push_back({i, i});
  return plan;
}

template <typename Condition>
void wait_until(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + 30s;
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(1ms);
  }
}

std::uint64_t figure(const BlockFile& file, const std::string& name) {
  const Statistics statistics = file.statistics();
  for (const auto& [key, value] : statistics.entries()) {
    if (key == name) return std::get<std::uint64_t>(value);
  }
  return 0;
}

struct Fixture {
  explicit Fixture(std::uint32_t chunks = 40, FakeSource::Faults faults = {}, unsigned seed = 1)
      : image(make_test_image(chunks, seed)),
        cache(directory.path(), 0.02),
        source(std::make_shared<FakeSource>(image.blob, faults, seed)) {}

  std::unique_ptr<BlockFile> open(const BlockFileOptions& options = quiet_options()) {
    return std::make_unique<BlockFile>(cache, image.key(), image.map, source, options);
  }
  void expect_right(BlockFile& file, std::uint64_t offset, std::size_t length) {
    const auto got = file.pread(offset, length);
    const std::size_t want =
        offset >= image.raw.size() ? 0 : std::min<std::size_t>(length, image.raw.size() - offset);
    ASSERT_EQ(got.size(), want);
    if (want == 0) return;
    ASSERT_TRUE(std::equal(got.begin(), got.end(), image.raw.begin() + static_cast<std::ptrdiff_t>(offset)));
  }

  TestImage image;
  TemporaryDirectory directory;
  Cache cache;
  std::shared_ptr<FakeSource> source;
};

TEST(BlockFile, ManyReadersPrefetchAndBackgroundAreRight) {
  Fixture fixture(120);
  auto options = quiet_options();
  options.fetcher.background_fill = true;
  options.fetcher.idle_before_background = 1ms;
  options.trace_path = fixture.directory / "trace";
  const auto file = fixture.open(options);
  file->prefetch(whole_plan(fixture.image));
  std::vector<std::thread> readers;
  for (unsigned reader = 0; reader < 4; ++reader) {
    readers.emplace_back([&, reader] {
      Random random(reader);
      for (int i = 0; i < 300; ++i) {
        fixture.expect_right(*file, random() % (fixture.image.raw.size() + 10), 1 + random() % 100000);
      }
    });
  }
  for (auto& reader : readers) reader.join();
  wait_until([&] { return file->is_complete(); });
  EXPECT_EQ(figure(*file, "errors"), 0U);
  const Trace trace = [&] {
    file->close();
    return Trace::load(options.trace_path);
  }();
  EXPECT_GT(trace.records().size(), 10U);
  EXPECT_EQ(trace.dropped(), 0U);
}

TEST(BlockFile, RightBytesOrAnErrorWhateverTheOriginDoes) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    Fixture fixture(60, {.fail = 0.3, .lie = 0.3}, seed);
    const auto file = fixture.open();
    file->prefetch(whole_plan(fixture.image));
    std::atomic<int> failures{0};
    std::vector<std::thread> readers;
    for (unsigned reader = 0; reader < 3; ++reader) {
      readers.emplace_back([&, reader] {
        Random random(reader + 10 * seed);
        for (int i = 0; i < 80; ++i) {
          try {
            fixture.expect_right(*file, random() % fixture.image.raw.size(), 1 + random() % 50000);
          } catch (const Error& error) {
            EXPECT_TRUE(error.code() == Errc::integrity || error.code() == Errc::backend);
            ++failures;
          }
        }
      });
    }
    for (auto& reader : readers) reader.join();
    fixture.source->set_faults({});
    fixture.expect_right(*file, 0, fixture.image.raw.size());
  }
}

TEST(BlockFile, ADemandReadPromotesThePrefetchItMeets) {
  Fixture fixture;
  const auto file = fixture.open();
  fixture.source->hold(true);
  file->prefetch(whole_plan(fixture.image));
  const auto requests = fixture.source->calls().size();
  ASSERT_GT(requests, 0U);
  std::thread reader([&] { fixture.expect_right(*file, 0, 100); });
  wait_until([&] { return figure(*file, "parked_reads") == 1; });
  EXPECT_EQ(fixture.source->promotions(), 1U);
  EXPECT_EQ(fixture.source->calls().size(), requests);  // nothing new is asked for
  fixture.source->hold(false);
  reader.join();
  EXPECT_EQ(figure(*file, "lateness_count"), 1U);
}

TEST(BlockFile, ManyReadersOfOneChunkCauseOneRequest) {
  Fixture fixture;
  const auto file = fixture.open();
  fixture.source->hold(true);
  std::vector<std::thread> readers;
  for (int i = 0; i < 8; ++i) readers.emplace_back([&] { fixture.expect_right(*file, 10, 100); });
  wait_until([&] { return figure(*file, "parked_reads") == 8; });
  fixture.source->hold(false);
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(fixture.source->calls().size(), 1U);
}

TEST(BlockFile, TwoFilesAtTheSameTimeFetchEachByteOnce) {
  Fixture fixture(80);
  for (int round = 0; round < 3; ++round) {
    const std::string key(64, static_cast<char>('a' + round));
    const auto one_source = std::make_shared<FakeSource>(fixture.image.blob);
    const auto two_source = std::make_shared<FakeSource>(fixture.image.blob);
    BlockFile one(fixture.cache, key, fixture.image.map, one_source, quiet_options());
    BlockFile two(fixture.cache, key, fixture.image.map, two_source, quiet_options());
    one.prefetch(whole_plan(fixture.image));
    two.prefetch(whole_plan(fixture.image));
    std::vector<std::thread> readers;
    for (BlockFile* file : {&one, &two}) {
      readers.emplace_back([&fixture, file] {
        for (std::uint64_t at = 0; at < fixture.image.raw.size(); at += 50000)
          fixture.expect_right(*file, at, 50000);
      });
    }
    for (auto& reader : readers) reader.join();
    // Received as frames; small gaps that are cheaper to receive than to avoid come on top.
    EXPECT_EQ(figure(one, "fetched_bytes") + figure(two, "fetched_bytes"), fixture.image.blob.size());
  }
}

TEST(BlockFile, AFileThatFetchesButNeverDeliversHoldsUpNobody) {
  Fixture fixture;
  const auto stuck_source = std::make_shared<FakeSource>(fixture.image.blob);
  stuck_source->hold(true);
  BlockFile stuck(fixture.cache, fixture.image.key(), fixture.image.map, stuck_source, quiet_options());
  stuck.prefetch(whole_plan(fixture.image));
  ASSERT_FALSE(stuck_source->calls().empty());
  const auto file = fixture.open();
  fixture.expect_right(*file, 0, fixture.image.raw.size());  // after a moment of patience
  stuck.close();
}

TEST(BlockFile, WhatAClosedFileWasFetchingIsTakenOver) {
  Fixture fixture;
  const auto stuck_source = std::make_shared<FakeSource>(fixture.image.blob);
  stuck_source->hold(true);
  auto stuck = std::make_unique<BlockFile>(fixture.cache, fixture.image.key(), fixture.image.map,
                                           stuck_source, quiet_options());
  stuck->prefetch(whole_plan(fixture.image));
  const auto file = fixture.open();
  file->prefetch(whole_plan(fixture.image));
  EXPECT_TRUE(fixture.source->calls().size() < stuck_source->calls().size() + 2);
  stuck->close();
  wait_until([&] { return file->ready_bytes() == fixture.image.raw.size(); });
}

TEST(BlockFile, DeadlineAndClose) {
  Fixture fixture;
  auto options = quiet_options();
  options.fetcher.deadline = 30ms;
  const auto file = fixture.open(options);
  fixture.source->hold(true);
  try {
    file->pread(0, 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::timeout);
  }
  EXPECT_EQ(figure(*file, "error_deadline"), 1U);

  const auto patient = fixture.open();
  std::thread reader([&] { EXPECT_THROW(patient->pread(0, 100000), Error); });
  wait_until([&] { return figure(*patient, "parked_reads") == 1; });
  patient->close();
  reader.join();
  patient->close();  // again: nothing happens
  EXPECT_THROW(patient->pread(0, 10), Error);
}

TEST(BlockFile, ClosingUnderLoadNeverHangs) {
  for (unsigned seed = 1; seed <= 15; ++seed) {
    Fixture fixture(50, {.fail = 0.1, .lie = 0.1}, seed);
    auto options = quiet_options();
    options.fetcher.background_fill = true;
    options.fetcher.idle_before_background = 0ms;
    const auto file = fixture.open(options);
    file->prefetch(whole_plan(fixture.image));
    std::vector<std::thread> readers;
    for (unsigned reader = 0; reader < 3; ++reader) {
      readers.emplace_back([&, reader] {
        Random random(reader);
        for (int i = 0; i < 40; ++i) {
          try {
            fixture.expect_right(*file, random() % fixture.image.raw.size(), 5000);
          } catch (const Error&) {
          }
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(seed * 300));
    file->close();
    for (auto& reader : readers) reader.join();
  }
}

TEST(BlockFile, TryReadAnswersOnlyFromLocalBytes) {
  Fixture fixture;
  const auto file = fixture.open();
  std::vector<std::byte> scratch(4096);
  iovec out{};
  EXPECT_EQ(file->try_read(0, 4096, {}, scratch, out), -EAGAIN);
  EXPECT_TRUE(fixture.source->calls().empty());
  fixture.expect_right(*file, 0, 1);
  // The reader is answered before the disk has the chunk, so it may take a moment.
  wait_until([&] { return file->try_read(0, 4096, {}, scratch, out) == 4096; });
  EXPECT_EQ(out.iov_len, 4096U);
  EXPECT_TRUE(std::equal(scratch.begin(), scratch.end(), fixture.image.raw.begin()));
  EXPECT_EQ(file->try_read(fixture.image.raw.size(), 4096, {}, scratch, out), 0);
  EXPECT_EQ(file->try_read(~std::uint64_t{0} - 5, 4096, {}, scratch, out), 0);
}

TEST(BlockFile, ReadsThatBecomeUnreadableComeFromTheOriginAgain) {
  Fixture fixture;
  const auto file = fixture.open();
  fixture.expect_right(*file, 0, fixture.image.raw.size());
  wait_until([&] { return file->is_complete(); });
  // Somebody cuts the data file: the disk cannot give the bytes any more.
  ASSERT_EQ(::truncate(file->local_path().c_str(), 4096), 0);
  fixture.expect_right(*file, 0, fixture.image.raw.size());
  EXPECT_GT(figure(*file, "fallback_cache_corrupt"), 0U);
  fixture.expect_right(*file, 0, fixture.image.raw.size());
}

TEST(BlockFile, EmptyImage) {
  Fixture fixture;
  const auto map = std::make_shared<const ChunkMap>(0, 0, 0, sha256({}), std::vector<Chunk>{});
  BlockFile file(fixture.cache, std::string(64, '0'), map, fixture.source, quiet_options());
  EXPECT_TRUE(file.pread(0, 100).empty());
  EXPECT_TRUE(file.is_complete());
}

}  // namespace
}  // namespace bootseer
