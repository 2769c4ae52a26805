// Strict CBOR as tables are decoded from it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/cbor.h"
#include "core/table.h"

namespace ingot::table {

// The bytes as strict CBOR. Errors of its cursor are doubts: who looks closely finds them again.
class Cbor {
 public:
  struct Frame {
    std::uint64_t left;
    std::string_view last = {};  // key
    bool begun = false;
  };

  Cbor(std::string_view data, cbor::Limits limits)
      : cursor_(reinterpret_cast<const std::uint8_t*>(data.data()), data.size(), limits),
        deterministic_(limits.deterministic) {}

  std::size_t position() const { return cursor_.position(); }
  std::uint64_t number() {
    if (std::uint64_t quick; cursor_.quick_number(quick)) {
      if (quick > INT64_MAX) throw Doubt{};
      return quick;
    }
    const cbor::Item item = want(cbor::Kind::kUnsigned);
    if (item.value > INT64_MAX) throw Doubt{};
    return item.value;
  }
  std::string_view text() {
    if (std::string_view quick; cursor_.quick_text(quick)) return quick;
    return want(cbor::Kind::kText).bytes;
  }
  bool text_is(std::string_view text) { return cursor_.quick_text_is(text); }
  Frame map() { return entered(cbor::Kind::kMap); }
  bool key(Frame& frame, std::string_view& key) {
    if (!element(frame)) return false;
    if (!cursor_.quick_text(key)) key = cursor_.key().bytes;
    follow(frame, key);
    return true;
  }
  bool key_is(Frame& frame, std::string_view text) {
    if (frame.left == 0 || !cursor_.quick_text_is(text)) return false;
    --frame.left;
    follow(frame, text);
    return true;
  }
  Frame array() { return entered(cbor::Kind::kArray); }
  bool element(Frame& frame) {
    if (frame.left == 0) {
      cursor_.leave();
      return false;
    }
    --frame.left;
    return true;
  }
  // Recursion ends at the depth limit.
  void skip() {
    const cbor::Item item = cursor_.next();
    if (item.kind == cbor::Kind::kArray) {
      cursor_.enter(item);
      for (std::uint64_t i = 0; i < item.value; ++i) skip();
      cursor_.leave();
    } else if (item.kind == cbor::Kind::kMap) {
      cursor_.enter(item);
      std::vector<std::string_view> keys;
      Frame frame{item.value};
      for (std::uint64_t i = 0; i < item.value; ++i) {
        keys.push_back(cursor_.key().bytes);
        follow(frame, keys.back());
        skip();
      }
      cursor_.leave();
      std::sort(keys.begin(), keys.end());
      if (std::adjacent_find(keys.begin(), keys.end()) != keys.end()) throw Doubt{};
    }
  }
  void finish() const { cursor_.finish(); }

 private:
  cbor::Item want(cbor::Kind kind) {
    const cbor::Item item = cursor_.next();
    if (item.kind != kind) throw Doubt{};
    return item;
  }
  Frame entered(cbor::Kind kind) {
    const cbor::Item item = want(kind);
    cursor_.enter(item);
    return {item.value};
  }
  void follow(Frame& frame, std::string_view key) const {
    if (deterministic_ && frame.begun && !cbor::in_order(frame.last, key)) throw Doubt{};
    frame.last = key;
    frame.begun = true;
  }

  cbor::Cursor cursor_;
  bool deterministic_;
};

}  // namespace ingot::table
