"""Is the output the target's? Tested on real steps and texts, with the mistakes that a test must find."""
