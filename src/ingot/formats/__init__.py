"""Formats: conversion of parts to files and back, without arithmetic on weights; ``detect.py`` has their table."""
