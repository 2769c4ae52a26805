"""bytes"""
