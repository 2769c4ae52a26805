"""Extensions that ship with Ingot. They register like plugins, so packages such as formats and engine do not import
them.
"""
