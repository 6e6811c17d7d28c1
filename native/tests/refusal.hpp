// Why an action refuses what it is given.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "bootseer/error.hpp"

namespace bootseer::test {

// The message of the Error(integrity), which must be one line; "accepted" when there was none.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::integrity);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "accepted";
}

}  // namespace bootseer::test
