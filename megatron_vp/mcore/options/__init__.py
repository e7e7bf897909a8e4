"""What a user can ask for: arguments, configuration files, and what is refused or has no effect."""
