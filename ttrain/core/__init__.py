"""Files, hashing, signals, redaction, terminal output; nothing of the domain."""
