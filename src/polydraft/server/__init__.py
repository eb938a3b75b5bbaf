"""An OpenAI-compatible server over `AsyncEngine`; `polydraft serve` starts it."""
