"""Targets: what a piece of hardware makes of stored weights. Beside codecs; knows them by their ids as text."""
