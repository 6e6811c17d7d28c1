#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <bootseer/error.hpp>
#include <bootseer/local_file.hpp>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace bootseer {
namespace {

class LocalFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "local-file-XXXXXX").string();
    const UniqueFd fd(::mkstemp(pattern.data()));
    ASSERT_TRUE(fd);
    path_ = pattern;
    ASSERT_EQ(::write(fd.get(), kText.data(), kText.size()), static_cast<ssize_t>(kText.size()));
  }
  void TearDown() override { std::filesystem::remove(path_); }

  static std::string read(LocalFile& file, std::uint64_t offset, std::size_t length, ssize_t& result) {
    std::vector<std::byte> scratch(length);
    iovec view{};
    result = file.try_read(offset, length, {}, scratch, view);
    return result > 0 ? std::string(static_cast<const char*>(view.iov_base), view.iov_len) : "";
  }

  static constexpr std::string_view kText = "0123456789";
  std::string path_;
};

TEST_F(LocalFileTest, ReadsWithinAcrossAndPastTheEnd) {
  LocalFile file(path_, false);
  ssize_t result = 0;
  EXPECT_EQ(file.size(), kText.size());
  EXPECT_EQ(read(file, 2, 3, result), "234");
  EXPECT_EQ(read(file, 8, 5, result), "89");
  EXPECT_EQ(result, 2);
  read(file, 10, 5, result);
  EXPECT_EQ(result, 0);
  read(file, ~std::uint64_t{0}, 5, result);
  EXPECT_EQ(result, 0);
}

TEST_F(LocalFileTest, ShrunkFileIsAnError) {
  LocalFile file(path_, false);
  ASSERT_EQ(::truncate(path_.c_str(), 4), 0);
  ssize_t result = 0;
  EXPECT_EQ(read(file, 0, 4, result), "0123");
  read(file, 0, 6, result);
  EXPECT_EQ(result, -EIO);
}

TEST_F(LocalFileTest, OffersItsDescriptorOnlyWhenAsked) {
  EXPECT_EQ(LocalFile(path_, false).backing_fd(), -1);
  EXPECT_GE(LocalFile(path_, true).backing_fd(), 0);
}

TEST_F(LocalFileTest, OtherThingsAreRefused) {
  EXPECT_THROW(LocalFile("/nonexistent/file", false), std::system_error);
  EXPECT_THROW(LocalFile("/", false), Error);
}

class StringReply final : public ReadReply {
 public:
  StringReply(std::string& bytes, int& failure) : bytes_(bytes), failure_(failure) {}
  void data(std::span<const iovec> parts) noexcept override {
    for (const auto& part : parts) bytes_.append(static_cast<const char*>(part.iov_base), part.iov_len);
  }
  void error(int errno_value) noexcept override { failure_ = errno_value; }

 private:
  std::string& bytes_;
  int& failure_;
};

TEST_F(LocalFileTest, ReadAnswersToo) {
  LocalFile file(path_, false);
  std::string bytes;
  int failure = 0;
  file.read(7, 100, {}, std::make_unique<StringReply>(bytes, failure));
  EXPECT_EQ(bytes, "789");
  ASSERT_EQ(::truncate(path_.c_str(), 4), 0);
  file.read(7, 100, {}, std::make_unique<StringReply>(bytes, failure));
  EXPECT_EQ(failure, EIO);
}

}  // namespace
}  // namespace bootseer
