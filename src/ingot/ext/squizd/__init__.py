"""squizd"""
