"""What a name means in a home, what it was made of, and how to make it again."""
