"""Apple Neural Engine: chips as data, kernel formats, which weights stream, packing. See ``spec/ane.md``.

Nothing here has run on Apple hardware: every answer carries the evidence that it rests on.
"""
