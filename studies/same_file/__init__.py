"""One GGUF file in several engines, on the same prompts."""
