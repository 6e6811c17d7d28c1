#include "bootseer/cache.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <random>

#include "bootseer/cache_log.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/read_whole_file.hpp"
#include "test_image.hpp"

namespace bootseer {
namespace {

std::span<const std::byte> raw_of(const TestImage& image, std::uint32_t chunk) {
  const Chunk& entry = image.map->chunk(chunk);
  return std::span(image.raw).subspan(static_cast<std::size_t>(entry.raw_offset), entry.raw_bytes);
}

std::vector<std::byte> read_chunk(CacheBlob& blob, const TestImage& image, std::uint32_t chunk) {
  std::vector<std::byte> bytes(image.map->chunk(chunk).raw_bytes);
  EXPECT_TRUE(blob.read(image.map->chunk(chunk).raw_offset, bytes));
  return bytes;
}

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

std::unique_ptr<CacheBlob> open(const TemporaryDirectory& directory, const TestImage& image) {
  return std::make_unique<CacheBlob>(directory.path(), image.map);
}

TEST(CacheLog, ReplayFollowsARandomHistory) {
  Random random(7);
  constexpr std::uint32_t kChunks = 20;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> log;
    // The model: for each prefix, what is claimed and what is proven.
    struct State {
      std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> claims;  // chunk: (record, crc)
      std::uint32_t durable = 0;
    };
    std::vector<State> history(1);
    for (std::uint32_t record = 0; record < 60; ++record) {
      State state = history.back();
      const std::uint32_t chunk = random() % kChunks;
      cache_log::Record bytes;
      switch (random() % 4) {
        case 0:
          bytes = cache_log::make_record(cache_log::kDropped, chunk, 0);
          state.claims.erase(chunk);
          break;
        case 1: {
          const std::uint32_t upto = record == 0 ? 0 : random() % (record + 1);
          bytes = cache_log::make_record(cache_log::kDurable, upto, 0);
          state.durable = std::max(state.durable, upto);
          break;
        }
        default:
          bytes = cache_log::make_record(cache_log::kReady, chunk, record * 3);
          state.claims[chunk] = {record, record * 3};
      }
      log.insert(log.end(), bytes.begin(), bytes.end());
      history.push_back(state);
    }
    const std::size_t cut = random() % (log.size() + 1);
    auto torn = std::vector<std::byte>(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(cut));
    if (random() % 2 == 0 && cut % 16 != 0) torn.resize(cut / 16 * 16 + 16);  // the rest of a record is zeros
    cache_log::Replay replay(kChunks);
    EXPECT_EQ(replay.apply(torn), cut / 16 * 16);
    const State& expected = history[cut / 16];
    for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const auto claim = expected.claims.find(chunk);
      ASSERT_EQ(replay.is_claimed(chunk), claim != expected.claims.end());
      if (claim == expected.claims.end()) continue;
      EXPECT_EQ(replay.claims()[chunk].data_crc, claim->second.second);
      EXPECT_EQ(replay.is_proven(chunk), claim->second.first < expected.durable);
    }
  }
}

TEST(CacheLog, StopsAtRecordsThatCannotBe) {
  for (const auto& bad :
       {cache_log::make_record(cache_log::kReady, 5, 0),    // no such chunk
        cache_log::make_record(cache_log::kDurable, 1, 0),  // vouches for the future
        cache_log::make_record(static_cast<cache_log::Kind>(9), 0, 0), cache_log::Record{}}) {
    cache_log::Replay replay(5);
    EXPECT_EQ(replay.apply(bad), 0U);
  }
}

TEST(CacheBlob, StoresAndFindsAgain) {
  const TestImage image = make_test_image(30);
  const TemporaryDirectory directory;
  {
    const auto blob = open(directory, image);
    EXPECT_FALSE(blob->is_complete());
    for (std::uint32_t i = 0; i < image.map->count(); ++i) {
      EXPECT_EQ(blob->is_ready(i), image.map->chunk(i).is_zeros());
      EXPECT_TRUE(blob->put(i, raw_of(image, i)));
      EXPECT_TRUE(equal(read_chunk(*blob, image, i), raw_of(image, i)));
    }
    EXPECT_TRUE(blob->is_complete());
    EXPECT_EQ(blob->present_bytes(), image.raw.size());
  }
  const auto blob = open(directory, image);
  EXPECT_TRUE(blob->is_complete());  // closing made it durable
  for (std::uint32_t i = 0; i < image.map->count(); ++i) {
    EXPECT_TRUE(blob->is_present(i));
    EXPECT_TRUE(blob->prove(i));
    EXPECT_TRUE(blob->is_ready(i));
  }
  EXPECT_EQ(blob->statistics().corrupt_chunks, 0U);
}

// Random operations, then a crash: any prefix of the log, and data written after the last sync lost at
// random. Whatever is proved afterwards must be right, and what was durable must still be there.
TEST(CacheBlob, CrashAtAnyPointAgainstAModel) {
  const TestImage image = make_test_image(25, 3);
  Random random(99);
  for (int round = 0; round < 60; ++round) {
    const TemporaryDirectory directory;
    std::vector<bool> durable(image.map->count());
    std::size_t durable_log_bytes = 0;
    std::vector<std::byte> synced_data(image.raw.size());
    const std::string log_path = directory / "ready.log";
    const std::string data_path = directory / "data";
    std::vector<std::byte> log;
    std::vector<std::byte> data;
    {
      const auto blob = open(directory, image);
      std::vector<bool> put(image.map->count());
      for (std::uint32_t step = 0, steps = random() % 60; step < steps; ++step) {
        const std::uint32_t chunk = random() % image.map->count();
        if (random() % 12 == 0) {
          blob->sync();
          durable = put;
          durable_log_bytes = read_whole_file(log_path, 1 << 20).size();
          synced_data = read_whole_file(data_path, 1 << 24);
        } else if (random() % 12 == 1) {
          blob->drop(chunk);
          put[chunk] = durable[chunk] = false;
        } else {
          ASSERT_TRUE(blob->put(chunk, raw_of(image, chunk)));
          put[chunk] = true;
        }
      }
      log = read_whole_file(log_path, 1 << 20);
      data = read_whole_file(data_path, 1 << 24);
    }
    // Power cut. The log keeps at least what was synced; each unsynced page of data may or may not have made
    // it.
    log.resize(durable_log_bytes + random() % (log.size() - durable_log_bytes + 1));
    for (std::size_t page = 0; page < data.size(); page += 4096) {
      const std::size_t length = std::min<std::size_t>(4096, data.size() - page);
      if (random() % 2 == 0) std::memcpy(&data[page], &synced_data[page], length);
    }
    write_file(log_path, log);
    write_file(data_path, data);
    const auto blob = open(directory, image);
    for (std::uint32_t i = 0; i < image.map->count(); ++i) {
      EXPECT_TRUE(!durable[i] || blob->is_present(i)) << i;
      const bool proved = blob->prove(i);
      EXPECT_TRUE(!durable[i] || proved) << i;
      EXPECT_TRUE(!proved || equal(read_chunk(*blob, image, i), raw_of(image, i))) << i;
    }
  }
}

TEST(CacheBlob, DamageIsFoundWhetherProvenOrNot) {
  const TestImage image = make_test_image(10);
  for (const bool is_proven : {true, false}) {
    const TemporaryDirectory directory;
    {
      const auto blob = open(directory, image);
      for (std::uint32_t i = 0; i < image.map->count(); ++i) blob->put(i, raw_of(image, i));
    }
    if (!is_proven) {  // cut off the durable marker
      auto log = read_whole_file(directory / "ready.log", 1 << 20);
      log.resize(log.size() - cache_log::kRecordBytes);
      write_file(directory / "ready.log", log);
    }
    auto data = image.raw;
    data[static_cast<std::size_t>(image.map->chunk(2).raw_offset) + 9] ^= std::byte{1};
    write_file(directory / "data", data);
    const auto blob = open(directory, image);
    EXPECT_FALSE(blob->prove(2));
    EXPECT_FALSE(blob->is_present(2));
    EXPECT_TRUE(blob->prove(1));
    EXPECT_EQ(blob->statistics().corrupt_chunks, 1U);
  }
}

TEST(CacheBlob, ProvingMakesItDurable) {
  const TestImage image = make_test_image(10);
  const TemporaryDirectory directory;
  {
    const auto blob = open(directory, image);
    blob->put(0, raw_of(image, 0));
  }
  auto log = read_whole_file(directory / "ready.log", 1 << 20);
  log.resize(cache_log::kHeaderBytes + 7);  // the record is lost, the data is not
  write_file(directory / "ready.log", log);
  {
    const auto blob = open(directory, image);
    EXPECT_EQ(blob->statistics().log_dropped_bytes, 7U);
    EXPECT_TRUE(blob->is_present(0));
    EXPECT_TRUE(blob->prove(0));
  }
  cache_log::Replay replay(image.map->count());
  log = read_whole_file(directory / "ready.log", 1 << 20);
  EXPECT_EQ(replay.apply(std::span(log).subspan(cache_log::kHeaderBytes)),
            log.size() - cache_log::kHeaderBytes);
  EXPECT_TRUE(replay.is_proven(0));
}

TEST(CacheBlob, SeesWhatAnotherWriterRecords) {
  const TestImage image = make_test_image(20);
  const TemporaryDirectory directory;
  const auto one = open(directory, image);
  const auto two = open(directory, image);
  one->put(0, raw_of(image, 0));
  EXPECT_FALSE(two->is_present(0));
  EXPECT_TRUE(two->refresh());
  EXPECT_TRUE(two->prove(0));
  EXPECT_FALSE(two->refresh());
  two->put(1, raw_of(image, 1));
  EXPECT_FALSE(two->refresh());  // its own record is no news
  one->put(2, raw_of(image, 2));
  two->sync();  // learns on the way
  EXPECT_TRUE(two->prove(2));
  EXPECT_TRUE(one->refresh());
  EXPECT_TRUE(one->prove(1));
  one->close();
  two->close();
  const auto again = open(directory, image);
  EXPECT_EQ(again->statistics().log_dropped_bytes, 0U);
  for (std::uint32_t i : {0U, 1U, 2U}) EXPECT_TRUE(again->prove(i));
}

TEST(CacheBlob, SyncWritesNoMarkerWhenNothingIsNew) {
  const TestImage image = make_test_image(10);
  const TemporaryDirectory directory;
  const auto blob = open(directory, image);
  blob->put(0, raw_of(image, 0));
  blob->sync();
  const auto size = read_whole_file(directory / "ready.log", 1 << 20).size();
  for (int i = 0; i < 5; ++i) blob->sync();
  EXPECT_EQ(read_whole_file(directory / "ready.log", 1 << 20).size(), size);
}

TEST(CacheBlob, ALongLogIsRewritten) {
  const TestImage image = make_test_image(10);
  const TemporaryDirectory directory;
  {
    const auto blob = open(directory, image);
    for (int i = 0; i < 2000; ++i) {
      blob->put(0, raw_of(image, 0));
      blob->drop(0);
    }
    blob->put(1, raw_of(image, 1));
  }
  { const auto blob = open(directory, image); }
  EXPECT_LT(read_whole_file(directory / "ready.log", 1 << 20).size(), 1024U);
  const auto blob = open(directory, image);
  EXPECT_FALSE(blob->is_present(0));
  EXPECT_TRUE(blob->prove(1));
}

TEST(CacheBlob, ACutFileIsNoticedBeforeTheNextWriteHidesIt) {
  const TestImage image = make_test_image(11);
  const TemporaryDirectory directory;
  const auto blob = open(directory, image);
  const std::uint32_t last = image.map->count() - 1;
  for (std::uint32_t i = 0; i < last; ++i) ASSERT_TRUE(blob->put(i, raw_of(image, i)));
  ASSERT_EQ(::truncate(blob->data_path().c_str(), 0), 0);
  ASSERT_TRUE(blob->put(last, raw_of(image, last)));
  for (std::uint32_t i = 0; i < last; ++i) {
    EXPECT_TRUE(image.map->chunk(i).is_zeros() || !blob->prove(i)) << i;
  }
  EXPECT_TRUE(blob->is_ready(last));
}

TEST(CacheBlob, AnotherMapInUseIsRefused) {
  const TestImage image = make_test_image(10);
  const TestImage other = make_test_image(10, 2);
  const TemporaryDirectory directory;
  auto blob = open(directory, image);
  blob->put(0, raw_of(image, 0));
  EXPECT_THROW(open(directory, other), Error);
  blob.reset();
  const auto changed = open(directory, other);
  for (std::uint32_t i = 0; i < other.map->count(); ++i) {
    EXPECT_TRUE(!changed->prove(i) || equal(read_chunk(*changed, other, i), raw_of(other, i)));
  }
}

TEST(Cache, SyncsFromTimeToTime) {
  const TestImage image = make_test_image(10);
  const TemporaryDirectory directory;
  Cache cache(directory.path(), 0.01);
  const auto blob = cache.open_blob(image.key(), image.map);
  blob->put(0, raw_of(image, 0));
  const std::string log_path = directory / ("blobs/" + image.key() + "/ready.log");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  bool is_proven = false;
  while (!is_proven && std::chrono::steady_clock::now() < deadline) {
    const auto log = read_whole_file(log_path, 1 << 20);
    cache_log::Replay replay(image.map->count());
    replay.apply(std::span(log).subspan(cache_log::kHeaderBytes));
    is_proven = replay.is_claimed(0) && replay.is_proven(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(is_proven);
  EXPECT_THROW(cache.open_blob("../evil", image.map), Error);
}

}  // namespace
}  // namespace bootseer
