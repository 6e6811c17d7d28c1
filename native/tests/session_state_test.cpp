#include <gtest/gtest.h>

#include <bootseer/error.hpp>
#include <bootseer/fuse_abi.hpp>
#include <bootseer/session_mount.hpp>
#include <bootseer/session_state.hpp>
#include <cstring>
#include <filesystem>
#include <string>

namespace bootseer {
namespace {

class SessionStateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "session-state-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string path(const char* name) const { return directory_ / name; }

 private:
  std::filesystem::path directory_;
};

std::vector<std::byte> some_bytes(std::size_t size, int first) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

TEST_F(SessionStateTest, InitRecordComesBack) {
  EXPECT_FALSE(InitRecord::load(path("init")));
  InitRecord{some_bytes(104, 1), some_bytes(80, 7)}.save(path("init"));
  InitRecord{some_bytes(104, 2), some_bytes(80, 8)}.save(path("init"));
  const auto loaded = InitRecord::load(path("init"));
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->request, some_bytes(104, 2));
  EXPECT_EQ(loaded->reply, some_bytes(80, 8));
}

TEST_F(SessionStateTest, DamagedInitRecordIsNoticed) {
  const auto good = InitRecord{some_bytes(104, 1), some_bytes(80, 7)}.serialize();
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_THROW(InitRecord::parse(std::span(good).first(size)), Error);
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    auto bad = good;
    bad[at] ^= std::byte{0x40};
    EXPECT_THROW(InitRecord::parse(bad), Error) << "byte " << at;
  }
}

void put_request(Journal& journal, int slot, std::uint32_t bytes, std::uint64_t unique) {
  fuse::InHeader header{};
  header.len = bytes;
  header.unique = unique;
  std::memcpy(journal.slot(slot).data(), &header, sizeof(header));
}

TEST_F(SessionStateTest, JournalKeepsUnansweredRequests) {
  {
    Journal journal(path("journal"), 4);
    const int first = journal.acquire();
    const int second = journal.acquire();
    const int third = journal.acquire();
    put_request(journal, first, 80, 11);
    put_request(journal, second, 80, 12);
    put_request(journal, third, 9000, 13);
    journal.release(second);
  }
  Journal journal(path("journal"), 4);
  const auto pending = journal.pending();
  ASSERT_EQ(pending.size(), 2U);
  EXPECT_EQ(pending[0].bytes + pending[1].bytes, 80U + 9000U);
  // Their slots are taken until they are released; the two others are free.
  EXPECT_NE(journal.acquire(), Journal::kNoSlot);
  EXPECT_NE(journal.acquire(), Journal::kNoSlot);
  EXPECT_EQ(journal.acquire(), Journal::kNoSlot);
  for (const auto& entry : pending) journal.release(entry.slot);
  EXPECT_TRUE(journal.pending().empty());
  EXPECT_NE(journal.acquire(), Journal::kNoSlot);
}

TEST_F(SessionStateTest, JournalIgnoresWhatIsNoRequest) {
  {
    Journal journal(path("journal"), 4);
    put_request(journal, 0, 39, 5);  // shorter than a header
    put_request(journal, 1, 80, 0);  // a forget: nobody waits
  }
  EXPECT_TRUE(Journal(path("journal"), 4).pending().empty());
  // Another size: an unknown format, started afresh.
  EXPECT_TRUE(Journal(path("journal"), 8).pending().empty());
}

TEST_F(SessionStateTest, AllOpensOfANodeHaveOneMode) {
  OpenTable opens("", 4);
  const auto passthrough = [] { return OpenTable::Mode{true, 7}; };
  const auto never = []() -> OpenTable::Mode { throw std::logic_error("asked again"); };
  EXPECT_EQ(opens.open(100, passthrough).backing_id, 7);
  EXPECT_EQ(opens.open(100, never).backing_id, 7);
  EXPECT_TRUE(opens.is_passthrough(100));
  EXPECT_FALSE(opens.close(100));
  EXPECT_EQ(opens.close(100), 7);
  EXPECT_FALSE(opens.is_passthrough(100));
  EXPECT_FALSE(opens.close(100));  // unknown: nothing to close

  EXPECT_FALSE(opens.open(100, [] { return OpenTable::Mode{}; }).passthrough);
  EXPECT_FALSE(opens.open(100, passthrough).passthrough);
  EXPECT_FALSE(opens.close(100));
  EXPECT_FALSE(opens.close(100));
  EXPECT_TRUE(opens.open(100, passthrough).passthrough);
}

TEST_F(SessionStateTest, OpenModesOutliveTheProcess) {
  {
    OpenTable opens(path("opens"), 4);
    opens.open(100, [] { return OpenTable::Mode{true, 7}; });
    opens.open(101, [] { return OpenTable::Mode{}; });
    opens.open(102, [] { return OpenTable::Mode{true, 8}; });
    opens.close(102);
  }
  OpenTable opens(path("opens"), 4);
  EXPECT_EQ(opens.size(), 2U);
  EXPECT_TRUE(opens.is_passthrough(100));
  EXPECT_FALSE(opens.open(101, [] { return OpenTable::Mode{true, 9}; }).passthrough);
  EXPECT_EQ(opens.close(100), 7);
}

TEST_F(SessionStateTest, AFullOpenTableEndsPassthrough) {
  OpenTable opens(path("opens"), 2);
  const auto passthrough = [] { return OpenTable::Mode{true, 7}; };
  EXPECT_TRUE(opens.open(1, passthrough).passthrough);
  EXPECT_TRUE(opens.open(2, passthrough).passthrough);
  EXPECT_FALSE(opens.open(3, passthrough).passthrough);  // not tracked
  EXPECT_EQ(opens.close(1), 7);
  EXPECT_FALSE(opens.open(3, passthrough).passthrough);  // its first open may still be there
  EXPECT_FALSE(OpenTable(path("opens"), 2).open(4, passthrough).passthrough);
}

TEST(SessionMount, FindsTheTopmostMount) {
  const std::string mountinfo =
      "22 1 253:0 / / rw - ext4 /dev/vda rw\n"
      "30 22 0:40 / /mnt/a rw shared:1 - fuse.bootseer bootseer rw\n"
      "31 22 0:41 / /mnt/with\\040blank rw - fuse.bootseer bootseer rw\n"
      "32 30 0:42 / /mnt/a rw - fuse.bootseer bootseer rw\n"
      "garbage\n"
      "33 22 x:y / /mnt/a rw\n";
  ASSERT_TRUE(find_mount(mountinfo, "/mnt/a"));
  EXPECT_EQ(find_mount(mountinfo, "/mnt/a")->minor, 42U);
  EXPECT_EQ(find_mount(mountinfo, "/mnt/with blank")->minor, 41U);
  EXPECT_EQ(find_mount(mountinfo, "/")->major, 253U);
  EXPECT_FALSE(find_mount(mountinfo, "/mnt"));
}

}  // namespace
}  // namespace bootseer
