#include "bootseer/source.hpp"

#include <array>
#include <condition_variable>
#include <mutex>

namespace bootseer {
namespace {

struct FaultInfo {
  const char* name;
  Errc errc;
};
constexpr std::array<FaultInfo, kFaultCount> kFaults = {{
    {"none", Errc::internal},
    {"cancelled", Errc::backend},
    {"connect", Errc::backend},
    {"timeout", Errc::timeout},
    {"reset", Errc::backend},
    {"tls", Errc::backend},
    {"redirect", Errc::backend},
    {"http_status", Errc::backend},
    {"range_ignored", Errc::backend},
    {"wrong_range", Errc::backend},
    {"short_body", Errc::backend},
    {"long_body", Errc::backend},
    {"bad_encoding", Errc::backend},
    {"not_found", Errc::not_found},
    {"local_io", Errc::backend},
}};

class BlockingSink final : public FetchSink {
 public:
  explicit BlockingSink(std::uint64_t length) { bytes_.reserve(static_cast<std::size_t>(length)); }

  bool data(std::span<const std::byte> bytes) noexcept override {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return true;
  }

  void done(const FetchOutcome& outcome) noexcept override {
    const std::lock_guard lock(mutex_);
    outcome_ = outcome;
    is_done_ = true;
    changed_.notify_all();
  }

  std::vector<std::byte> wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_done_; });
    if (outcome_.fault != Fault::none) throw Error(fault_errc(outcome_.fault), outcome_.message);
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  FetchOutcome outcome_;
  bool is_done_ = false;
};

bool starts_with_scheme(const std::string& uri, std::string_view scheme) {
  if (uri.size() < scheme.size()) return false;
  for (std::size_t i = 0; i < scheme.size(); ++i) {
    const char c = uri[i];
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (lower != scheme[i]) return false;
  }
  return true;
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string percent_decode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex_value(text[i + 1]) >= 0 && hex_value(text[i + 2]) >= 0) {
      out.push_back(static_cast<char>(hex_value(text[i + 1]) * 16 + hex_value(text[i + 2])));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

}  // namespace

const char* fault_name(Fault fault) noexcept {
  return kFaults[static_cast<std::size_t>(fault)].name;
}
Errc fault_errc(Fault fault) noexcept {
  return kFaults[static_cast<std::size_t>(fault)].errc;
}

std::vector<std::byte> Source::read(std::uint64_t offset, std::uint64_t length) {
  constexpr std::uint64_t kMaxReadBytes = 1U << 30;
  if (length > kMaxReadBytes) throw Error(Errc::usage, "read of more than 1 GiB at once");
  if (length == 0) return {};
  const auto sink = std::make_shared<BlockingSink>(length);
  fetch(offset, length, Priority::demand, sink);
  return sink->wait();
}

std::shared_ptr<Source> open_source(const std::string& uri, const SourceOptions& options) {
  if (starts_with_scheme(uri, "http://") || starts_with_scheme(uri, "https://")) {
    return make_http_source(uri, options);
  }
  if (starts_with_scheme(uri, "file://")) {
    const std::string path = percent_decode(std::string_view(uri).substr(7));
    if (!path.starts_with('/')) throw Error(Errc::usage, "a file URI needs an absolute path: " + uri);
    return make_file_source(path);
  }
  if (uri.find("://") != std::string::npos) {
    throw Error(Errc::usage, "unknown kind of origin: " + uri.substr(0, uri.find("://")));
  }
  return make_file_source(uri);
}

}  // namespace bootseer
