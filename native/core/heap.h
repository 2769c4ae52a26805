// Release of freed memory that the C library retains.
#pragma once

namespace ingot {

// Returns freed memory to the system, if the C library has a function for it.
void release_freed();

}  // namespace ingot
