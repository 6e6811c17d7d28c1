// Byte ranges over HTTP(S). One thread drives every transfer through curl's multi interface: connections are
// kept alive and reused, HTTP/2 streams share one where the server offers it.
#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

#include "bootseer/source.hpp"

namespace bootseer {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr long kReceiveBufferBytes = 256L * 1024;
constexpr std::size_t kMaxErrorBodyBytes =
    64ULL * 1024;  // read and dropped to keep the connection; more is cut
constexpr milliseconds kFirstBackoff{100};
constexpr milliseconds kMaxBackoff{5000};
constexpr milliseconds kMaxRetryAfter{30000};
constexpr std::size_t kPriorities = 3;

struct ListDeleter {
  void operator()(curl_slist* list) const noexcept { curl_slist_free_all(list); }
};
struct EasyDeleter {
  void operator()(CURL* easy) const noexcept { curl_easy_cleanup(easy); }
};
struct MultiDeleter {
  void operator()(CURLM* multi) const noexcept { curl_multi_cleanup(multi); }
};
using Easy = std::unique_ptr<CURL, EasyDeleter>;

// What the head of the current answer says. A redirect or an interim answer starts a new one.
struct AnswerHead {
  std::string content_range;
  std::string content_encoding;
};

struct Transfer {
  Source::Ticket ticket = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Priority priority = Priority::demand;
  std::shared_ptr<FetchSink> sink;

  std::uint64_t received = 0;  // over all attempts
  unsigned attempts = 0;
  Clock::time_point due{};
  // Of the current attempt:
  Easy easy;
  AnswerHead head;
  bool head_checked = false;
  std::size_t error_body_bytes = 0;
  Clock::time_point heard{};  // when the origin last gave a sign of life
  FetchOutcome outcome;
  std::array<char, CURL_ERROR_SIZE> error_text{};
};

bool header_is(std::string_view line, std::string_view name, std::string_view& value) {
  if (line.size() <= name.size() || line[name.size()] != ':') return false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const char c = line[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c) != name[i]) return false;
  }
  value = line.substr(name.size() + 1);
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  while (!value.empty() && (value.back() == '\r' || value.back() == '\n' || value.back() == ' ')) {
    value.remove_suffix(1);
  }
  return true;
}

// "bytes FIRST-LAST/TOTAL" (RFC 9110, 14.4) names exactly [offset, offset + length)?
bool range_matches(std::string_view text, std::uint64_t offset, std::uint64_t length) {
  constexpr std::string_view kUnit = "bytes ";
  if (!text.starts_with(kUnit)) return false;
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  const char* const end = text.data() + text.size();
  const auto [dash, first_error] = std::from_chars(text.data() + kUnit.size(), end, first);
  if (first_error != std::errc{} || dash == end || *dash != '-') return false;
  const auto [slash, last_error] = std::from_chars(dash + 1, end, last);
  if (last_error != std::errc{} || slash == end || *slash != '/') return false;
  return first == offset && last == offset + length - 1;
}

Fault fault_of(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
      return Fault::connect;
    case CURLE_OPERATION_TIMEDOUT:
      return Fault::timeout;
    case CURLE_PARTIAL_FILE:
      return Fault::short_body;
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_UNSUPPORTED_PROTOCOL:
      return Fault::redirect;
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CIPHER:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
      return Fault::tls;
    default:
      return Fault::reset;
  }
}

bool is_worth_retrying(Fault fault, long status) {
  switch (fault) {
    case Fault::cancelled:
    case Fault::tls:
    case Fault::redirect:
    case Fault::range_ignored:
    case Fault::bad_encoding:
    case Fault::not_found:
      return false;
    case Fault::http_status:
      return status == 408 || status == 425 || status == 429 || status >= 500;
    default:
      return true;
  }
}

void require(CURLcode code) {
  if (code != CURLE_OK) throw Error(Errc::internal, std::string("curl: ") + curl_easy_strerror(code));
}

class HttpSource final : public Source {
 public:
  HttpSource(std::string url, const SourceOptions& options) : url_(std::move(url)), options_(options) {
    static const CURLcode global = curl_global_init(CURL_GLOBAL_DEFAULT);
    require(global);
    for (const auto& [name, value] : options_.headers) {
      const auto breaks = [](const std::string& text) {
        return text.find_first_of("\r\n") != std::string::npos;
      };
      if (name.empty() || breaks(name) || breaks(value)) {
        throw Error(Errc::usage, "a header has an empty name or a line break");
      }
      // A header without value is spelled with a semicolon (CURLOPT_HTTPHEADER).
      add_header(value.empty() ? name + ";" : std::string(name).append(": ").append(value));
    }
    set_description();
    multi_.reset(curl_multi_init());
    if (!multi_) throw Error(Errc::internal, "curl: out of memory");
    const auto connections =
        static_cast<long>(options_.max_connections) + static_cast<long>(kDemandConnections);
    curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, connections);
    curl_multi_setopt(multi_.get(), CURLMOPT_PIPELINING, long{CURLPIPE_MULTIPLEX});
    thread_ = std::thread([this] { run(); });
  }

  ~HttpSource() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    curl_multi_wakeup(multi_.get());
    thread_.join();
  }

  Ticket fetch(std::uint64_t offset, std::uint64_t length, Priority priority,
               std::shared_ptr<FetchSink> sink) override {
    auto transfer = std::make_unique<Transfer>();
    transfer->offset = offset;
    transfer->length = length;
    transfer->priority = priority;
    transfer->sink = std::move(sink);
    Ticket ticket = 0;
    {
      const std::lock_guard lock(mutex_);
      ticket = transfer->ticket = ++last_ticket_;
      incoming_.push_back(std::move(transfer));
    }
    curl_multi_wakeup(multi_.get());
    return ticket;
  }

  void promote(Ticket ticket) noexcept override { post(promoted_, ticket); }
  void cancel(Ticket ticket) noexcept override { post(cancelled_, ticket); }

  SourceStatistics statistics() const noexcept override {
    return {.requests = requests_.load(std::memory_order_relaxed),
            .retries = retries_.load(std::memory_order_relaxed),
            .connections = connections_.load(std::memory_order_relaxed),
            .body_bytes = body_bytes_.load(std::memory_order_relaxed)};
  }

  std::string last_failure() const override {
    const std::lock_guard lock(mutex_);
    return last_failure_;
  }

  std::string describe() const override { return description_; }

 private:
  void add_header(const std::string& line) {
    curl_slist* const before = headers_.release();
    curl_slist* const longer = curl_slist_append(before, line.c_str());
    headers_.reset(longer == nullptr ? before : longer);
    if (longer == nullptr) throw Error(Errc::internal, "curl: out of memory");
  }

  void set_description() {
    const std::unique_ptr<CURLU, decltype(&curl_url_cleanup)> parsed(curl_url(), curl_url_cleanup);
    if (!parsed || curl_url_set(parsed.get(), CURLUPART_URL, url_.c_str(), 0) != CURLUE_OK) {
      throw Error(Errc::usage, "not a valid URL");
    }
    for (const CURLUPart part : {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_QUERY, CURLUPART_FRAGMENT}) {
      curl_url_set(parsed.get(), part, nullptr, 0);
    }
    char* text = nullptr;
    if (curl_url_get(parsed.get(), CURLUPART_URL, &text, 0) == CURLUE_OK) description_ = text;
    curl_free(text);
    is_tls_ = description_.starts_with("https://");
  }

  void post(std::vector<Ticket>& list, Ticket ticket) noexcept {
    {
      const std::lock_guard lock(mutex_);
      list.push_back(ticket);
    }
    curl_multi_wakeup(multi_.get());
  }

  // ---- the thread ----

  void run() {
    while (take_commands()) {
      start_due();
      int running = 0;
      curl_multi_perform(multi_.get(), &running);
      int left = 0;
      while (const CURLMsg* message = curl_multi_info_read(multi_.get(), &left)) {
        if (message->msg == CURLMSG_DONE) attempt_done(message->easy_handle, message->data.result);
      }
      stop_silent();
      if (start_due()) continue;  // a finished transfer may have made room
      curl_multi_poll(multi_.get(), nullptr, 0, wait_ms(), nullptr);
    }
    for (auto& [easy, transfer] : active_) {
      curl_multi_remove_handle(multi_.get(), easy);
      waiting_.push_back(std::move(transfer));
    }
    active_.clear();
    for (auto& transfer : waiting_) transfer->sink->done({Fault::cancelled, "cancelled"});
    waiting_.clear();
  }

  // curl's own low-speed check averages over seconds; a stalled connection should not cost that much more
  // than the limit.
  void stop_silent() {
    const auto limit = silence_limit();
    const auto now = Clock::now();
    std::vector<CURL*> silent;
    for (const auto& [easy, transfer] : active_) {
      if (now - transfer->heard < limit) continue;
      if (transfer->outcome.fault == Fault::none)
        transfer->outcome = {Fault::timeout, "the origin is silent"};
      silent.push_back(easy);
    }
    for (CURL* easy : silent) attempt_done(easy, CURLE_OPERATION_TIMEDOUT);
  }

  Clock::duration silence_limit() const {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(options_.connect_timeout_s));
  }

  // False when it is time to stop.
  bool take_commands() {
    std::vector<Ticket> promoted;
    std::vector<Ticket> cancelled;
    bool stopping = false;
    {
      const std::lock_guard lock(mutex_);
      for (auto& transfer : incoming_) waiting_.push_back(std::move(transfer));
      incoming_.clear();
      promoted.swap(promoted_);
      cancelled.swap(cancelled_);
      stopping = stopping_;
    }
    for (const Ticket ticket : promoted) {
      if (Transfer* transfer = find(ticket)) transfer->priority = Priority::demand;
    }
    for (const Ticket ticket : cancelled) cancel_now(ticket);
    return !stopping;
  }

  Transfer* find(Ticket ticket) {
    for (auto& transfer : waiting_) {
      if (transfer->ticket == ticket) return transfer.get();
    }
    for (auto& [easy, transfer] : active_) {
      if (transfer->ticket == ticket) return transfer.get();
    }
    return nullptr;
  }

  void cancel_now(Ticket ticket) {
    std::unique_ptr<Transfer> found;
    const auto is_it = [ticket](const std::unique_ptr<Transfer>& t) { return t->ticket == ticket; };
    if (const auto at = std::find_if(waiting_.begin(), waiting_.end(), is_it); at != waiting_.end()) {
      found = std::move(*at);
      waiting_.erase(at);
    } else {
      for (auto active = active_.begin(); active != active_.end(); ++active) {
        if (active->second->ticket != ticket) continue;
        found = std::move(active->second);
        curl_multi_remove_handle(multi_.get(), active->first);
        active_.erase(active);
        break;
      }
    }
    if (found) found->sink->done({Fault::cancelled, "cancelled"});
  }

  bool start_due() {
    const auto now = Clock::now();
    bool started = false;
    for (std::size_t level = 0; level < kPriorities; ++level) {
      const auto limit = options_.max_connections + (level == 0 ? kDemandConnections : 0);
      for (auto at = waiting_.begin(); at != waiting_.end() && active_.size() < limit;) {
        if ((*at)->priority != static_cast<Priority>(level) || (*at)->due > now) {
          ++at;
          continue;
        }
        auto transfer = std::move(*at);
        at = waiting_.erase(at);
        start(std::move(transfer));
        started = true;
      }
    }
    return started;
  }

  void start(std::unique_ptr<Transfer> transfer) {
    if (!idle_.empty()) {
      transfer->easy = std::move(idle_.back());
      idle_.pop_back();
    } else {
      transfer->easy.reset(curl_easy_init());
    }
    CURL* easy = transfer->easy.get();
    try {
      if (easy == nullptr) throw Error(Errc::internal, "curl: out of memory");
      configure(easy, *transfer);
    } catch (const Error& error) {
      transfer->sink->done({Fault::connect, error.what()});
      return;
    }
    transfer->head = {};
    transfer->head_checked = false;
    transfer->heard = Clock::now();
    transfer->error_body_bytes = 0;
    transfer->outcome = {};
    ++transfer->attempts;
    requests_.fetch_add(1, std::memory_order_relaxed);
    active_.emplace(easy, std::move(transfer));
    curl_multi_add_handle(multi_.get(), easy);
  }

  void configure(CURL* easy, Transfer& transfer) {
    const auto ms = [](double seconds) { return std::max(1L, std::lround(seconds * 1000)); };
    const std::uint64_t first = transfer.offset + transfer.received;
    const std::string range =
        std::to_string(first) + "-" + std::to_string(transfer.offset + transfer.length - 1);
    curl_easy_reset(easy);
    transfer.error_text[0] = '\0';
    require(curl_easy_setopt(easy, CURLOPT_URL, url_.c_str()));
    require(curl_easy_setopt(easy, CURLOPT_RANGE, range.c_str()));
    require(curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers_.get()));
    require(curl_easy_setopt(easy, CURLOPT_USERAGENT, "bootseer/0.1"));
    require(curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, transfer.error_text.data()));
    require(curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L));
    require(curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L));
    require(curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, kReceiveBufferBytes));
    require(curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_2TLS)));
    require(curl_easy_setopt(easy, CURLOPT_PIPEWAIT, is_tls_ ? 1L : 0L));
    require(curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, ms(options_.connect_timeout_s)));
    require(curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, ms(options_.request_timeout_s)));
    if (!options_.ca_file.empty()) require(curl_easy_setopt(easy, CURLOPT_CAINFO, options_.ca_file.c_str()));
    require(curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L));
    require(curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 5L));
    require(curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https"));
    // A redirect must not take away the encryption that the user asked for.
    require(curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS_STR, is_tls_ ? "https" : "http,https"));
    require(curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, &HttpSource::on_header));
    require(curl_easy_setopt(easy, CURLOPT_HEADERDATA, &transfer));
    require(curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, &HttpSource::on_body));
    require(curl_easy_setopt(easy, CURLOPT_WRITEDATA, &transfer));
    require(curl_easy_setopt(easy, CURLOPT_PRIVATE, this));
  }

  static std::size_t on_header(char* data, std::size_t, std::size_t size, void* user) {
    auto& transfer = *static_cast<Transfer*>(user);
    transfer.heard = Clock::now();
    const std::string_view line(data, size);
    std::string_view value;
    if (line.starts_with("HTTP/")) transfer.head = {};
    if (header_is(line, "content-range", value)) transfer.head.content_range = value;
    if (header_is(line, "content-encoding", value)) transfer.head.content_encoding = value;
    return size;
  }

  // Decides by the head of the answer whether its body may be passed on. Sets the outcome when not.
  static void check_head(Transfer& transfer) {
    CURL* easy = transfer.easy.get();
    long status = 0;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    curl_off_t body_bytes = -1;
    curl_easy_getinfo(easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &body_bytes);
    const std::uint64_t first = transfer.offset + transfer.received;
    const std::uint64_t wanted = transfer.length - transfer.received;
    const auto refuse = [&](Fault fault, const std::string& message) { transfer.outcome = {fault, message}; };
    const std::string& encoding = transfer.head.content_encoding;
    if (status == 200) {
      refuse(Fault::range_ignored, "the origin answers a range request with the whole object (200)");
    } else if (status == 404 || status == 410) {
      refuse(Fault::not_found, "the origin says " + std::to_string(status));
    } else if (status != 206) {
      refuse(Fault::http_status, "the origin says " + std::to_string(status));
    } else if (!encoding.empty() && encoding != "identity") {
      refuse(Fault::bad_encoding, "the origin encodes a range (" + encoding.substr(0, 32) + ")");
    } else if (!range_matches(transfer.head.content_range, first, wanted)) {
      refuse(Fault::wrong_range, "the origin sends another range than asked for (" +
                                     transfer.head.content_range.substr(0, 64) + ")");
    } else if (body_bytes >= 0 && static_cast<std::uint64_t>(body_bytes) < wanted) {
      refuse(Fault::short_body, "the origin announces a body shorter than the range");
    } else if (body_bytes >= 0 && static_cast<std::uint64_t>(body_bytes) > wanted) {
      refuse(Fault::long_body, "the origin announces a body longer than the range");
    }
  }

  static std::size_t on_body(char* data, std::size_t, std::size_t size, void* user) {
    auto& transfer = *static_cast<Transfer*>(user);
    transfer.heard = Clock::now();
    if (!transfer.head_checked) {
      transfer.head_checked = true;
      check_head(transfer);
    }
    void* self = nullptr;
    curl_easy_getinfo(transfer.easy.get(), CURLINFO_PRIVATE, &self);
    static_cast<HttpSource*>(self)->body_bytes_.fetch_add(size, std::memory_order_relaxed);
    if (transfer.outcome.fault == Fault::http_status || transfer.outcome.fault == Fault::not_found) {
      transfer.error_body_bytes += size;
      return transfer.error_body_bytes <= kMaxErrorBodyBytes ? size : 0;
    }
    if (transfer.outcome.fault != Fault::none) return 0;
    const std::uint64_t wanted = transfer.length - transfer.received;
    const auto usable = static_cast<std::size_t>(std::min<std::uint64_t>(size, wanted));
    if (usable > 0) {
      transfer.received += usable;
      if (!transfer.sink->data(std::as_bytes(std::span(data, usable)))) {
        transfer.outcome = {Fault::cancelled, "cancelled"};
        return 0;
      }
    }
    if (usable < size) {
      transfer.outcome = {Fault::long_body, "the origin sends more bytes than the range has"};
      return 0;
    }
    return size;
  }

  void attempt_done(CURL* easy, CURLcode code) {
    const auto at = active_.find(easy);
    if (at == active_.end()) return;
    auto transfer = std::move(at->second);
    active_.erase(at);
    curl_multi_remove_handle(multi_.get(), easy);

    long connects = 0;
    curl_easy_getinfo(easy, CURLINFO_NUM_CONNECTS, &connects);
    connections_.fetch_add(static_cast<std::uint64_t>(std::max(0L, connects)), std::memory_order_relaxed);
    long status = 0;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    curl_off_t retry_after_s = 0;
    curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &retry_after_s);

    FetchOutcome outcome = std::move(transfer->outcome);
    if (outcome.fault == Fault::none && code != CURLE_OK) {
      const char* text =
          transfer->error_text[0] != '\0' ? transfer->error_text.data() : curl_easy_strerror(code);
      outcome = {fault_of(code), text};
    } else if (outcome.fault == Fault::none) {
      if (!transfer->head_checked) {  // an answer without body
        check_head(*transfer);
        outcome = std::move(transfer->outcome);
      }
      if (outcome.fault == Fault::none && transfer->received < transfer->length) {
        outcome = {Fault::short_body, "the origin's body ends before the range does"};
      }
    }
    idle_.push_back(std::move(transfer->easy));
    std::replace(outcome.message.begin(), outcome.message.end(), '\n', ' ');
    if (outcome.fault != Fault::cancelled) {
      const std::lock_guard lock(mutex_);
      last_failure_ = outcome.message;
    }

    if (outcome.fault == Fault::none) {
      transfer->sink->done(outcome);
    } else if (transfer->attempts <= options_.retries && is_worth_retrying(outcome.fault, status)) {
      retries_.fetch_add(1, std::memory_order_relaxed);
      transfer->due = Clock::now() + backoff(transfer->attempts, retry_after_s);
      waiting_.push_back(std::move(transfer));
    } else {
      outcome.message = description_ + ": " + outcome.message;
      transfer->sink->done(outcome);
    }
  }

  Clock::duration backoff(unsigned attempts, curl_off_t retry_after_s) {
    const auto exponential = std::min(kMaxBackoff, kFirstBackoff * (1 << std::min(attempts - 1, 6U)));
    // Jitter keeps the nodes of a cluster from coming back in step.
    std::uniform_real_distribution<double> jitter(0.5, 1.0);
    const milliseconds ours(std::lround(static_cast<double>(exponential.count()) * jitter(random_)));
    const auto theirs = std::min<milliseconds>(
        kMaxRetryAfter,
        milliseconds(1000 * std::min<curl_off_t>(std::max<curl_off_t>(retry_after_s, 0), 60)));
    return std::max(ours, theirs);
  }

  int wait_ms() const {
    auto soonest = Clock::now() + std::chrono::seconds(1);
    for (const auto& transfer : waiting_) {
      // What is due and still here waits for a free connection, which a finished transfer will announce.
      if (transfer->due > Clock::now()) soonest = std::min(soonest, transfer->due);
    }
    for (const auto& [easy, transfer] : active_)
      soonest = std::min(soonest, transfer->heard + silence_limit());
    const auto left = std::chrono::ceil<milliseconds>(soonest - Clock::now()).count();
    return static_cast<int>(std::clamp<long>(left, 0, 1000));
  }

  const std::string url_;
  const SourceOptions options_;
  std::unique_ptr<curl_slist, ListDeleter> headers_;
  std::string description_;
  bool is_tls_ = false;

  mutable std::mutex mutex_;  // guards the six below
  std::string last_failure_;
  std::vector<std::unique_ptr<Transfer>> incoming_;
  std::vector<Ticket> promoted_;
  std::vector<Ticket> cancelled_;
  Ticket last_ticket_ = 0;
  bool stopping_ = false;

  // Only the thread touches these.
  std::unique_ptr<CURLM, MultiDeleter> multi_;
  std::deque<std::unique_ptr<Transfer>> waiting_;
  std::unordered_map<CURL*, std::unique_ptr<Transfer>> active_;
  std::vector<Easy> idle_;
  std::minstd_rand random_{std::random_device{}()};

  std::atomic<std::uint64_t> requests_{0};
  std::atomic<std::uint64_t> retries_{0};
  std::atomic<std::uint64_t> connections_{0};
  std::atomic<std::uint64_t> body_bytes_{0};
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Source> make_http_source(const std::string& url, const SourceOptions& options) {
  if (options.max_connections == 0) throw Error(Errc::usage, "max_connections must be at least 1");
  if (!(options.connect_timeout_s > 0) || !(options.request_timeout_s > 0)) {
    throw Error(Errc::usage, "timeouts must be positive");
  }
  return std::make_shared<HttpSource>(url, options);
}

}  // namespace bootseer
