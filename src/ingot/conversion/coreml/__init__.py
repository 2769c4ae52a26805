"""coreml"""
