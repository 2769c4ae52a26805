"""kernel_units"""
