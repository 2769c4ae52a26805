"""Stores: folders of named files on disks, in memory and on other machines."""
