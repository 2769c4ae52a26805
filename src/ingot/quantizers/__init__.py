"""Which numbers stand for a matrix: chosen by what the matrix multiplies. Codecs say how numbers are stored."""
