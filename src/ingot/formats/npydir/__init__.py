"""Squish directories: one ``.npy`` file per array, a manifest beside them (spec/npydir.md)."""
