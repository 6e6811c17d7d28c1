#include "bootseer/sha256.hpp"

#include <openssl/evp.h>

#include <algorithm>

#include "bootseer/error.hpp"

namespace bootseer {
namespace {

struct ContextDeleter {
  void operator()(EVP_MD_CTX* context) const noexcept { EVP_MD_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_MD_CTX, ContextDeleter>;

Context new_context() {
  Context context(EVP_MD_CTX_new());
  if (!context) throw Error(Errc::internal, "sha256: out of memory");
  return context;
}

// EVP_sha256() makes OpenSSL 3 search its providers on every use; fetched once it is free.
const EVP_MD* algorithm() {
  static const EVP_MD* const fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  return fetched != nullptr ? fetched : EVP_sha256();
}

void check(int status) {
  if (status != 1) throw Error(Errc::internal, "sha256: the crypto library failed");
}

Digest finish(EVP_MD_CTX* context) {
  Digest digest;
  check(EVP_DigestFinal_ex(context, digest.data(), nullptr));
  return digest;
}

}  // namespace

Digest sha256(std::span<const std::byte> bytes) {
  thread_local const Context context = new_context();
  check(EVP_DigestInit_ex2(context.get(), algorithm(), nullptr));
  check(EVP_DigestUpdate(context.get(), bytes.data(), bytes.size()));
  return finish(context.get());
}

struct Sha256::State {
  Context context = new_context();
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  check(EVP_DigestInit_ex2(state_->context.get(), algorithm(), nullptr));
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  check(EVP_DigestUpdate(state_->context.get(), bytes.data(), bytes.size()));
}

Digest Sha256::finish() {
  return bootseer::finish(state_->context.get());
}

std::string to_hex(const Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * digest.size());
  for (std::uint8_t byte : digest) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

bool is_hex_digest(std::string_view text) noexcept {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace bootseer
