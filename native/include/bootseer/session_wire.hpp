// Parsing and rewriting of FUSE messages, without any I/O.
#pragma once

#include <bootseer/fuse_abi.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace bootseer::fuse {

struct Request {
  InHeader header{};
  std::span<const std::byte> body;
};

// Empty when the message is not exactly one request.
std::optional<Request> parse_request(std::span<const std::byte> message) noexcept;

// The first bytes of a body as a struct; empty when the body is too short.
template <class T>
std::optional<T> body_as(std::span<const std::byte> body) noexcept {
  static_assert(std::is_trivially_copyable_v<T>);
  if (body.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, body.data(), sizeof(T));
  return value;
}

// Whether the kernel waits for an answer to this request.
bool expects_reply(std::uint32_t opcode) noexcept;

// What the session asks of the kernel beyond what the control peer asks.
struct InitWishes {
  std::uint32_t max_read_bytes = 1U << 20;
  std::uint32_t max_write_bytes = 1U << 17;  // upper bound: a WRITE has to fit one control message
  std::uint32_t max_readahead_bytes = 1U << 20;
  std::uint16_t max_background = 64;
  bool passthrough = true;
};

// What an INIT reply says, in our words.
struct Negotiated {
  std::uint32_t minor = 0;
  std::uint64_t flags = 0;
  std::uint32_t max_write_bytes = 0;
  std::uint32_t max_pages = 0;
  std::uint32_t max_readahead_bytes = 0;
  std::uint32_t max_background = 0;
  std::uint32_t congestion_threshold = 0;
  bool passthrough = false;
  bool resend = false;                           // the kernel can send unanswered requests again
  std::map<std::string, std::string> fallbacks;  // capability → why it is not used
};

// The control peer's INIT reply (header included) with our wishes merged in, as far as the kernel's INIT
// request offers them. A reply that is an error, or that we do not understand, comes back unchanged and
// leaves `negotiated` at its defaults with a fallback "init".
std::vector<std::byte> rewrite_init_reply(std::span<const std::byte> request,
                                          std::span<const std::byte> reply, const InitWishes& wishes,
                                          Negotiated& negotiated);

// Reads an INIT reply that was sent before, e.g. from a recorded session.
Negotiated describe_init(std::span<const std::byte> request, std::span<const std::byte> reply);

}  // namespace bootseer::fuse
