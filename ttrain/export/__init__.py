"""Exports of finished models."""
