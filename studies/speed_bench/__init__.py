"""llama.cpp's client of SPEED-Bench, run as it is against this server."""
