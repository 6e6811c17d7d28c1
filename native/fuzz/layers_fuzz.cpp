// Arbitrary bytes as image layers: an error or a tree, and then an image of it. The bytes are taken twice: as
// an archive, and as a script for a well-formed one, which gets past the header checksums.
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "bootseer/erofs_writer.hpp"
#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"
#include "bootseer/tree.hpp"

namespace {

constexpr std::array<const char*, 12> kNames{
    "a", "a/b", "a/b/c", "a/.wh.b", "a/.wh..wh..opq", ".wh.a", "./", "../x", "/d", "d/../e", "l", "l/x"};
constexpr std::array<char, 8> kTypes{'0', '1', '2', '3', '4', '5', '6', 'Z'};

// One ustar header (POSIX.1-1988) with a right checksum; entries have no body.
void add_entry(std::string& tar, std::span<const std::uint8_t> script) {
  std::array<char, 512> header{};
  std::strncpy(header.data(), kNames[script[0] % kNames.size()], 100);
  std::snprintf(header.data() + 100, 8, "%07o", script[1] * 16U);
  std::snprintf(header.data() + 108, 8, "%07o", script[2] * 1U);
  std::snprintf(header.data() + 116, 8, "%07o", 0U);
  std::snprintf(header.data() + 124, 12, "%011o", 0U);
  std::snprintf(header.data() + 136, 12, "%011o", script[2] * 1000U);
  header[156] = kTypes[script[3] % kTypes.size()];
  std::strncpy(header.data() + 157, kNames[script[4] % kNames.size()], 100);
  std::memcpy(header.data() + 257, "ustar\00000", 8);
  std::memset(header.data() + 148, ' ', 8);
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  std::snprintf(header.data() + 148, 8, "%06o", sum);
  tar.append(header.data(), header.size());
}

void convert(const std::vector<std::string>& layers) {
  std::vector<bootseer::UniqueFd> files;
  std::vector<std::string> paths;
  for (const std::string& layer : layers) {
    files.emplace_back(::memfd_create("layer", MFD_CLOEXEC));
    paths.push_back("/proc/self/fd/" + std::to_string(files.back().get()));
    if (::write(files.back().get(), layer.data(), layer.size()) != static_cast<ssize_t>(layer.size())) return;
  }
  const bootseer::UniqueFd image(::memfd_create("image", MFD_CLOEXEC));
  try {
    bootseer::Tree tree = bootseer::Tree::from_layers(paths, "/tmp");
    bootseer::write_erofs(tree, "/proc/self/fd/" + std::to_string(image.get()), {});
  } catch (const bootseer::Error&) {
  } catch (const std::system_error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  convert({std::string(reinterpret_cast<const char*>(data), size)});
  constexpr std::size_t kScriptBytes = 5;
  std::vector<std::string> layers(2);
  for (std::size_t at = 0; at + kScriptBytes <= size && at < 40 * kScriptBytes; at += kScriptBytes) {
    add_entry(layers[at / kScriptBytes % 2], std::span(data, size).subspan(at, kScriptBytes));
  }
  for (std::string& layer : layers) layer.append(1024, '\0');
  convert(layers);
  return 0;
}
