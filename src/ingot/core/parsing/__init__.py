"""Strict parsers: CBOR, JSON, protobuf, tables of records."""
