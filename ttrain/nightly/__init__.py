"""Inputs and records of nights, and notifications."""
