// Statistics of a pass over records of 16 bytes. Plain data only, as in core/dtype.h.
#pragma once

namespace ingot {

struct RecordsSeen {
  bool one_key;       // every record has the requested key
  bool other_filled;  // the other column contains a value other than +0 and -0
  bool exact;         // every float of the column is representable in the requested type
};

}  // namespace ingot
