// Release of freed memory that the C library retains.
#pragma once

namespace ingot {

// Give pages of freed memory back to the system, where the C library has a way to.
void release_freed();

}  // namespace ingot
