// Everything of a session that parses bytes from the kernel, the control peer or the state directory.
#include <algorithm>
#include <bootseer/error.hpp>
#include <bootseer/session_mount.hpp>
#include <bootseer/session_state.hpp>
#include <bootseer/session_wire.hpp>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace bootseer;
  const auto bytes = std::as_bytes(std::span(data, size));
  if (const auto request = fuse::parse_request(bytes)) {
    if (request->body.size() + sizeof(fuse::InHeader) != size) std::abort();
    (void)fuse::body_as<fuse::ReadIn>(request->body);
  }

  // Two messages: the first byte says where one ends. Headers are made plausible, so that the bodies get
  // looked at.
  if (size > 1) {
    const std::size_t cut = std::min<std::size_t>(data[0], size - 1);
    std::vector<std::byte> request(sizeof(fuse::InHeader));
    request.insert(request.end(), bytes.begin() + 1, bytes.begin() + 1 + static_cast<std::ptrdiff_t>(cut));
    fuse::InHeader in{};
    in.len = static_cast<std::uint32_t>(request.size());
    in.opcode = fuse::kInit;
    in.unique = 2;
    std::memcpy(request.data(), &in, sizeof(in));
    std::vector<std::byte> reply(sizeof(fuse::OutHeader));
    reply.insert(reply.end(), bytes.begin() + 1 + static_cast<std::ptrdiff_t>(cut), bytes.end());
    const fuse::OutHeader out{static_cast<std::uint32_t>(reply.size()), 0, 2};
    std::memcpy(reply.data(), &out, sizeof(out));
    fuse::Negotiated negotiated;
    const auto rewritten = fuse::rewrite_init_reply(request, reply, {}, negotiated);
    if (fuse::body_as<fuse::OutHeader>(rewritten)->len != rewritten.size()) std::abort();
    const bool understood = !negotiated.fallbacks.contains("init");
    // What we sent, we understand.
    if (understood && fuse::describe_init(request, rewritten).fallbacks.contains("init")) std::abort();
  }

  try {
    const auto record = InitRecord::parse(bytes);
    if (InitRecord::parse(record.serialize()).request != record.request) std::abort();
  } catch (const Error&) {
  }

  {
    Journal journal("", 2);
    std::copy_n(bytes.begin(), std::min(size, Journal::kSlotBytes), journal.slot(0).begin());
    for (const auto& entry : journal.pending()) {
      if (entry.bytes < sizeof(fuse::InHeader)) std::abort();
    }
  }
  (void)find_mount(std::string(reinterpret_cast<const char*>(data), size), "/mnt");
  return 0;
}
