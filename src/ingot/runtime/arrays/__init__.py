"""arrays"""
