// A reader of strict CBOR for the decoder of tables.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/cbor.h"
#include "core/table.h"

namespace ingot::table {

// A reader of strict CBOR. Errors of its cursor become Doubt, because the slow parser reports them.
class Cbor {
 public:
  struct Frame {
    std::uint64_t remaining;
    std::string_view last = {};  // key
    bool has_begun = false;
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
    const cbor::Item item = want(cbor::Type::kUnsigned);
    if (item.value > INT64_MAX) throw Doubt{};
    return item.value;
  }
  std::string_view text() {
    if (std::string_view quick; cursor_.quick_text(quick)) return quick;
    return want(cbor::Type::kText).bytes;
  }
  bool text_is(std::string_view text) { return cursor_.quick_text_is(text); }
  Frame map() { return entered(cbor::Type::kMap); }
  bool key(Frame& frame, std::string_view& key) {
    if (!element(frame)) return false;
    if (!cursor_.quick_text(key)) key = cursor_.key().bytes;
    follow(frame, key);
    return true;
  }
  bool key_is(Frame& frame, std::string_view text) {
    if (frame.remaining == 0 || !cursor_.quick_text_is(text)) return false;
    --frame.remaining;
    follow(frame, text);
    return true;
  }
  Frame array() { return entered(cbor::Type::kArray); }
  bool element(Frame& frame) {
    if (frame.remaining == 0) {
      cursor_.leave();
      return false;
    }
    --frame.remaining;
    return true;
  }
  // Recursion ends at the depth limit.
  void skip() {
    const cbor::Item item = cursor_.next();
    if (item.type == cbor::Type::kArray) {
      cursor_.enter(item);
      for (std::uint64_t i = 0; i < item.value; ++i) skip();
      cursor_.leave();
    } else if (item.type == cbor::Type::kMap) {
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
  cbor::Item want(cbor::Type type) {
    const cbor::Item item = cursor_.next();
    if (item.type != type) throw Doubt{};
    return item;
  }
  Frame entered(cbor::Type type) {
    const cbor::Item item = want(type);
    cursor_.enter(item);
    return {item.value};
  }
  void follow(Frame& frame, std::string_view key) const {
    if (deterministic_ && frame.has_begun && !cbor::in_order(frame.last, key)) throw Doubt{};
    frame.last = key;
    frame.has_begun = true;
  }

  cbor::Cursor cursor_;
  bool deterministic_;
};

}  // namespace ingot::table
