"""Layouts: the arrangement of a codec's numbers in a tensor's parts, one frozen class per family of codecs."""
