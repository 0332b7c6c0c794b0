// A Python object's memory, for as long as the view lives. It comes through the buffer protocol, which, unlike
// array interfaces, hands over unaligned memory as it is.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace syncline {

class View {
 public:
  View(nanobind::handle object, bool is_written) {
    if (PyObject_GetBuffer(object.ptr(), &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw nanobind::python_error();
    }
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  unsigned char* bytes() const { return static_cast<unsigned char*>(view_.buf); }
  template <typename Word>
  Word* as() const {
    return static_cast<Word*>(view_.buf);
  }
  std::uint32_t* offsets() const { return static_cast<std::uint32_t*>(view_.buf); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace syncline
