// Where the bytes of a blob come from. One interface for every kind of origin: byte ranges, asked for without
// waiting, delivered as they arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bootseer/error.hpp"

namespace bootseer {

enum class Priority : std::uint8_t { demand = 0, prefetch = 1, background = 2 };

// Why a fetch did not deliver. The names (fault_name) are stable: they appear in statistics.
enum class Fault : std::uint8_t {
  none,
  cancelled,
  connect,        // no connection: refused, unreachable, name unknown
  timeout,        // connected, but too slow or silent
  reset,          // the connection broke
  tls,            // certificate or handshake
  redirect,       // too many, or to a protocol that is not allowed (https to http)
  http_status,    // an answer other than 206
  range_ignored,  // 200 with the whole body
  wrong_range,    // 206 for other bytes than those asked for
  short_body,
  long_body,
  bad_encoding,  // Content-Encoding on a range
  not_found,     // 404, 410, or no such file
  local_io,      // error of the local file system
};
inline constexpr std::size_t kFaultCount = 15;
const char* fault_name(Fault fault) noexcept;
Errc fault_errc(Fault fault) noexcept;

struct FetchOutcome {
  Fault fault = Fault::none;
  std::string message;  // one line, without credentials
};

// Receives one range. Both functions are called from the source's own thread, never with a lock held, and
// must be quick: they hold up every other transfer.
class FetchSink {
 public:
  virtual ~FetchSink() = default;
  // The next bytes of the range, in order, without gaps or repeats even when the transfer was retried half
  // way. Never more than the range. Returning false cancels the rest.
  virtual bool data(std::span<const std::byte> bytes) noexcept = 0;
  // Called once, last. Unless the fault is none, fewer bytes than asked for have come.
  virtual void done(const FetchOutcome& outcome) noexcept = 0;
};

struct SourceStatistics {
  std::uint64_t requests = 0;     // attempts that were sent
  std::uint64_t retries = 0;      // attempts after the first
  std::uint64_t connections = 0;  // connections opened
  std::uint64_t body_bytes = 0;   // body bytes received, wasted ones included
};

// Thread safe. fetch() never blocks, never throws for what the origin does, and never calls the sink from
// within the call. The destructor cancels what is in flight and waits for the sinks' done().
class Source {
 public:
  using Ticket = std::uint64_t;

  virtual ~Source() = default;
  virtual Ticket fetch(std::uint64_t offset, std::uint64_t length, Priority priority,
                       std::shared_ptr<FetchSink> sink) = 0;
  // Moves a fetch that still waits for a connection before those of lower priority. Unknown tickets are
  // ignored.
  virtual void promote(Ticket ticket) noexcept = 0;
  // The sink hears done(cancelled), unless it was done already.
  virtual void cancel(Ticket ticket) noexcept = 0;
  virtual SourceStatistics statistics() const noexcept = 0;
  // Why the last attempt failed, while none has succeeded since; without credentials, one line.
  virtual std::string last_failure() const { return {}; }
  // For messages: no user, no query string.
  virtual std::string describe() const = 0;

  // Blocks. For small objects and tests.
  std::vector<std::byte> read(std::uint64_t offset, std::uint64_t length);
};

struct SourceOptions {
  std::map<std::string, std::string> headers;  // sent with each request; never logged
  double connect_timeout_s = 10.0;             // also the longest silence within an answer
  double request_timeout_s = 60.0;             // for one attempt
  unsigned retries = 5;                        // per fetch
  std::string ca_file;                         // PEM; empty: the system's authorities
  unsigned max_connections = 8;                // demand may use kDemandConnections more
};
inline constexpr unsigned kDemandConnections = 4;

// http://, https://, file:// or a path of a local file.
std::shared_ptr<Source> open_source(const std::string& uri, const SourceOptions& options = {});

// Behind open_source.
std::shared_ptr<Source> make_http_source(const std::string& url, const SourceOptions& options);
std::shared_ptr<Source> make_file_source(const std::string& path);

}  // namespace bootseer
