"""squish"""
