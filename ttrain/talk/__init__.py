"""Talking to a model: chat, answers to many prompts, an endpoint. Each takes what `ttrain.references` finds."""
