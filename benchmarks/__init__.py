"""Measurements of syncengine beside its peers: see README.md."""
