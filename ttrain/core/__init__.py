"""Files, hashing, signals, redaction, terminal output, progress: nothing here knows a word of the domain."""
