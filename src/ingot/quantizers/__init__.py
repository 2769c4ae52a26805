"""How numbers are chosen: codes, scales and tables under statistics of a matrix. Codecs say how they are stored."""
