// GCC 12 warns of uninitialized values in its own AVX-512 headers (GCC bug 105593). Include this file before them.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
