"""Exports of finished models, and the endpoint that serves one."""
