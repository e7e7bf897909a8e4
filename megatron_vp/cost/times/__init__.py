"""How long one pass, message or collective takes."""
