"""folding"""
