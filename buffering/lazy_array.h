// A large array of plain values, all zero, whose memory the system gives page by page as it is touched.
#pragma once

#include <cassert>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace millrace::buffering {

template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  explicit LazyArray(size_t size) : size_(size), data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
    if (data_ == nullptr && size != 0) throw std::bad_alloc();
  }
  T& operator[](size_t i) {
    assert(i < size_);
    return data_.get()[i];
  }
  const T& operator[](size_t i) const {
    assert(i < size_);
    return data_.get()[i];
  }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  size_t size_;
  std::unique_ptr<T, Free> data_;
};

}  // namespace millrace::buffering
