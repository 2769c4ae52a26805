"""Merging of full models: linear, SLERP, task arithmetic, TIES and DARE."""
