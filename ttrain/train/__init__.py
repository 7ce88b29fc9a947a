"""The one trainer under every stage, and its parts."""
