"""Kernel units (``.anek``): the weights of compiled Neural Engine programs."""
