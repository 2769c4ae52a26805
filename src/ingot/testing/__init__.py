"""Test suites that every codec, format and store inherits, with references and strategies. Ships with the package."""
