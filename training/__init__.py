"""Makes model versions: fine-tunes, evaluates, exports. Knows nothing of HTTP or of how a version serves."""
