"""Graph rewrites."""
