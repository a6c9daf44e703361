"""What every room may use: files that are whole or absent, JSON lines, names of things, the environment. No torch."""
