// What a pass over records of 16 bytes has seen. Plain data only, as in core/dtype.h.
#pragma once

namespace ingot {

struct RecordsSeen {
  bool one_key;       // every record has the key that was asked for
  bool other_filled;  // the other column holds something but +0 and -0
  bool exact;         // every float of the column is one of the type that was asked for
};

}  // namespace ingot
