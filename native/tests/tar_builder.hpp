// Layer tars byte by byte (POSIX ustar and pax), so that broken ones can be made too.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace bootseer::test {

struct TarEntry {
  std::string name{};
  char type =
      '0';  // '0' file, '1' hard link, '2' symbolic link, '3' char, '4' block, '5' directory, '6' fifo
  std::string content{};
  std::string link{};
  unsigned mode = 0644;
  unsigned uid = 0, gid = 0;
  std::uint64_t mtime_s = 1;
  unsigned dev_major = 0, dev_minor = 0;
  std::map<std::string, std::string> pax{};
};

class TarBuilder {
 public:
  TarBuilder& add(const TarEntry& entry) {
    if (!entry.pax.empty()) {
      TarEntry header{.name = "pax", .type = 'x'};
      for (const auto& [key, value] : entry.pax) header.content += pax_record(key, value);
      put(header);
    }
    put(entry);
    return *this;
  }
  TarBuilder& directory(const std::string& name) { return add({.name = name, .type = '5', .mode = 0755}); }
  TarBuilder& file(const std::string& name, const std::string& content) {
    return add({.name = name, .content = content});
  }
  TarBuilder& symlink(const std::string& name, const std::string& target) {
    return add({.name = name, .type = '2', .link = target});
  }
  TarBuilder& hardlink(const std::string& name, const std::string& target) {
    return add({.name = name, .type = '1', .link = target});
  }

  std::string finish() const { return bytes_ + std::string(1024, '\0'); }
  const std::string& unfinished() const { return bytes_; }

 private:
  static std::string pax_record(const std::string& key, const std::string& value) {
    std::size_t length = key.size() + value.size() + 3;
    for (std::size_t digits = 0; digits != std::to_string(length).size();) {
      digits = std::to_string(length).size();
      length = key.size() + value.size() + 3 + digits;
    }
    return std::to_string(length) + " " + key + "=" + value + "\n";
  }

  void put(const TarEntry& entry) {
    std::string header(512, '\0');
    const auto text = [&](std::size_t at, const std::string& value, std::size_t room) {
      std::memcpy(header.data() + at, value.data(), std::min(room, value.size()));
    };
    const auto octal = [&](std::size_t at, std::uint64_t value, int digits) {
      char field[24];
      std::snprintf(field, sizeof field, "%0*llo", digits, static_cast<unsigned long long>(value));
      text(at, field, static_cast<std::size_t>(digits));
    };
    text(0, entry.name, 100);
    octal(100, entry.mode, 7);
    octal(108, entry.uid, 7);
    octal(116, entry.gid, 7);
    octal(124, entry.content.size(), 11);
    octal(136, entry.mtime_s, 11);
    header[156] = entry.type;
    text(157, entry.link, 100);
    text(257, std::string("ustar\00000", 8), 8);
    octal(329, entry.dev_major, 7);
    octal(337, entry.dev_minor, 7);
    text(148, "        ", 8);
    unsigned sum = 0;
    for (const char byte : header) sum += static_cast<unsigned char>(byte);
    octal(148, sum, 6);
    header[154] = '\0';
    bytes_ += header + entry.content + std::string((512 - entry.content.size() % 512) % 512, '\0');
  }

  std::string bytes_;
};

}  // namespace bootseer::test
