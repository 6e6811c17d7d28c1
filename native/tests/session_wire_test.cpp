#include <gtest/gtest.h>

#include <bootseer/session_wire.hpp>
#include <vector>

namespace bootseer::fuse {
namespace {

template <class... Parts>
std::vector<std::byte> join(const Parts&... parts) {
  std::vector<std::byte> all;
  const auto add = [&](const auto& part) {
    const auto bytes = std::as_bytes(std::span(&part, 1));
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  (add(parts), ...);
  return all;
}

constexpr std::uint64_t kOfferedByNewKernel = kAsyncRead | kAsyncDio | kWritebackCache | kParallelDirops |
                                              kMaxPages | kInitExt | kPassthrough | kHasResend;

std::vector<std::byte> init_request(std::uint64_t offered) {
  InHeader header{};
  header.len = sizeof(InHeader) + sizeof(InitIn);
  header.opcode = kInit;
  header.unique = 2;
  InitIn in{};
  in.major = 7;
  in.minor = 45;
  in.max_readahead = 131072;
  in.flags = static_cast<std::uint32_t>(offered);
  in.flags2 = static_cast<std::uint32_t>(offered >> 32);
  return join(header, in);
}

std::vector<std::byte> init_reply(std::uint32_t flags = 0) {
  InitOut out{};
  out.major = 7;
  out.minor = 38;
  out.max_readahead = 131072;
  out.max_write = 1 << 20;
  out.flags = flags;
  return join(OutHeader{sizeof(OutHeader) + sizeof(InitOut), 0, 2}, out);
}

InitOut out_of(const std::vector<std::byte>& reply) {
  EXPECT_EQ(body_as<OutHeader>(reply)->len, reply.size());
  return *body_as<InitOut>(std::span(reply).subspan(sizeof(OutHeader)));
}

TEST(SessionWire, ParsesOnlyWholeRequests) {
  const auto whole = init_request(0);
  ASSERT_TRUE(parse_request(whole));
  EXPECT_EQ(parse_request(whole)->body.size(), sizeof(InitIn));
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(parse_request(std::span(whole).first(size)));
  auto longer = whole;
  longer.push_back({});
  EXPECT_FALSE(parse_request(longer));
}

TEST(SessionWire, RaisesWhatTheKernelOffers) {
  Negotiated negotiated;
  InitWishes wishes;
  wishes.max_write_bytes = 131072;
  const auto out =
      out_of(rewrite_init_reply(init_request(kOfferedByNewKernel), init_reply(), wishes, negotiated));
  EXPECT_EQ(out.max_pages, 256);
  EXPECT_EQ(out.max_write, 131072U);
  EXPECT_EQ(out.max_readahead, 1U << 20);
  EXPECT_EQ(out.max_background, 64);
  EXPECT_EQ(out.congestion_threshold, 48);
  EXPECT_EQ(out.max_stack_depth, 1U);
  EXPECT_EQ(out.minor, 40U);
  EXPECT_EQ(out.flags2, (kPassthrough | kHasResend) >> 32);
  EXPECT_TRUE(negotiated.passthrough);
  EXPECT_TRUE(negotiated.resend);
  EXPECT_EQ(negotiated.max_pages, 256U);
  EXPECT_TRUE(negotiated.fallbacks.empty());
}

TEST(SessionWire, AsksAnOldKernelForNothingItDoesNotOffer) {
  Negotiated negotiated;
  const auto out = out_of(rewrite_init_reply(init_request(kAsyncRead), init_reply(), {}, negotiated));
  EXPECT_EQ(out.flags, kAsyncRead);
  EXPECT_EQ(out.flags2, 0U);
  EXPECT_EQ(out.max_stack_depth, 0U);
  EXPECT_EQ(out.minor, 38U);
  EXPECT_EQ(negotiated.max_pages, 32U);
  EXPECT_FALSE(negotiated.passthrough);
  EXPECT_FALSE(negotiated.resend);
  EXPECT_TRUE(negotiated.fallbacks.contains("passthrough"));
  EXPECT_TRUE(negotiated.fallbacks.contains("resend"));
  EXPECT_TRUE(negotiated.fallbacks.contains("max_pages"));
}

TEST(SessionWire, PassthroughExcludesTheWritebackCache) {
  Negotiated negotiated;
  const auto request = init_request(kOfferedByNewKernel);
  const auto reply = init_reply(kWritebackCache);
  EXPECT_EQ(out_of(rewrite_init_reply(request, reply, {}, negotiated)).flags & kWritebackCache, 0U);
  InitWishes plain;
  plain.passthrough = false;
  const auto out = out_of(rewrite_init_reply(request, reply, plain, negotiated));
  EXPECT_EQ(out.flags & kWritebackCache, kWritebackCache);
  EXPECT_EQ(out.max_stack_depth, 0U);
  EXPECT_EQ(negotiated.fallbacks["passthrough"], "not wanted");
}

TEST(SessionWire, KeepsWhatThePeerAskedFor) {
  Negotiated negotiated;
  constexpr std::uint32_t kPeersOwn = 1U << 14;
  const auto out =
      out_of(rewrite_init_reply(init_request(kOfferedByNewKernel), init_reply(kPeersOwn), {}, negotiated));
  EXPECT_NE(out.flags & kPeersOwn, 0U);
}

TEST(SessionWire, ShortReplyOfAnOldPeerIsCompleted) {
  auto reply = init_reply();
  reply.resize(sizeof(OutHeader) + 24);
  OutHeader header{static_cast<std::uint32_t>(reply.size()), 0, 2};
  std::memcpy(reply.data(), &header, sizeof(header));
  Negotiated negotiated;
  const auto out = out_of(rewrite_init_reply(init_request(kOfferedByNewKernel), reply, {}, negotiated));
  EXPECT_EQ(out.major, 7U);
  EXPECT_EQ(out.max_pages, 256);
}

TEST(SessionWire, RefusedInitIsPassedOn) {
  const auto reply = join(OutHeader{sizeof(OutHeader), -71, 2});
  Negotiated negotiated;
  EXPECT_EQ(rewrite_init_reply(init_request(kOfferedByNewKernel), reply, {}, negotiated), reply);
  EXPECT_TRUE(negotiated.fallbacks.contains("init"));
}

TEST(SessionWire, RecordedExchangeIsUnderstood) {
  Negotiated sent;
  const auto request = init_request(kOfferedByNewKernel);
  const auto reply = rewrite_init_reply(request, init_reply(), {}, sent);
  const auto read = describe_init(request, reply);
  EXPECT_EQ(read.max_write_bytes, sent.max_write_bytes);
  EXPECT_EQ(read.flags, sent.flags);
  EXPECT_TRUE(read.passthrough);
  EXPECT_TRUE(read.resend);
  EXPECT_TRUE(describe_init(reply, request).fallbacks.contains("init"));
}

}  // namespace
}  // namespace bootseer::fuse
