#include "bootseer/request_planner.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "bootseer/pacer.hpp"
#include "test_image.hpp"

namespace bootseer {
namespace {

// `count` stored chunks of 8 KiB.
std::shared_ptr<const ChunkMap> even_map(std::uint32_t count) {
  std::vector<Chunk> chunks;
  for (std::uint32_t i = 0; i < count; ++i) {
    Digest digest{};
    digest[0] = static_cast<std::uint8_t>(i);
    digest[1] = static_cast<std::uint8_t>(i >> 8);
    chunks.push_back({i * 8192ULL, i * 8192ULL, 8192, 8192, digest});
  }
  return std::make_shared<ChunkMap>(count * 8192ULL, 0, count * 8192ULL, Digest{}, chunks);
}

TEST(FrameIndex, FramesAreDisjointAndHoldTheirChunks) {
  const TestImage image = make_test_image(60);
  const FrameIndex index(*image.map);
  std::size_t members = 0;
  for (std::uint32_t frame = 0; frame < index.count(); ++frame) {
    EXPECT_TRUE(frame == 0 || index[frame].blob_offset >= index[frame - 1].blob_end());
    for (const std::uint32_t chunk : index.members(frame)) {
      EXPECT_EQ(image.map->chunk(chunk).blob_offset, index[frame].blob_offset);
      EXPECT_EQ(index.of(chunk), frame);
      ++members;
    }
  }
  for (std::uint32_t chunk = 0; chunk < image.map->count(); ++chunk) {
    if (image.map->chunk(chunk).is_zeros()) {
      EXPECT_EQ(index.of(chunk), FrameIndex::kNone);
      ++members;
    }
  }
  EXPECT_EQ(members, image.map->count());
}

TEST(Coalesce, JoinsNeighboursAndSmallGapsUpToTheLimit) {
  const auto map = even_map(100);
  const FrameIndex index(*map);
  const auto ranges = coalesce(index, {50, 1, 0, 2, 6, 12, 51}, 64 * 1024);
  ASSERT_EQ(ranges.size(), 3U);
  EXPECT_EQ(ranges[0].frames, (std::vector<std::uint32_t>{0, 1, 2, 6}));  // 24 KiB of gap
  EXPECT_EQ(ranges[0].length, 7U * 8192);
  EXPECT_EQ(ranges[1].frames, (std::vector<std::uint32_t>{12}));  // 40 KiB
  EXPECT_EQ(ranges[2].frames, (std::vector<std::uint32_t>{50, 51}));
}

TEST(RequestPlanner, AsksForEachPlannedFrameOnceAndRoughlyInOrder) {
  const auto map = even_map(500);
  const FrameIndex index(*map);
  Random random(5);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint32_t> plan;
    std::set<std::uint32_t> left;
    for (int i = 0; i < 200; ++i) plan.push_back(random() % 500);
    left.insert(plan.begin(), plan.end());
    std::set<std::uint32_t> present;
    while (present.size() < 50) present.insert(random() % 500);
    for (const auto frame : present) left.erase(frame);
    RequestPlanner planner(index);
    planner.set_plan(plan);
    const auto is_wanted = [&](std::uint32_t frame) { return !present.contains(frame); };
    constexpr std::uint64_t kLookahead = 20 * 8192;
    while (true) {
      std::size_t cursor = 0;  // the earliest frame that is still due
      while (cursor < plan.size() && present.contains(plan[cursor])) ++cursor;
      const RangePlan range = planner.next(is_wanted, 10 * 8192, kLookahead);
      if (range.frames.empty()) break;
      EXPECT_LE(range.length, 10U * 8192);
      EXPECT_NE(std::find(range.frames.begin(), range.frames.end(), plan[cursor]), range.frames.end());
      for (const auto frame : range.frames) {
        EXPECT_EQ(left.erase(frame), 1U);
        present.insert(frame);
        EXPECT_GE(index[frame].blob_offset, range.offset);
        EXPECT_LE(index[frame].blob_end(), range.offset + range.length);
      }
    }
    EXPECT_TRUE(left.empty());
    EXPECT_TRUE(planner.is_done());
  }
}

TEST(RequestPlanner, RevisitsWhatFailedAndDropsWhatIsHopeless) {
  const auto map = even_map(50);
  const FrameIndex index(*map);
  RequestPlanner planner(index);
  planner.set_plan(std::vector<std::uint32_t>{40, 10, 20});
  const auto always = [](std::uint32_t) { return true; };
  EXPECT_EQ(planner.next(always, 8192, 0).frames, (std::vector<std::uint32_t>{40}));
  EXPECT_EQ(planner.next(always, 8192, 0).frames, (std::vector<std::uint32_t>{10}));
  planner.revisit(40);
  planner.give_up(10);
  EXPECT_EQ(planner.next(always, 8192, 0).frames, (std::vector<std::uint32_t>{40}));
  EXPECT_EQ(planner.next(always, 8192, 0).frames, (std::vector<std::uint32_t>{20}));
  EXPECT_TRUE(planner.next(always, 8192, 0).frames.empty());
}

TEST(RequestPlanner, BackgroundTakesTheRestInBlobOrder) {
  const auto map = even_map(40);
  const FrameIndex index(*map);
  RequestPlanner planner(index);
  std::set<std::uint32_t> present = {0, 5, 6, 30};
  const auto is_wanted = [&](std::uint32_t frame) { return !present.contains(frame); };
  std::uint32_t last = 0;
  while (true) {
    const RangePlan range = planner.next_background(is_wanted, 4 * 8192);
    if (range.frames.empty()) break;
    EXPECT_EQ(range.length, range.frames.size() * 8192);
    EXPECT_GT(range.frames.front(), last);
    last = range.frames.back();
    present.insert(range.frames.begin(), range.frames.end());
  }
  EXPECT_EQ(present.size(), 40U);
  EXPECT_TRUE(planner.is_background_done());
}

// A link of a given bandwidth and delay, kept busy with the window the pacer asks for.
std::uint64_t window_on(double bytes_per_s, std::int64_t delay_ns) {
  Pacer pacer;
  std::int64_t now_ns = 1;
  pacer.first_byte(delay_ns);
  for (int i = 0; i < 2000; ++i) {
    const double by_window = static_cast<double>(pacer.window_bytes()) * 1e9 / static_cast<double>(delay_ns);
    const double rate = std::min(bytes_per_s, by_window);
    now_ns += 5'000'000;
    pacer.received(static_cast<std::uint64_t>(rate * 0.005), now_ns, true);
  }
  return pacer.window_bytes();
}

TEST(Pacer, FindsAWindowThatFillsTheLinkAndLittleMore) {
  for (const double bytes_per_s : {12.5e6, 125e6}) {
    for (const std::int64_t delay_ns : {2'000'000LL, 20'000'000LL}) {
      const double bdp = bytes_per_s * static_cast<double>(delay_ns) / 1e9;
      const auto window = static_cast<double>(window_on(bytes_per_s, delay_ns));
      EXPECT_GE(window, 1.5 * bdp);
      EXPECT_LE(window, std::max({2.1 * bdp, bytes_per_s * 0.032, 512.0 * 1024}));
    }
  }
}

TEST(Pacer, AnUnsaturatedLinkDoesNotLowerTheEstimate) {
  Pacer pacer;
  pacer.first_byte(2'000'000);
  std::int64_t now_ns = 1;
  for (int i = 0; i < 100; ++i) pacer.received(1'250'000, now_ns += 10'000'000, true);
  const double before = pacer.bytes_per_s();
  EXPECT_NEAR(before, 125e6, 1e6);
  for (int i = 0; i < 100; ++i) pacer.received(1'000, now_ns += 10'000'000, false);
  EXPECT_EQ(pacer.bytes_per_s(), before);
  pacer.idle();
  for (int i = 0; i < 300; ++i) pacer.received(125'000, now_ns += 10'000'000, true);
  EXPECT_NEAR(pacer.bytes_per_s(), 12.5e6, 1e6);
}

}  // namespace
}  // namespace bootseer
