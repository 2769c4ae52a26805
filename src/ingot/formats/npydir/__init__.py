"""Read and write Squish directories: one ``.npy`` file per array, and a manifest (spec/npydir.md)."""
