"""Test suites that authors of codecs, formats and stores inherit."""
