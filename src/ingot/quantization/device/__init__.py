"""Rounding of full matrices on a device, as torch operations without native code (``spec/quantizers.md``)."""
