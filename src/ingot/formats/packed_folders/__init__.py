"""packed_folders"""
