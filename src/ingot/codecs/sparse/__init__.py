"""Codecs of sparse tensors: single elements, masks, and blocks of rows or columns."""
