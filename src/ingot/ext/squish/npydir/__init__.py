"""npydir"""
