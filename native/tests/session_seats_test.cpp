#include <gtest/gtest.h>

#include <bootseer/session_seats.hpp>
#include <thread>

namespace bootseer {
namespace {

using namespace std::chrono_literals;

TEST(Seats, OneWaitsWhileReadsAreQuick) {
  Seats seats(1, 3);
  const Seats::Clock::time_point now{1s};
  ASSERT_TRUE(seats.take());
  EXPECT_TRUE(seats.note(now, now + 10us));
  EXPECT_EQ(seats.seats(), 1U);
  seats.give();
  EXPECT_TRUE(seats.take());
}

TEST(Seats, ASlowReadLetsEverybodyInForAWhile) {
  Seats seats(1, 3);
  const Seats::Clock::time_point now{1s};
  ASSERT_TRUE(seats.take());
  std::thread second([&] { EXPECT_TRUE(seats.take()); });  // waits until the slow read is noted
  EXPECT_TRUE(seats.note(now, now + Seats::kSlow + 1us));
  second.join();
  EXPECT_EQ(seats.seats(), 3U);
  ASSERT_TRUE(seats.take());
  // Still within the while.
  EXPECT_TRUE(seats.note(now + 1ms, now + 1ms + 10us));
  EXPECT_EQ(seats.seats(), 3U);
  // After it: two of the three have to go.
  EXPECT_FALSE(seats.note(now + 1s, now + 1s + 10us));
  EXPECT_EQ(seats.seats(), 1U);
  seats.give();
  EXPECT_FALSE(seats.note(now + 1s, now + 1s + 10us));
  seats.give();
  EXPECT_TRUE(seats.note(now + 1s, now + 1s + 10us));
}

TEST(Seats, NobodyWaitsOnceShut) {
  Seats seats(1, 3);
  ASSERT_TRUE(seats.take());
  std::thread second([&] { EXPECT_FALSE(seats.take()); });
  seats.shut();
  second.join();
  EXPECT_FALSE(seats.take());
}

}  // namespace
}  // namespace bootseer
