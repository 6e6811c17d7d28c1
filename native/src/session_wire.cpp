#include <unistd.h>

#include <algorithm>
#include <bootseer/session_wire.hpp>

namespace bootseer::fuse {
namespace {

std::uint64_t flags_of(std::uint32_t flags, std::uint32_t flags2) {
  std::uint64_t all = flags;
  if ((flags & kInitExt) != 0) all |= static_cast<std::uint64_t>(flags2) << 32;
  return all;
}

// INIT grew over time: what an old peer leaves out is zero.
template <class T>
T padded(std::span<const std::byte> body) {
  T value{};
  std::memcpy(&value, body.data(), std::min(body.size(), sizeof(T)));
  return value;
}

constexpr std::size_t kOldestInitBytes = 16;  // major, minor, max_readahead, flags

struct InitExchange {
  OutHeader reply_header{};
  std::uint64_t offered = 0;
  InitOut out{};
};

std::optional<InitExchange> parse_init(std::span<const std::byte> request, std::span<const std::byte> reply) {
  const auto in = parse_request(request);
  const auto header = body_as<OutHeader>(reply);
  if (!in || in->header.opcode != kInit || in->body.size() < kOldestInitBytes) return std::nullopt;
  if (!header || header->error != 0 || header->len != reply.size()) return std::nullopt;
  const auto body = reply.subspan(sizeof(OutHeader));
  if (body.size() < kOldestInitBytes) return std::nullopt;
  const auto init = padded<InitIn>(in->body);
  InitExchange exchange{*header, flags_of(init.flags, init.flags2), padded<InitOut>(body)};
  if (exchange.out.major != init.major) return std::nullopt;
  return exchange;
}

void describe(const InitExchange& exchange, Negotiated& negotiated) {
  const auto& out = exchange.out;
  negotiated.minor = out.minor;
  negotiated.flags = flags_of(out.flags, out.flags2);
  negotiated.max_write_bytes = out.max_write;
  negotiated.max_pages = (negotiated.flags & kMaxPages) != 0 ? out.max_pages : 32;
  negotiated.max_readahead_bytes = out.max_readahead;
  negotiated.max_background = out.max_background;
  negotiated.congestion_threshold = out.congestion_threshold;
  negotiated.passthrough = (negotiated.flags & kPassthrough) != 0;
  negotiated.resend = (exchange.offered & kHasResend) != 0;
}

}  // namespace

std::optional<Request> parse_request(std::span<const std::byte> message) noexcept {
  const auto header = body_as<InHeader>(message);
  if (!header || header->len != message.size()) return std::nullopt;
  return Request{*header, message.subspan(sizeof(InHeader))};
}

bool expects_reply(std::uint32_t opcode) noexcept {
  return opcode != kForget && opcode != kBatchForget && opcode != kInterrupt && opcode != kNotifyReply;
}

std::vector<std::byte> rewrite_init_reply(std::span<const std::byte> request,
                                          std::span<const std::byte> reply, const InitWishes& wishes,
                                          Negotiated& negotiated) {
  negotiated = {};
  auto exchange = parse_init(request, reply);
  if (!exchange) {
    negotiated.fallbacks["init"] = "the control peer refused INIT or answered in another protocol version";
    return {reply.begin(), reply.end()};
  }
  auto& out = exchange->out;
  const auto offered = exchange->offered;
  auto flags = flags_of(out.flags, out.flags2);

  flags |= offered & (kAsyncRead | kAsyncDio | kParallelDirops | kInitExt);
  if ((offered & kMaxPages) != 0) {
    const auto page_bytes = static_cast<std::uint32_t>(::sysconf(_SC_PAGESIZE));
    const auto pages =
        (std::max(wishes.max_read_bytes, std::min(out.max_write, wishes.max_write_bytes)) + page_bytes - 1) /
        page_bytes;
    flags |= kMaxPages;
    out.max_pages = static_cast<std::uint16_t>(std::min<std::uint32_t>(pages, UINT16_MAX));
  } else {
    negotiated.fallbacks["max_pages"] = "the kernel does not offer requests above 128 KiB (needs 4.20)";
  }
  out.max_write = std::min(out.max_write, wishes.max_write_bytes);
  out.max_readahead = std::max(out.max_readahead, wishes.max_readahead_bytes);
  out.max_background = std::max(out.max_background, wishes.max_background);
  out.congestion_threshold = std::max(
      out.congestion_threshold, static_cast<std::uint16_t>(out.max_background - out.max_background / 4));

  if (!wishes.passthrough) {
    negotiated.fallbacks["passthrough"] = "not wanted";
  } else if ((offered & kPassthrough) == 0) {
    negotiated.fallbacks["passthrough"] =
        "the kernel does not offer it (needs 6.9 and CONFIG_FUSE_PASSTHROUGH)";
  } else {
    flags |= kPassthrough;
    flags &= ~kWritebackCache;  // the kernel refuses the pair
    // 1: the files behind us lie on a file system that is not stacked itself.
    out.max_stack_depth = 1;
    out.minor = std::max<std::uint32_t>(out.minor, 40);
  }
  if ((offered & kHasResend) != 0) {
    flags |= kHasResend;
    out.minor = std::max<std::uint32_t>(out.minor, 40);
  } else {
    negotiated.fallbacks["resend"] = "the kernel cannot resend requests (needs 6.9)";
  }

  out.flags = static_cast<std::uint32_t>(flags);
  out.flags2 = (flags & kInitExt) != 0 ? static_cast<std::uint32_t>(flags >> 32) : 0;
  describe(*exchange, negotiated);

  OutHeader header = exchange->reply_header;
  header.len = sizeof(OutHeader) + sizeof(InitOut);
  std::vector<std::byte> message(header.len);
  std::memcpy(message.data(), &header, sizeof(header));
  std::memcpy(message.data() + sizeof(header), &out, sizeof(out));
  return message;
}

Negotiated describe_init(std::span<const std::byte> request, std::span<const std::byte> reply) {
  Negotiated negotiated;
  if (const auto exchange = parse_init(request, reply)) {
    describe(*exchange, negotiated);
    if (!negotiated.passthrough) negotiated.fallbacks["passthrough"] = "not negotiated when this was mounted";
    if (!negotiated.resend) negotiated.fallbacks["resend"] = "the kernel cannot resend requests (needs 6.9)";
  } else {
    negotiated.fallbacks["init"] = "the recorded INIT exchange is not one";
  }
  return negotiated;
}

}  // namespace bootseer::fuse
