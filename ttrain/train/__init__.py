"""The trainer that all training stages share, and its parts."""
