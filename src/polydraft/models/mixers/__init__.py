"""The parts that layers are made of, a kind a file, see `program`. Each is a compiled function with a tuple of arguments, and its code's address."""
