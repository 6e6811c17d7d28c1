// Runs a fuzz entry point over a fixed number of pseudo-random inputs, so that a compiler without libFuzzer
// still exercises it in every test run.
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main() {
  std::mt19937 random(20261201);
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::uint8_t> input(random() % 512);
    for (auto& byte : input) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}
