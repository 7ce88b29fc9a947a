"""A gate: several finished models, and a router that picks one of them for a text."""
