// Takes a fuzz input apart, front to back; zeros when there is no more.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

class Source {
 public:
  Source(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  // Below `limit`, from two bytes.
  std::uint32_t number(std::uint32_t limit) { return word<std::uint16_t>() % limit; }

  template <typename Word>
  Word word() {
    Word value = 0;
    take(&value, sizeof value);
    return value;
  }

  // Copies of exact size, so that a sanitizer sees an over-read.
  template <typename Word = unsigned char>
  std::vector<Word> list(std::size_t count) {
    std::vector<Word> out(count);
    out.shrink_to_fit();
    take(out.data(), count * sizeof(Word));
    return out;
  }

  std::size_t size() const { return size_; }

 private:
  void take(void* to, std::size_t size) {
    const std::size_t found = size_ < size ? size_ : size;
    if (found != 0) std::memcpy(to, data_, found);
    data_ += found;
    size_ -= found;
  }

  const std::uint8_t* data_;
  std::size_t size_;
};
