// Errors of the data plane. Inside we throw; bindings translate once (bindings/module.cpp).
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace bootseer {

// Why something failed, in the vocabulary of bootseer.core.errors (each maps to one Python class there).
enum class Errc {
  usage,      // the caller's mistake
  not_found,  // the thing asked for does not exist
  integrity,  // bytes do not match their digest, or a format is malformed
  backend,    // the origin cannot be reached, refuses, or answers wrongly
  timeout,    // a deadline passed
  internal,   // our bug
};

class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Errc code() const noexcept { return code_; }

 private:
  Errc code_;
};

[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace bootseer
