"""chips"""
