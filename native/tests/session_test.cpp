// A session between a scripted kernel and a scripted control peer; both are sockets that the test holds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bootseer/error.hpp>
#include <bootseer/fuse_abi.hpp>
#include <bootseer/local_file.hpp>
#include <bootseer/session.hpp>
#include <bootseer/session_wire.hpp>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace bootseer {
namespace {

using Message = std::vector<std::byte>;
constexpr int kDeadlineMs = 20000;
constexpr std::uint64_t kNode = 42;
constexpr std::size_t kFileBytes = 3 << 20;

template <class... Parts>
Message join(const Parts&... parts) {
  Message all;
  const auto add = [&](const auto& part) {
    const auto bytes = std::as_bytes(std::span(&part, 1));
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  (add(parts), ...);
  return all;
}

std::byte byte_at(std::uint64_t offset) {
  return static_cast<std::byte>((offset * 2654435761U) >> 13);
}

// One end of a socket pair that carries whole messages.
class Wire {
 public:
  explicit Wire(int fd) : fd_(fd) {}
  void send(const Message& message) const {
    ASSERT_EQ(::send(fd_.get(), message.data(), message.size(), 0), static_cast<ssize_t>(message.size()));
  }
  // The next message; fails the test when none comes.
  Message receive() const {
    pollfd poll_fd{fd_.get(), POLLIN, 0};
    if (::poll(&poll_fd, 1, kDeadlineMs) != 1) {
      ADD_FAILURE() << "no message came";
      return Message(64);
    }
    const ssize_t got = ::recv(fd_.get(), buffer_->data(), buffer_->size(), 0);
    return Message(buffer_->begin(), buffer_->begin() + std::max<ssize_t>(got, 0));
  }
  bool is_silent(int for_ms = 150) const {
    pollfd poll_fd{fd_.get(), POLLIN, 0};
    return ::poll(&poll_fd, 1, for_ms) == 0;
  }
  void close() { fd_.reset(); }

 private:
  UniqueFd fd_;
  std::unique_ptr<std::array<std::byte, 2 << 20>> buffer_ =
      std::make_unique<std::array<std::byte, 2 << 20>>();
};

struct Reply {
  fuse::OutHeader header;
  Message body;
};

Reply parse_reply(const Message& message) {
  const auto header = fuse::body_as<fuse::OutHeader>(message);
  EXPECT_TRUE(header);
  if (!header) return {};
  EXPECT_EQ(header->len, message.size());
  return {*header, Message(message.begin() + sizeof(fuse::OutHeader), message.end())};
}

// A file whose reads the test answers by hand.
class ScriptedFile final : public ReadFile {
 public:
  struct Waiting {
    std::uint64_t offset;
    std::size_t length;
    std::unique_ptr<ReadReply> reply;
  };

  std::uint64_t size() const noexcept override { return kFileBytes; }
  ssize_t try_read(std::uint64_t offset, std::size_t length, const ReadContext&, std::span<std::byte> scratch,
                   iovec& out) noexcept override {
    if (const int failure = failure_.load(); failure != 0) return -failure;
    if (offset >= kFileBytes) return 0;
    length = std::min<std::size_t>(length, kFileBytes - offset);
    for (std::size_t i = 0; i < length; ++i) scratch[i] = byte_at(offset + i);
    out = {scratch.data(), length};
    return static_cast<ssize_t>(length);
  }
  void read(std::uint64_t offset, std::size_t length, const ReadContext&,
            std::unique_ptr<ReadReply> reply) noexcept override {
    const std::lock_guard lock(mutex_);
    waiting_.push_back({offset, length, std::move(reply)});
    changed_.notify_all();
  }

  void fail_with(int errno_value) { failure_ = errno_value; }
  void miss(bool misses) { failure_ = misses ? EAGAIN : 0; }
  Waiting next() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::milliseconds(kDeadlineMs), [&] { return !waiting_.empty(); }));
    Waiting first = std::move(waiting_.front());
    waiting_.erase(waiting_.begin());
    return first;
  }
  static void answer(Waiting waiting) {
    Message bytes(waiting.length);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(waiting.offset + i);
    // In two parts, as a file made of chunks does.
    const std::array<iovec, 2> parts = {
        iovec{bytes.data(), bytes.size() / 3},
        iovec{bytes.data() + bytes.size() / 3, bytes.size() - bytes.size() / 3}};
    waiting.reply->data(parts);
  }

 private:
  std::atomic<int> failure_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Waiting> waiting_;
};

std::pair<UniqueFd, int> make_device() {
  std::array<int, 2> pair{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
  const int bytes = 4 << 20;
  for (const int fd : pair) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  return {UniqueFd(pair[0]), pair[1]};
}

Message request(std::uint32_t opcode, std::uint64_t unique, const Message& body, std::uint64_t nodeid = kNode,
                std::uint32_t pid = 0) {
  fuse::InHeader header{};
  header.len = static_cast<std::uint32_t>(sizeof(header) + body.size());
  header.opcode = opcode;
  header.unique = unique;
  header.nodeid = nodeid;
  header.pid = pid;
  auto message = join(header);
  message.insert(message.end(), body.begin(), body.end());
  return message;
}

Message read_request(std::uint64_t unique, std::uint64_t offset, std::uint32_t size,
                     std::uint64_t nodeid = kNode, std::uint32_t pid = 0) {
  fuse::ReadIn in{};
  in.offset = offset;
  in.size = size;
  return request(fuse::kRead, unique, join(in), nodeid, pid);
}

Message init_request(std::uint64_t unique = 2) {
  fuse::InitIn in{};
  in.major = 7;
  in.minor = 45;
  in.flags = static_cast<std::uint32_t>(fuse::kAsyncRead | fuse::kMaxPages | fuse::kInitExt);
  in.flags2 = static_cast<std::uint32_t>((fuse::kPassthrough | fuse::kHasResend) >> 32);
  return request(fuse::kInit, unique, join(in));
}

Message reply_to(const Message& message, int error, const Message& body) {
  const auto in = *fuse::body_as<fuse::InHeader>(message);
  auto reply = join(
      fuse::OutHeader{static_cast<std::uint32_t>(sizeof(fuse::OutHeader) + body.size()), -error, in.unique});
  reply.insert(reply.end(), body.begin(), body.end());
  return reply;
}

Message init_reply_to(const Message& message) {
  fuse::InitOut out{};
  out.major = 7;
  out.minor = 38;
  out.max_write = 1 << 20;
  return reply_to(message, 0, join(out));
}

void expect_file_bytes(const Reply& reply, std::uint64_t offset, std::size_t length) {
  EXPECT_EQ(reply.header.error, 0);
  ASSERT_EQ(reply.body.size(), length);
  for (std::size_t i = 0; i < length; ++i) {
    ASSERT_EQ(reply.body[i], byte_at(offset + i)) << "at " << i;
  }
}

class SessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "session-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    state_dir_ = pattern;
  }
  void TearDown() override {
    session_.reset();
    std::filesystem::remove_all(state_dir_);
  }

  SessionOptions options() const {
    SessionOptions options;
    options.state_dir = state_dir_;
    options.threads = 3;
    return options;
  }

  // Starts a session (with INIT done unless told otherwise).
  void start(SessionOptions options, bool init = true) {
    auto [device, kernel] = make_device();
    kernel_.emplace(kernel);
    session_ = Session::attach(std::move(device), std::move(options));
    connect();
    if (init) exchange_init();
  }
  void connect() {
    peer_.emplace(session_->control_fd());
    session_->add_file(kNode, file_);
    session_->start();
  }
  Reply exchange_init() {
    kernel_->send(init_request());
    const auto forwarded = peer_->receive();
    EXPECT_EQ(forwarded, init_request());
    peer_->send(init_reply_to(forwarded));
    return parse_reply(kernel_->receive());
  }
  // Lets another session take over a new device, as after a crash; the old one lives on in `old`.
  std::unique_ptr<Session> take_over(SessionOptions options) {
    auto old = std::move(session_);
    old->stop();
    auto [device, kernel] = make_device();
    kernel_.emplace(kernel);
    session_ = Session::resume(std::move(device), std::move(options));
    connect();
    return old;
  }
  std::uint64_t statistic(const char* name) const { return session_->statistics().at(name); }
  void wait_for(const std::function<bool()>& condition) const {
    for (int i = 0; i < kDeadlineMs / 5 && !condition(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(condition());
  }

  std::string state_dir_;
  std::shared_ptr<ScriptedFile> file_ = std::make_shared<ScriptedFile>();
  std::unique_ptr<Session> session_;
  std::optional<Wire> kernel_;
  std::optional<Wire> peer_;
};

TEST_F(SessionTest, InitIsForwardedAndItsReplyRaised) {
  start(options(), false);
  const auto reply = exchange_init();
  const auto out = *fuse::body_as<fuse::InitOut>(reply.body);
  EXPECT_EQ(reply.header.unique, 2U);
  EXPECT_EQ(out.max_pages, 256);
  EXPECT_EQ(out.max_background, 64);
  EXPECT_LE(out.max_write, 131072U);
  EXPECT_TRUE(std::filesystem::exists(state_dir_ + "/init"));
}

TEST_F(SessionTest, ReadsOfAFileAreAnswered) {
  start(options());
  kernel_->send(read_request(10, 4096, 4096));
  auto reply = parse_reply(kernel_->receive());
  EXPECT_EQ(reply.header.unique, 10U);
  expect_file_bytes(reply, 4096, 4096);
  kernel_->send(read_request(12, 1 << 20, 1 << 20));
  expect_file_bytes(parse_reply(kernel_->receive()), 1 << 20, 1 << 20);
  kernel_->send(read_request(14, kFileBytes - 100, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), kFileBytes - 100, 100);
  kernel_->send(read_request(16, kFileBytes + 100, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 0);
  EXPECT_TRUE(peer_->is_silent());
  EXPECT_EQ(statistic("reads"), 4U);
}

TEST_F(SessionTest, ErrorsOfAFileBecomeErrnos) {
  start(options());
  file_->fail_with(EIO);
  kernel_->send(read_request(10, 0, 4096));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EIO);
  EXPECT_EQ(statistic("read_errors"), 1U);
  kernel_->send(read_request(12, 0, 8 << 20));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EINVAL);
}

TEST_F(SessionTest, WaitingReadsAreAnsweredInAnyOrder) {
  start(options());
  file_->miss(true);
  kernel_->send(read_request(10, 0, 4096));
  auto first = file_->next();
  kernel_->send(read_request(12, 8192, 4096));
  auto second = file_->next();
  EXPECT_EQ(statistic("parked"), 2U);
  ScriptedFile::answer(std::move(second));
  auto reply = parse_reply(kernel_->receive());
  EXPECT_EQ(reply.header.unique, 12U);
  expect_file_bytes(reply, 8192, 4096);
  first.reply->error(ETIMEDOUT);
  reply = parse_reply(kernel_->receive());
  EXPECT_EQ(reply.header.unique, 10U);
  EXPECT_EQ(reply.header.error, -ETIMEDOUT);
  wait_for([&] { return statistic("parked") == 0; });
}

TEST_F(SessionTest, AForgottenReadIsAnsweredWithEio) {
  start(options());
  file_->miss(true);
  kernel_->send(read_request(10, 0, 4096));
  file_->next().reply.reset();
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EIO);
}

TEST_F(SessionTest, AWaitingReadIsAnsweredAfterTheSessionIsGone) {
  start(options());
  file_->miss(true);
  kernel_->send(read_request(10, 4096, 4096));
  auto waiting = file_->next();
  session_.reset();
  ScriptedFile::answer(std::move(waiting));
  expect_file_bytes(parse_reply(kernel_->receive()), 4096, 4096);
}

TEST_F(SessionTest, OtherRequestsAndRepliesPassUnchanged) {
  start(options());
  constexpr std::uint32_t kLookup = 1;
  const auto lookup = request(kLookup, 20, Message(9, std::byte{'x'}), 1);
  kernel_->send(lookup);
  EXPECT_EQ(peer_->receive(), lookup);
  const auto reply = reply_to(lookup, 0, Message(128, std::byte{7}));
  peer_->send(reply);
  EXPECT_EQ(kernel_->receive(), reply);
  const auto forget = request(fuse::kForget, 22, Message(8));
  kernel_->send(forget);
  EXPECT_EQ(peer_->receive(), forget);
  EXPECT_EQ(statistic("pending"), 0U);
  // A notification: unique 0.
  const auto notification = join(fuse::OutHeader{sizeof(fuse::OutHeader) + 24, 2, 0}, std::array<char, 24>{});
  peer_->send(notification);
  EXPECT_EQ(kernel_->receive(), notification);
}

TEST_F(SessionTest, LargeReadsOfThePeerAreAskedInPieces) {
  start(options());
  constexpr std::uint32_t kSize = 1 << 20;
  kernel_->send(read_request(30, 12288, kSize, 99));
  std::size_t given = 0;
  while (given < kSize) {
    const auto piece = peer_->receive();
    const auto read = *fuse::body_as<fuse::ReadIn>(std::span(piece).subspan(sizeof(fuse::InHeader)));
    ASSERT_EQ(read.offset, 12288 + given);
    ASSERT_LE(read.size, 128U << 10);
    Message bytes(read.size);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(read.offset + i);
    given += bytes.size();
    peer_->send(reply_to(piece, 0, bytes));
  }
  expect_file_bytes(parse_reply(kernel_->receive()), 12288, kSize);

  kernel_->send(read_request(32, 0, kSize, 99));  // the file ends within the second piece
  auto piece = peer_->receive();
  peer_->send(reply_to(piece, 0, Message(128U << 10, std::byte{1})));
  piece = peer_->receive();
  peer_->send(reply_to(piece, 0, Message(100, std::byte{2})));
  EXPECT_EQ(parse_reply(kernel_->receive()).body.size(), (128U << 10) + 100);

  kernel_->send(read_request(34, 0, kSize, 99));  // an error in the second piece
  piece = peer_->receive();
  peer_->send(reply_to(piece, 0, Message(128U << 10)));
  peer_->send(reply_to(peer_->receive(), EIO, {}));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EIO);
  EXPECT_EQ(statistic("pending"), 0U);
}

TEST_F(SessionTest, MalformedMessagesAreDropped) {
  start(options());
  kernel_->send(Message(17));
  auto wrong_length = read_request(10, 0, 4096);
  wrong_length.push_back({});
  kernel_->send(wrong_length);
  peer_->send(Message(3));
  wait_for([&] { return statistic("malformed") == 3; });
  kernel_->send(request(fuse::kRead, 12, Message(8)));  // shorter than a READ
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EINVAL);
  kernel_->send(read_request(14, 0, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 4096);
}

TEST_F(SessionTest, InterruptsOfThePeersRequestsReachIt) {
  start(options());
  constexpr std::uint32_t kGetattr = 3;
  kernel_->send(request(kGetattr, 40, Message(16)));
  EXPECT_EQ(peer_->receive(), request(kGetattr, 40, Message(16)));
  const auto interrupt = request(fuse::kInterrupt, 41, join(fuse::InterruptIn{40}), 0);
  kernel_->send(interrupt);
  EXPECT_EQ(peer_->receive(), interrupt);
}

TEST_F(SessionTest, AnInterruptThatOvertakesItsRequestIsKept) {
  auto only_one = options();
  only_one.threads = 1;
  start(only_one);
  kernel_->send(request(fuse::kInterrupt, 51, join(fuse::InterruptIn{50}), 0));
  constexpr std::uint32_t kGetattr = 3;
  kernel_->send(request(kGetattr, 50, Message(16)));
  EXPECT_EQ(peer_->receive(), request(kGetattr, 50, Message(16)));
  const auto interrupt = peer_->receive();
  EXPECT_EQ(fuse::body_as<fuse::InHeader>(interrupt)->opcode, fuse::kInterrupt);
  EXPECT_EQ(fuse::body_as<fuse::InterruptIn>(std::span(interrupt).subspan(sizeof(fuse::InHeader)))->unique,
            50U);
}

TEST_F(SessionTest, AnInterruptedReadWaitsOnUnlessItsReaderDies) {
  start(options());
  file_->miss(true);
  kernel_->send(read_request(60, 0, 4096, kNode, static_cast<std::uint32_t>(::getpid())));
  auto waiting = file_->next();
  kernel_->send(request(fuse::kInterrupt, 61, join(fuse::InterruptIn{60}), 0));
  EXPECT_TRUE(kernel_->is_silent());
  ScriptedFile::answer(std::move(waiting));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 4096);

  const pid_t gone = ::fork();
  if (gone == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(gone, nullptr, 0), gone);
  kernel_->send(read_request(62, 0, 4096, kNode, static_cast<std::uint32_t>(gone)));
  waiting = file_->next();
  kernel_->send(request(fuse::kInterrupt, 63, join(fuse::InterruptIn{62}), 0));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EINTR);
  ScriptedFile::answer(std::move(waiting));  // too late, and not sent
  EXPECT_TRUE(kernel_->is_silent());
  EXPECT_EQ(statistic("interrupted_reads"), 1U);
}

TEST_F(SessionTest, OpensAreMarkedAndPassthroughFallsBack) {
  const auto path = state_dir_ + "/local";
  std::ofstream(path) << "some bytes";
  start(options());
  session_->add_file(kNode + 1, std::make_shared<LocalFile>(path, true));
  const fuse::OpenOut out{77, fuse::kFopenDirectIo, 0};
  for (const auto& [node, flags] : {std::pair{kNode, fuse::kFopenDirectIo | fuse::kFopenNoflush},
                                    std::pair{kNode + 1, fuse::kFopenDirectIo | fuse::kFopenNoflush},
                                    std::pair{kNode + 2, fuse::kFopenDirectIo}}) {
    kernel_->send(request(fuse::kOpen, 70 + node * 2, join(fuse::OpenIn{O_RDONLY, 0}), node));
    peer_->send(reply_to(peer_->receive(), 0, join(out)));
    const auto reply = parse_reply(kernel_->receive());
    const auto open = *fuse::body_as<fuse::OpenOut>(reply.body);
    EXPECT_EQ(open.fh, 77U);
    EXPECT_EQ(open.open_flags, flags);
  }
  EXPECT_EQ(statistic("passthrough_fallbacks"), 1U);  // a socket has no such ioctl
  EXPECT_EQ(statistic("open_nodes"), 3U);
  kernel_->send(request(fuse::kRelease, 90, Message(24)));
  peer_->send(reply_to(peer_->receive(), 0, {}));
  kernel_->receive();
  EXPECT_EQ(statistic("open_nodes"), 2U);
  // One that is sent again after a crash may have been counted.
  kernel_->send(request(fuse::kRelease, 92 | fuse::kUniqueResend, Message(24), kNode + 1));
  peer_->send(reply_to(peer_->receive(), 0, {}));
  kernel_->receive();
  EXPECT_EQ(statistic("open_nodes"), 2U);
}

TEST_F(SessionTest, WritingOpensOfFilesAreRefused) {
  start(options());
  kernel_->send(request(fuse::kOpen, 80, join(fuse::OpenIn{O_RDWR, 0})));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EROFS);
  EXPECT_TRUE(peer_->is_silent());
}

TEST_F(SessionTest, ReadsGoOnWhenThePeerIsGone) {
  start(options());
  peer_->close();
  wait_for([&] { return statistic("control_lost") == 1; });
  constexpr std::uint32_t kLookup = 1;
  kernel_->send(request(kLookup, 20, Message(9, std::byte{'x'}), 1));
  kernel_->send(read_request(22, 0, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 4096);
  EXPECT_TRUE(kernel_->is_silent());  // the lookup waits for a successor
  EXPECT_EQ(statistic("pending"), 1U);
}

TEST_F(SessionTest, ReadsGoOnWhileThePeerIsSlow) {
  start(options());
  // More than the socket holds.
  constexpr std::uint64_t kRequests = 4000;
  constexpr std::uint32_t kLookup = 1;
  for (std::uint64_t i = 0; i < kRequests; ++i)
    kernel_->send(request(kLookup, 1000 + 2 * i, Message(4000), 1));
  kernel_->send(read_request(10, 0, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 4096);
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < kRequests; ++i)
    seen.insert(fuse::body_as<fuse::InHeader>(peer_->receive())->unique);
  EXPECT_EQ(seen.size(), kRequests);
}

TEST_F(SessionTest, EndOfTheDeviceIsAnnounced) {
  start(options());
  EXPECT_FALSE(session_->ended());
  kernel_->close();
  pollfd poll_fd{session_->ended_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&poll_fd, 1, kDeadlineMs), 1);
  EXPECT_TRUE(session_->ended());
}

TEST_F(SessionTest, StartsOnlyOnce) {
  start(options());
  EXPECT_THROW(session_->start(), Error);
  session_->stop();
  session_->stop();
}

TEST_F(SessionTest, SuccessorReplaysInitAndAsksForTheRest) {
  start(options());
  const auto old = take_over(options());
  EXPECT_EQ(peer_->receive(), init_request());
  const auto resend = parse_reply(kernel_->receive());
  EXPECT_EQ(resend.header.unique, 0U);
  EXPECT_EQ(resend.header.error, fuse::kNotifyResend);
  peer_->send(init_reply_to(init_request()));
  EXPECT_TRUE(kernel_->is_silent());  // the kernel has its answer
  kernel_->send(read_request(10 | fuse::kUniqueResend, 4096, 4096));
  const auto reply = parse_reply(kernel_->receive());
  EXPECT_EQ(reply.header.unique, 10 | fuse::kUniqueResend);
  expect_file_bytes(reply, 4096, 4096);
  EXPECT_TRUE(std::get<bool>(session_->info().values.at("passthrough")));
}

TEST_F(SessionTest, SuccessorAnswersAnInitThatWasRecordedButNotSent) {
  start(options());
  const auto old = take_over(options());
  EXPECT_EQ(peer_->receive(), init_request());
  kernel_->receive();  // resend
  const auto unique = 2 | fuse::kUniqueResend;
  kernel_->send(init_request(unique));
  const auto reply = parse_reply(kernel_->receive());
  EXPECT_EQ(reply.header.unique, unique);
  EXPECT_EQ(fuse::body_as<fuse::InitOut>(reply.body)->max_pages, 256);
  EXPECT_TRUE(peer_->is_silent());
}

TEST_F(SessionTest, SuccessorOfAnUnansweredInitGoesThroughItAll) {
  start(options(), false);
  kernel_->send(init_request());
  peer_->receive();
  const auto old = take_over(options());
  kernel_->receive();  // resend
  EXPECT_TRUE(peer_->is_silent());
  exchange_init();
  kernel_->send(read_request(10, 0, 4096));
  expect_file_bytes(parse_reply(kernel_->receive()), 0, 4096);
}

TEST_F(SessionTest, SuccessorWithoutARecordSaysSo) {
  start(options());
  std::filesystem::remove(state_dir_ + "/init");
  const auto old = take_over(options());
  kernel_->receive();  // resend
  constexpr std::uint32_t kLookup = 1;
  kernel_->send(request(kLookup, 20, Message(9), 1));
  EXPECT_EQ(parse_reply(kernel_->receive()).header.error, -EIO);
  EXPECT_NE(std::get<std::string>(session_->info().values.at("last_error")), "");
}

TEST_F(SessionTest, JournalNamesTheUnansweredRequests) {
  auto journaled = options();
  journaled.journal = JournalMode::always;
  start(journaled);
  file_->miss(true);
  constexpr std::uint32_t kLookup = 1;
  const auto lookup = request(kLookup, 20, Message(9, std::byte{'x'}), 1);
  kernel_->send(lookup);
  peer_->receive();
  kernel_->send(read_request(22, 4096, 4096));
  const auto lost = file_->next();
  kernel_->send(request(kLookup, 24, Message(6000), 1));  // too long for a slot
  peer_->receive();
  file_->miss(false);
  kernel_->send(read_request(26, 0, 4096));  // answered: not to be seen again
  kernel_->receive();

  const auto old = take_over(journaled);
  EXPECT_EQ(peer_->receive(), init_request());
  std::map<std::uint64_t, Reply> replies;
  for (int i = 0; i < 2; ++i) {
    const auto reply = parse_reply(kernel_->receive());
    replies[reply.header.unique] = reply;
  }
  expect_file_bytes(replies[22], 4096, 4096);
  EXPECT_EQ(replies[24].header.error, -EIO);
  EXPECT_EQ(peer_->receive(), lookup);
  const auto found = reply_to(lookup, 0, Message(128));
  peer_->send(found);
  EXPECT_EQ(kernel_->receive(), found);
  EXPECT_TRUE(kernel_->is_silent());
  EXPECT_EQ(statistic("replayed_requests"), 3U);
}

TEST_F(SessionTest, ManyReadersAtOnce) {
  start(options());
  constexpr std::uint64_t kReads = 3000;
  std::atomic<bool> done{false};
  // A third of the reads has to wait for this thread.
  std::thread origin([&] {
    while (!done) {
      file_->miss(true);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      file_->miss(false);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::thread answers([&] {
    while (!done) {
      // Polls, as nothing may be waiting.
      if (statistic("parked") > 0) ScriptedFile::answer(file_->next());
    }
  });
  for (std::uint64_t i = 0; i < kReads; ++i) {
    kernel_->send(read_request(100 + 2 * i, (i % 700) * 4096, 4096));
    const auto reply = parse_reply(kernel_->receive());
    ASSERT_EQ(reply.header.unique, 100 + 2 * i);
    expect_file_bytes(reply, (i % 700) * 4096, 4096);
  }
  done = true;
  origin.join();
  answers.join();
}

TEST(SessionOptionsTest, ResumeWithoutStateIsRefused) {
  SessionOptions options;
  options.state_dir = "/nonexistent/bootseer";
  EXPECT_THROW(Session::resume(UniqueFd(), options), Error);
}

}  // namespace
}  // namespace bootseer
