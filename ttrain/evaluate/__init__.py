"""Numbers that a user can trust: bits per byte, losses on chats, samples, baselines."""
