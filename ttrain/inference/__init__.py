"""Load, generate, chat, and route between experts."""
