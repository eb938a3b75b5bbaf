"""Is the output the target's? Tested on real rounds and texts, with the mistakes that a test must find."""
