"""A small trained language model, shipped so that what compression does to real weights can be measured."""
